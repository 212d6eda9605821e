//! Structs shared by host and kernels, declared once: [`layout!`](crate::layout!) generates the Rust struct, the
//! bytes, the offsets for Python and the twin, and the C struct for kernels.

use std::fmt::Write as _;

/// Shared struct field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Field name.
    pub name: &'static str,
    /// First byte.
    pub offset: u64,
    /// Element size in bytes, an unsigned integer: 4 or 8.
    pub width: u64,
    /// Elements, if it is an array.
    pub array: Option<u64>,
    /// Description.
    pub about: &'static str,
}

impl Field {
    /// Elements.
    pub fn count(&self) -> u64 {
        self.array.unwrap_or(1)
    }
}

/// Field type: an unsigned integer with 32 or 64 bits, or an array.
pub trait FieldType {
    /// Element size in bytes.
    const WIDTH: u64;
    /// Elements, if it is an array.
    const ARRAY: Option<u64>;
    /// All zeros.
    const ZERO: Self;
    /// Writes the value in native byte order; `to` has the exact length.
    fn store(&self, to: &mut [u8]);
}

macro_rules! words {
    ($($type:ident),*) => {$(
        impl FieldType for $type {
            const WIDTH: u64 = size_of::<$type>() as u64;
            const ARRAY: Option<u64> = None;
            const ZERO: $type = 0;
            fn store(&self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_ne_bytes());
            }
        }

        impl<const N: usize> FieldType for [$type; N] {
            const WIDTH: u64 = size_of::<$type>() as u64;
            const ARRAY: Option<u64> = Some(N as u64);
            const ZERO: [$type; N] = [0; N];
            fn store(&self, to: &mut [u8]) {
                let each = to.chunks_exact_mut(size_of::<$type>());
                self.iter().zip(each).for_each(|(word, to)| word.store(to));
            }
        }
    )*};
}

words!(u32, u64);

/// Declares a struct with `u32`, `u64` and array fields, each with a description in Rust and in C. It has
/// `FIELDS`, `SIZE` and `bytes()`; the default is all zeros.
#[macro_export]
macro_rules! layout {
    ($(#[$meta:meta])* pub struct $struct:ident { $($name:ident: $type:ty, $about:literal;)* }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $struct {
            $(#[doc = $about] pub $name: $type,)*
        }

        impl Default for $struct {
            fn default() -> Self {
                $struct { $($name: <$type as $crate::layout::FieldType>::ZERO,)* }
            }
        }

        impl $struct {
            /// All fields, in memory order.
            pub const FIELDS: &'static [$crate::layout::Field] = &[$($crate::layout::Field {
                name: stringify!($name),
                offset: std::mem::offset_of!($struct, $name) as u64,
                width: <$type as $crate::layout::FieldType>::WIDTH,
                array: <$type as $crate::layout::FieldType>::ARRAY,
                about: $about,
            },)*];
            /// Bytes.
            pub const SIZE: usize = size_of::<$struct>();

            /// Struct bytes, in native byte order.
            #[inline]
            pub fn bytes(&self) -> [u8; Self::SIZE] {
                let mut bytes = [0; Self::SIZE];
                $({
                    let at = std::mem::offset_of!($struct, $name);
                    let to = &mut bytes[at..at + size_of::<$type>()];
                    $crate::layout::FieldType::store(&self.$name, to);
                })*
                bytes
            }
        }
    };
}

/// C struct with these fields, after `first`, the text for further C fields.
pub fn c_struct(name: &str, first: &str, fields: &[Field]) -> String {
    let mut text = format!("struct {name} {{\n{first}");
    for Field { name, width, array, about, .. } in fields {
        let array = array.map_or(String::new(), |count| format!("[{count}]"));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "    u{} {name}{array}; // {about}", width * 8);
    }
    text.push_str("};\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::layout! {
        /// An example.
        pub struct Example {
            first: u32, "a number";
            pair: [u32; 2], "two";
            last: u32, "another";
            wide: [u64; 1], "an array of one";
        }
    }

    #[test]
    fn a_struct_is_the_same_in_rust_in_bytes_and_in_c() {
        let example = Example { first: 1, pair: [2, 3], last: 4, wide: [1 << 40 | 5] };
        let bytes = example.bytes();
        let words = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_ne_bytes(*b));
        assert_eq!(words.collect::<Vec<_>>(), [1, 2, 3, 4, 5, 1 << 8]);
        assert_eq!(Example::default().bytes(), [0; 24]);
        let shown: Vec<_> =
            Example::FIELDS.iter().map(|f| (f.name, f.offset, f.width, f.count())).collect();
        assert_eq!(
            shown,
            [("first", 0, 4, 1), ("pair", 4, 4, 2), ("last", 12, 4, 1), ("wide", 16, 8, 1)]
        );
        assert_eq!(
            c_struct("Example", "    u8 more;\n", Example::FIELDS),
            "struct Example {\n    u8 more;\n    u32 first; // a number\n    u32 pair[2]; // two\n    \
             u32 last; // another\n    u64 wide[1]; // an array of one\n};\n"
        );
    }
}
