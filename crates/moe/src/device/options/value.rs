//! Option types: conversion from and to Python values, agreement fields, and kernel macros.

use crate::device::options::types::{DeviceLayout, IdWidth, ScaleLayout, TransferPath};
use crate::elements::dtype::DType;
use crate::elements::float8::Float8;
use crate::elements::token_type::{BlockScaled, ScaleType, TokenType};
use crate::shape::agreement::Field;
use crate::shape::config::Weighting;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;
use weft_gpu::MemoryKind;

/// Value that Python passes for a keyword.
#[derive(Clone, Debug, PartialEq)]
pub enum OptionValue {
    /// None.
    None,
    /// True or False.
    Flag(bool),
    /// An integer.
    Integer(i128),
    /// An integer beyond all options' ranges, as digits.
    LargeInteger(String),
    /// A floating-point number.
    Float(f64),
    /// A name.
    Text(String),
    /// A scale dtype, and the block size in elements.
    Scales(String, Box<OptionValue>),
    /// Another type's value, by type name.
    Unsupported(String),
}

/// Values that Python passes, by keyword.
pub type Keywords = BTreeMap<String, OptionValue>;

/// Option error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// The value is invalid.
    #[error("{0}")]
    InvalidValue(String),
    /// The type is invalid, or the keyword is missing or unknown.
    #[error("{0}")]
    InvalidType(String),
}

/// As a Python literal.
impl fmt::Display for OptionValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OptionValue::None => f.write_str("None"),
            OptionValue::Flag(true) => f.write_str("True"),
            OptionValue::Flag(false) => f.write_str("False"),
            OptionValue::Integer(number) => number.fmt(f),
            OptionValue::LargeInteger(text) => f.write_str(text),
            OptionValue::Float(number) => write!(f, "{number:?}"),
            OptionValue::Text(text) => write!(f, "{text:?}"),
            OptionValue::Scales(dtype, block) => write!(f, "({dtype:?}, {block})"),
            OptionValue::Unsupported(kind) => write!(f, "<{kind}>"),
        }
    }
}

/// Option type.
pub(super) trait OptionType: Sized {
    /// Python types for the keywords: in the native class, and in the arguments.
    fn types() -> Vec<(String, String)>;

    /// Values to pass in Python, by keyword.
    fn values(&self) -> Vec<OptionValue>;

    /// Reads the keyword values; keywords that were not passed leave it unchanged.
    fn read(&mut self, keywords: &[&str], given: &Keywords) -> Result<(), OptionError>;

    /// Fields that the ranks compare.
    fn agreed(&self, keywords: &[&'static str]) -> Vec<Field> {
        let shown = self.values().into_iter().map(|given| match given {
            OptionValue::None => "none".to_owned(),
            OptionValue::Text(text) => text,
            other => other.to_string(),
        });
        keywords.iter().copied().zip(shown).collect()
    }

    /// Kernel macro values.
    fn numbers(&self) -> Vec<u64> {
        Vec::new()
    }
}

/// The same type in the native class and as an argument.
fn plain(kind: &str) -> Vec<(String, String)> {
    vec![(kind.to_owned(), kind.to_owned())]
}

/// A dtype: a name in the native class, any object that names one as an argument.
fn dtype_like() -> Vec<(String, String)> {
    vec![("str".to_owned(), "object".to_owned())]
}

fn literal(names: &[&str]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    format!("Literal[{}]", names.join(", "))
}

fn wrong_type(keyword: &str, expected: &str, given: &OptionValue) -> OptionError {
    OptionError::InvalidType(format!("{keyword}={given}: expected {expected}; pass one"))
}

fn text<'a>(keyword: &str, given: &'a OptionValue) -> Result<&'a str, OptionError> {
    match given {
        OptionValue::Text(text) => Ok(text),
        other => Err(wrong_type(keyword, "a name", other)),
    }
}

/// The value with the passed name.
fn choose<T: Copy>(what: &str, given: &OptionValue, known: &[(&str, T)]) -> Result<T, OptionError> {
    let name = text(what, given)?;
    let found = known.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    found.ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        OptionError::InvalidValue(format!("{what} is {name:?}: {} are known", names.join(" and ")))
    })
}

