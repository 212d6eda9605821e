//! Schema: query and answer tensors, agreed at connect.

use super::reader::Reader;
use crate::error::{Error, Result};
use std::fmt;

/// Tensor element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DataType {
    /// Bytes without further meaning.
    U8 = 1,
    /// Signed integers.
    I8 = 2,
    /// Signed integers.
    I32 = 3,
    /// Signed integers.
    I64 = 4,
    /// IEEE 754 binary16.
    F16 = 5,
    /// bfloat16.
    Bf16 = 6,
    /// IEEE 754 binary32.
    F32 = 7,
    /// IEEE 754 binary64.
    F64 = 8,
}

impl DataType {
    /// Element size in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            DataType::U8 | DataType::I8 => 1,
            DataType::F16 | DataType::Bf16 => 2,
            DataType::I32 | DataType::F32 => 4,
            DataType::I64 | DataType::F64 => 8,
        }
    }

    fn from_wire(byte: u8) -> Option<DataType> {
        use DataType::{Bf16, F16, F32, F64, I8, I32, I64, U8};
        [U8, I8, I32, I64, F16, Bf16, F32, F64].into_iter().find(|known| *known as u8 == byte)
    }
}

/// Tensor dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dimension {
    /// The same in each query.
    Fixed(u64),
    /// From 0 to this bound; at most one per tensor, so that the byte count determines the shape.
    UpTo(u64),
    /// Same as [`Dimension::UpTo`], for an output that may arrive in parts: the indexes are tokens. It is the first
    /// dimension in at most one output.
    Tokens(u64),
}

impl Dimension {
    fn bound(self) -> u64 {
        match self {
            Dimension::Fixed(size) | Dimension::UpTo(size) | Dimension::Tokens(size) => size,
        }
    }

    fn is_variable(&self) -> bool {
        matches!(self, Dimension::UpTo(_) | Dimension::Tokens(_))
    }
}

/// Query or answer tensor, in C order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tensor {
    /// Name, up to 255 UTF-8 bytes.
    pub name: String,
    /// Element type.
    pub dtype: DataType,
    /// Shape.
    pub shape: Vec<Dimension>,
}

impl Tensor {
    /// Tensor with these dimensions.
    pub fn new(name: &str, dtype: DataType, shape: &[Dimension]) -> Tensor {
        Tensor { name: name.to_owned(), dtype, shape: shape.to_vec() }
    }

    /// Tensor with up to `bound` bytes.
    pub fn bytes(name: &str, bound: u64) -> Tensor {
        Tensor::new(name, DataType::U8, &[Dimension::UpTo(bound)])
    }

    /// Maximum size in bytes.
    pub fn max_bytes(&self) -> u64 {
        self.shape.iter().fold(self.dtype.bytes(), |bytes, size| bytes.saturating_mul(size.bound()))
    }

    /// Bytes per index along the variable dimension; `None` with a fixed shape.
    pub fn unit(&self) -> Option<u64> {
        self.shape.iter().find(|size| size.is_variable())?;
        let fixed = self.shape.iter().filter(|size| !size.is_variable());
        Some(fixed.fold(self.dtype.bytes(), |bytes, size| bytes.saturating_mul(size.bound())))
    }

    /// True for an output that may arrive in parts.
    pub fn has_tokens(&self) -> bool {
        self.shape.iter().any(|size| matches!(size, Dimension::Tokens(_)))
    }

    fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.push(self.name.len() as u8);
        bytes.extend(self.name.as_bytes());
        bytes.extend([self.dtype as u8, self.shape.len() as u8]);
        for size in &self.shape {
            bytes.push(match size {
                Dimension::Fixed(_) => 0,
                Dimension::UpTo(_) => 1,
                Dimension::Tokens(_) => 2,
            });
            bytes.extend(size.bound().to_le_bytes());
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Tensor> {
        let name = reader.text("tensor name")?;
        let dtype = reader.u8("element type")?;
        let unknown = || format!("element type {dtype}: expected 1 to 8");
        let dtype = DataType::from_wire(dtype).ok_or_else(|| reader.malformed(unknown()))?;
        let dimensions = reader.u8("number of dimensions")?;
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let kind = reader.u8("kind of a dimension")?;
            let size = reader.u64("dimension")?;
            shape.push(match kind {
                0 => Dimension::Fixed(size),
                1 => Dimension::UpTo(size),
                2 => Dimension::Tokens(size),
                kind => {
                    let detail = format!("kind of a dimension {kind}: expected 0 to 2");
                    return Err(reader.malformed(detail));
                }
            });
        }
        Ok(Tensor { name, dtype, shape })
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}[", self.name, self.dtype)?;
        for (index, size) in self.shape.iter().enumerate() {
            let separator = if index > 0 { ", " } else { "" };
            match size {
                Dimension::Fixed(size) => write!(f, "{separator}{size}")?,
                Dimension::UpTo(size) => write!(f, "{separator}<={size}")?,
                Dimension::Tokens(size) => write!(f, "{separator}<={size} tokens")?,
            }
        }
        f.write_str("]")
    }
}

