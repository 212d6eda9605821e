//! Element types in vectors.

use std::fmt;

/// Element type for a vector, in host byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// Byte that is true if not 0.
    Bool,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: a float32's upper half.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// 8-bit float with 4 exponent bits: up to 448, NaN without infinities.
    F8E4m3,
    /// 8-bit float with 5 exponent bits, a binary16's upper half.
    F8E5m2,
}

impl Element {
    /// All types.
    pub const ALL: [Element; 15] = [
        Element::Bool,
        Element::U8,
        Element::I8,
        Element::U16,
        Element::I16,
        Element::U32,
        Element::I32,
        Element::U64,
        Element::I64,
        Element::F16,
        Element::Bf16,
        Element::F32,
        Element::F64,
        Element::F8E4m3,
        Element::F8E5m2,
    ];

    /// Bytes per element.
    pub const fn bytes(self) -> usize {
        match self {
            Element::Bool | Element::U8 | Element::I8 | Element::F8E4m3 | Element::F8E5m2 => 1,
            Element::U16 | Element::I16 | Element::F16 | Element::Bf16 => 2,
            Element::U32 | Element::I32 | Element::F32 => 4,
            Element::U64 | Element::I64 | Element::F64 => 8,
        }
    }

    /// The name that numpy and torch use.
    pub const fn name(self) -> &'static str {
        match self {
            Element::Bool => "bool",
            Element::U8 => "uint8",
            Element::I8 => "int8",
            Element::U16 => "uint16",
            Element::I16 => "int16",
            Element::U32 => "uint32",
            Element::I32 => "int32",
            Element::U64 => "uint64",
            Element::I64 => "int64",
            Element::F16 => "float16",
            Element::Bf16 => "bfloat16",
            Element::F32 => "float32",
            Element::F64 => "float64",
            Element::F8E4m3 => "float8_e4m3fn",
            Element::F8E5m2 => "float8_e5m2",
        }
    }

    /// The type with this name, for example `bfloat16`.
    pub fn from_name(name: &str) -> Option<Element> {
        Element::ALL.into_iter().find(|element| element.name() == name)
    }

    /// True for floating-point types.
    pub const fn is_float(self) -> bool {
        self.is_short_float() || matches!(self, Element::F32 | Element::F64)
    }

    /// True for 8-bit and 16-bit floats, whose arithmetic is in float32.
    pub const fn is_short_float(self) -> bool {
        matches!(self, Element::F16 | Element::Bf16 | Element::F8E4m3 | Element::F8E5m2)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