fn name_of<T: PartialEq>(value: &T, known: &[(&'static str, T)]) -> OptionValue {
    let name = known.iter().find(|(_, known)| known == value).map_or("", |(name, _)| *name);
    OptionValue::Text(name.to_owned())
}

/// The number, if it is from 0 to `most`.
fn whole(keyword: &str, given: &OptionValue, most: u64) -> Result<u64, OptionError> {
    let number = match given {
        OptionValue::Integer(number) => {
            u64::try_from(*number).ok().filter(|number| *number <= most)
        }
        OptionValue::Flag(flag) => Some((*flag).into()),
        OptionValue::LargeInteger(_) => None,
        other => return Err(wrong_type(keyword, "a whole number", other)),
    };
    number.ok_or_else(|| {
        OptionError::InvalidValue(format!(
            "{keyword}={given}: expected a whole number from 0 to {most}; pass one of those"
        ))
    })
}

macro_rules! whole_numbers {
    ($($type:ident),*) => {$(
        impl OptionType for $type {
            fn types() -> Vec<(String, String)> {
                plain("int")
            }

            fn values(&self) -> Vec<OptionValue> {
                vec![OptionValue::Integer((*self).into())]
            }

            fn read(&mut self, keywords: &[&str], given: &Keywords) -> Result<(), OptionError> {
                let [keyword] = keywords else { return Ok(()) };
                if let Some(given) = given.get(*keyword) {
                    *self = whole(keyword, given, $type::MAX.into())? as $type;
                }
                Ok(())
            }

            fn numbers(&self) -> Vec<u64> {
                vec![(*self).into()]
            }
        }
    )*};
}

whole_numbers!(u32, u64);

/// None, or a value.
impl<T: OptionType + Default> OptionType for Option<T> {
    fn types() -> Vec<(String, String)> {
        let or_none =
            |(native, argument)| (format!("{native} | None"), format!("{argument} | None"));
        T::types().into_iter().map(or_none).collect()
    }

    fn values(&self) -> Vec<OptionValue> {
        self.as_ref().map_or(vec![OptionValue::None], OptionType::values)
    }

    fn read(&mut self, keywords: &[&str], given: &Keywords) -> Result<(), OptionError> {
        let [keyword] = keywords else { return Ok(()) };
        match given.get(*keyword) {
            None => Ok(()),
            Some(OptionValue::None) => {
                *self = None;
                Ok(())
            }
            Some(_) => self.insert(T::default()).read(keywords, given),
        }
    }
}

impl OptionType for bool {
    fn types() -> Vec<(String, String)> {
        plain("bool")
    }

    fn values(&self) -> Vec<OptionValue> {
        vec![OptionValue::Flag(*self)]
    }

    fn read(&mut self, keywords: &[&str], given: &Keywords) -> Result<(), OptionError> {
        for keyword in keywords {
            match given.get(*keyword) {
                None => {}
                Some(OptionValue::Flag(flag)) => *self = *flag,
                Some(other) => return Err(wrong_type(keyword, "True or False", other)),
            }
        }
        Ok(())
    }
}

/// Seconds.
impl OptionType for Duration {
    fn types() -> Vec<(String, String)> {
        plain("float")
    }

    fn values(&self) -> Vec<OptionValue> {
        vec![OptionValue::Float(self.as_secs_f64())]
    }

    fn read(&mut self, keywords: &[&str], given: &Keywords) -> Result<(), OptionError> {
        for keyword in keywords {
            let seconds = match given.get(*keyword) {
                None => continue,
                Some(OptionValue::Float(seconds)) => *seconds,
                Some(OptionValue::Integer(seconds)) => *seconds as f64,
                Some(other) => return Err(wrong_type(keyword, "seconds", other)),
            };
            *self = Duration::try_from_secs_f64(seconds).map_err(|_| {
                let message = format!("{keyword} is {seconds}: expected seconds from 0 on");
                OptionError::InvalidValue(message)
            })?;
        }
        Ok(())
    }
}

macro_rules! named {
    ($($type:ty: $types:expr, $known:expr, $number:expr;)*) => {$(
        impl OptionType for $type {
            fn types() -> Vec<(String, String)> {
                $types
            }

            fn values(&self) -> Vec<OptionValue> {
                vec![name_of(self, &$known)]
            }

            fn read(&mut self, keywords: &[&str], given: &Keywords) -> Result<(), OptionError> {
                for keyword in keywords {
                    if let Some(given) = given.get(*keyword) {
                        *self = choose(keyword, given, &$known)?;
                    }
                }
                Ok(())
            }

            fn numbers(&self) -> Vec<u64> {
                let number: fn(&$type) -> Vec<u64> = $number;
                number(self)
            }
        }
    )*};
}

const IDS: [(&str, IdWidth); 2] = [("int64", IdWidth::I64), ("int32", IdWidth::I32)];
const WEIGHTINGS: [(&str, Weighting); 2] =
    [("combine", Weighting::AtCombine), ("expert", Weighting::AtExpert)];
const SCALE_LAYOUTS: [(&str, ScaleLayout); 3] = [
    ("row", ScaleLayout::Row),
    ("column", ScaleLayout::Column),
    ("column_packed", ScaleLayout::ColumnPacked),
];
/// Options for GPUs; the twin has only one memory kind.
const MEMORIES: [(&str, MemoryKind); 2] = [("fd", MemoryKind::Fd), ("ipc", MemoryKind::Ipc)];

named! {
    IdWidth: dtype_like(), IDS, |ids| vec![ids.bytes() as u64];
    Weighting: plain("str"), WEIGHTINGS,
        |weighting| vec![(*weighting == Weighting::AtCombine).into()];
    ScaleLayout: plain(&literal(&SCALE_LAYOUTS.map(|(name, _)| name))), SCALE_LAYOUTS,
        |layout| vec![*layout as u64];
    MemoryKind: plain(&literal(&MEMORIES.map(|(name, _)| name))), MEMORIES, |_| Vec::new();
}

/// The macro is derived from the shape's path: see `DeviceShape::defines`.
impl OptionType for Option<TransferPath> {
    fn types() -> Vec<(String, String)> {
        plain(&format!("{} | None", literal(&TransferPath::ALL.map(TransferPath::name))))
    }

    fn values(&self) -> Vec<OptionValue> {
        vec![self.map_or(OptionValue::None, |path| OptionValue::Text(path.name().to_owned()))]
    }

    fn read(&mut self, keywords: &[&str], given: &Keywords) -> Result<(), OptionError> {
        let known = TransferPath::ALL.map(|path| (path.name(), path));
        for keyword in keywords {
            *self = match given.get(*keyword) {
                None => continue,
                Some(OptionValue::None) => None,
                Some(given) => Some(choose(keyword, given, &known)?),
            };
        }
        Ok(())
    }

    fn agreed(&self, keywords: &[&'static str]) -> Vec<Field> {
        let shown = self.map_or("automatic", TransferPath::name);
        keywords.iter().map(|keyword| (*keyword, shown.to_owned())).collect()
    }
}

impl OptionType for DType {
    fn types() -> Vec<(String, String)> {
        dtype_like()
    }

    fn values(&self) -> Vec<OptionValue> {
        vec![OptionValue::Text(self.name().to_owned())]
    }

    fn read(&mut self, keywords: &[&str], given: &Keywords) -> Result<(), OptionError> {
        for keyword in keywords {
            if let Some(given) = given.get(*keyword) {
                *self = dtype(text(keyword, given)?)?;
            }
        }
        Ok(())
    }

    fn numbers(&self) -> Vec<u64> {
        vec![code(*self)]
    }
}

fn dtype(name: &str) -> Result<DType, OptionError> {
    DType::from_name(name).ok_or_else(|| {
        let known = DType::ALL.map(DType::name).join(", ");
        OptionError::InvalidValue(format!("dtype {name:?} is not supported: {known} are"))
    })
}

fn code(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => 0,
        DType::BF16 => 1,
        DType::F16 => 2,
    }
}

/// Keyword shared by the token types: `None`, or the scale dtype and the block size in elements.
const SCALES: &str = "scales";

impl OptionType for TokenType {
    /// The dtype, and the scales if there is a second keyword.
    fn types() -> Vec<(String, String)> {
        let scales = "tuple[str, int] | None".to_owned();
        [dtype_like(), vec![(scales.clone(), scales)]].concat()
    }

    fn values(&self) -> Vec<OptionValue> {
        let scales = match self {
            TokenType::Plain(_) => OptionValue::None,
            TokenType::Scaled(BlockScaled { scale, block, .. }) => OptionValue::Scales(
                scale.to_string(),
                Box::new(OptionValue::Integer((*block).into())),
            ),
        };
        vec![OptionValue::Text(self.to_string()), scales]
    }

    fn read(&mut self, keywords: &[&str], given: &Keywords) -> Result<(), OptionError> {
        let [keyword, ..] = keywords else { return Ok(()) };
        let unnamed = OptionValue::Text(self.to_string());
        let name = text(keyword, given.get(*keyword).unwrap_or(&unnamed))?;
        let format = Float8::ALL.into_iter().find(|format| format.name() == name);
        let (scale, block) = match given.get(SCALES) {
            None | Some(OptionValue::None) => return dtype(name).map(|dtype| *self = dtype.into()),
            Some(OptionValue::Scales(scale, block)) => (OptionValue::Text(scale.clone()), block),
            Some(other) => return Err(wrong_type(SCALES, "a dtype and a whole number", other)),
        };
        let block = whole("block", block, u32::MAX.into())? as u32;
        let Some(format) = format else { return dtype(name).map(|dtype| *self = dtype.into()) };
        let known = ScaleType::ALL.map(|scale| (scale.name(), scale));
        let scale = choose("scale_dtype", &scale, &known)?;
        *self = TokenType::Scaled(BlockScaled { format, scale, block });
        Ok(())
    }

    fn agreed(&self, keywords: &[&'static str]) -> Vec<Field> {
        let mut fields: Vec<Field> =
            keywords.iter().take(1).map(|keyword| (*keyword, self.to_string())).collect();
        if keywords.contains(&SCALES) {
            let (scale, block) = match self {
                TokenType::Plain(_) => ("none".to_owned(), "none".to_owned()),
                TokenType::Scaled(scaled) => (scaled.scale.to_string(), scaled.block.to_string()),
            };
            fields.extend([("scale_dtype", scale), ("block", block)]);
        }
        fields
    }

    /// Type, scale type and block; 0 without scales.
    fn numbers(&self) -> Vec<u64> {
        match self {
            TokenType::Plain(dtype) => vec![code(*dtype), 0, 0],
            TokenType::Scaled(BlockScaled { format, scale, block }) => {
                let format = if *format == Float8::E4M3 { 3 } else { 4 };
                let scale = if *scale == ScaleType::F32 { 1 } else { 2 };
                vec![format, scale, (*block).into()]
            }
        }
    }
}

impl OptionType for DeviceLayout {
    fn types() -> Vec<(String, String)> {
        [plain("str"), plain("int"), plain("int | None")].concat()
    }

    fn values(&self) -> Vec<OptionValue> {
        let (name, pad_to, capacity) = match *self {
            DeviceLayout::Contiguous { pad_to } => ("contiguous", pad_to, None),
            DeviceLayout::Indexed => ("indexed", 1, None),
            DeviceLayout::Padded { expert_capacity } => ("padded", 1, expert_capacity),
            DeviceLayout::Dense => ("dense", 1, None),
        };
        let capacity = capacity.map_or(OptionValue::None, |rows| OptionValue::Integer(rows.into()));
        vec![OptionValue::Text(name.to_owned()), OptionValue::Integer(pad_to.into()), capacity]
    }

    fn read(&mut self, keywords: &[&str], given: &Keywords) -> Result<(), OptionError> {
        let [keyword, pad_keyword, capacity_keyword] = keywords else { return Ok(()) };
        let (mut pad_to, mut expert_capacity) = (1, None);
        OptionType::read(&mut pad_to, &[*pad_keyword], given)?;
        OptionType::read(&mut expert_capacity, &[*capacity_keyword], given)?;
        let known = [
            ("contiguous", DeviceLayout::Contiguous { pad_to }),
            ("indexed", DeviceLayout::Indexed),
            ("padded", DeviceLayout::Padded { expert_capacity }),
            ("dense", DeviceLayout::Dense),
        ];
        let unnamed = OptionValue::Text("contiguous".to_owned());
        let named = given.get(*keyword).unwrap_or(&unnamed);
        *self = choose(keyword, named, &known)?;
        if expert_capacity.is_some() && !matches!(self, DeviceLayout::Padded { .. }) {
            let message = format!("expert_capacity is for layout='padded', not {named}");
            return Err(OptionError::InvalidValue(message));
        }
        Ok(())
    }

    /// Layout and padding. The expert capacity is derived from the shape.
    fn numbers(&self) -> Vec<u64> {
        match *self {
            DeviceLayout::Contiguous { pad_to } => vec![0, pad_to.into()],
            DeviceLayout::Indexed => vec![1, 1],
            DeviceLayout::Padded { .. } => vec![2, 1],
            DeviceLayout::Dense => vec![3, 1],
        }
    }
}
