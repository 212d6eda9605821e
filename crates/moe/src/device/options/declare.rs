//! Macro that declares an option struct, and the description of a keyword.

use super::value::OptionValue;

/// Keyword audience.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// An argument that has no default.
    Required,
    /// An argument for all-to-alls on the CPU and on devices.
    Both,
    /// An argument for device all-to-alls only.
    Device,
    /// Not an argument: Python derives it from others.
    Derived,
}

/// Keyword for the native class.
#[derive(Clone, Debug, PartialEq)]
pub struct Keyword {
    /// Keyword name.
    pub name: &'static str,
    /// Keyword audience.
    pub audience: Audience,
    /// Python documentation.
    pub about: &'static str,
    /// Python type in the native class.
    pub native: String,
    /// Python type for the argument: the same, or `object` for a dtype, which Python converts to a name.
    pub argument: String,
    /// Default value.
    pub default: OptionValue,
}

/// Declares an option struct. `fields` are fields that are not options. An option has a name, a type and a
/// default, the kernel macros, and keywords in the order that the [`OptionType`](super::value::OptionType)
/// gives.
macro_rules! declare {
    (
        $(#[$meta:meta])*
        pub struct $struct:ident {
            fields { $($(#[$given_meta:meta])* pub $given:ident: $given_type:ty,)* }
            $($option:ident: $type:ty = $default:expr, kernels [$($macro:literal),*] {
                $($audience:ident $keyword:literal $about:literal;)+
            })*
        }
    ) => {
        $(#[$meta])*
        pub struct $struct {
            $($(#[$given_meta])* pub $given: $given_type,)*
            $($(#[doc = concat!("`", $keyword, "`: ", $about)] #[doc = ""])+ pub $option: $type,)*
        }

        #[allow(dead_code)]
        impl $struct {
            /// All options at the defaults.
            pub(super) fn defaults($($given: $given_type),*) -> Self {
                $struct { $($given,)* $($option: $default,)* }
            }

            /// Keywords for all options.
            pub(super) fn keywords() -> Vec<$crate::device::options::declare::Keyword> {
                use $crate::device::options::declare::{Keyword, audience};
                use $crate::device::options::value::OptionType;
                let mut all = Vec::new();
                $({
                    let option: $type = $default;
                    let known = <$type>::types().into_iter().zip(option.values());
                    let named = [$(($keyword, audience!($audience), $about)),+];
                    assert!(named.len() <= known.len(), "keywords of {}", stringify!($option));
                    all.extend(named.into_iter().zip(known).map(
                        |((name, audience, about), ((native, argument), default))| {
                            Keyword { name, audience, about, native, argument, default }
                        },
                    ));
                })*
                all
            }

            /// Sets the options that Python passes.
            pub(super) fn read(
                &mut self,
                given: &$crate::device::options::value::Keywords,
            ) -> Result<(), $crate::device::options::value::OptionError> {
                use $crate::device::options::value::OptionType;
                $(self.$option.read(&[$($keyword),+], given)?;)*
                Ok(())
            }

            /// Fields that the ranks compare.
            pub(super) fn agreed(&self) -> Vec<$crate::shape::agreement::Field> {
                use $crate::device::options::value::OptionType;
                let mut fields = Vec::new();
                $(fields.extend(self.$option.agreed(&[$($keyword),+]));)*
                fields
            }

            /// Kernel macros, without the prefix.
            pub(super) fn numbers(&self) -> Vec<(&'static str, u64)> {
                use $crate::device::options::value::OptionType;
                let mut all: Vec<(&'static str, u64)> = Vec::new();
                $(
                    let names: &[&'static str] = &[$($macro),*];
                    all.extend(names.iter().copied().zip(self.$option.numbers()));
                )*
                all
            }
        }
    };
}

/// The audience with this name.
macro_rules! audience {
    (required) => {
        $crate::device::options::declare::Audience::Required
    };
    (both) => {
        $crate::device::options::declare::Audience::Both
    };
    (device) => {
        $crate::device::options::declare::Audience::Device
    };
    (derived) => {
        $crate::device::options::declare::Audience::Derived
    };
}

pub(super) use {audience, declare};