/// Query and answer tensors, in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Schema {
    /// Query tensors.
    pub inputs: Vec<Tensor>,
    /// Answer tensors.
    pub outputs: Vec<Tensor>,
}

impl Schema {
    /// Maximum tensors per query, and per answer.
    pub const MAX_TENSORS: usize = 16;
    /// Maximum dimensions per tensor.
    pub const MAX_DIMENSIONS: usize = 8;
    /// Maximum bytes per query, and per answer.
    pub const MAX_BYTES: u64 = 1 << 32;

    /// Queries up to `input` bytes and answers up to `output` bytes, as one tensor each.
    pub fn bytes(input: u64, output: u64) -> Schema {
        let (inputs, outputs) =
            (vec![Tensor::bytes("input", input)], vec![Tensor::bytes("output", output)]);
        Schema { inputs, outputs }
    }

    /// Checks the limits.
    ///
    /// # Errors
    /// [`Error::Schema`].
    pub fn check(&self) -> Result<()> {
        for (side, tensors) in [("inputs", &self.inputs), ("outputs", &self.outputs)] {
            let refuse = |detail: String| Err(Error::Schema { detail });
            if tensors.is_empty() || tensors.len() > Schema::MAX_TENSORS {
                let limit = Schema::MAX_TENSORS;
                return refuse(format!("{} {side}: expected 1 to {limit}", tensors.len()));
            }
            let mut sum = 0u64;
            for tensor in tensors {
                let variable = tensor.shape.iter().filter(|d| d.is_variable());
                if variable.count() > 1 {
                    return refuse(format!("{tensor}: expected at most one variable dimension"));
                }
                if tensor.shape.len() > Schema::MAX_DIMENSIONS {
                    let limit = Schema::MAX_DIMENSIONS;
                    return refuse(format!("{tensor}: expected at most {limit} dimensions"));
                }
                if tensor.name.len() > 255 {
                    return refuse(format!(
                        "{side}: a name has {} bytes, at most 255",
                        tensor.name.len()
                    ));
                }
                if tensor.has_tokens() && !matches!(tensor.shape[0], Dimension::Tokens(_)) {
                    return refuse(format!("{tensor}: expected tokens as the first dimension"));
                }
                sum = sum.saturating_add(tensor.max_bytes());
            }
            let streams = tensors.iter().filter(|tensor| tensor.has_tokens()).count();
            let most = usize::from(side == "outputs");
            if streams > most {
                return refuse(format!("{streams} {side} of tokens: expected at most {most}"));
            }
            if sum > Schema::MAX_BYTES {
                let limit = Schema::MAX_BYTES;
                return refuse(format!("{side}: {sum} bytes, expected at most {limit}"));
            }
        }
        Ok(())
    }

    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        for tensors in [&self.inputs, &self.outputs] {
            bytes.push(tensors.len() as u8);
            tensors.iter().for_each(|tensor| tensor.encode(bytes));
        }
    }

    pub(super) fn decode(reader: &mut Reader<'_>) -> Result<Schema> {
        let mut tensors = |what| {
            let count = reader.u8(what)?;
            (0..count).map(|_| Tensor::decode(reader)).collect::<Result<Vec<_>>>()
        };
        let (inputs, outputs) = (tensors("number of inputs")?, tensors("number of outputs")?);
        let schema = Schema { inputs, outputs };
        schema.check()?;
        Ok(schema)
    }
}

impl fmt::Display for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |tensors: &[Tensor]| {
            tensors.iter().map(Tensor::to_string).collect::<Vec<_>>().join(", ")
        };
        write!(f, "({}) -> ({})", list(&self.inputs), list(&self.outputs))
    }
}
