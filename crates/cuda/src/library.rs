//! Library loading, and function tables.
//!
//! cudarc's loader panics on a missing function, prefers the toolkit's libcuda stub, and declares results as
//! Rust enumerations, for which a newer driver's new code is undefined behaviour. So only its declarations are
//! used: the compiler checks this crate's function tables against them.

use crate::error::{Error, Result};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::path::Path;

/// Declares a library's function table, by C name and arguments. All return an `int` or an enumeration, read
/// as `u32`.
///
/// With `declared in M as R`, the signatures are checked against module `M`, which return `R`.
macro_rules! functions {
    ($(#[$attribute:meta])* $table:ident, declared in $sys:ident as $result:ty;
     $($name:ident($($argument:ty),* $(,)?);)*) => {
        $crate::library::functions! { $(#[$attribute])* $table; $($name($($argument),*);)* }
        $(const _: unsafe fn($($argument),*) -> $result = $sys::$name;)*
    };
    ($(#[$attribute:meta])* $table:ident; $($name:ident($($argument:ty),* $(,)?);)*) => {
        $(#[$attribute])*
        #[allow(non_snake_case, reason = "the names are C's")]
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl $table {
            /// Looks up all functions; the error is the missing one's name.
            ///
            /// # Safety
            ///
            /// The library is the one that this table declares, and is never unloaded.
            pub(crate) unsafe fn look_up(
                library: &libloading::os::unix::Library,
            ) -> std::result::Result<Self, &'static str> {
                Ok(Self {
                    $(
                        // SAFETY: the caller guarantees that the library declares this signature and
                        // stays loaded.
                        $name: *unsafe { library.get(stringify!($name)) }
                            .map_err(|_| stringify!($name))?,
                    )*
                })
            }
        }
    };
}
pub(crate) use functions;

/// Opens the first available library, by name or path; the error joins all attempts' messages.
pub(crate) fn open<P: AsRef<Path>>(names: impl IntoIterator<Item = P>) -> Result<Library, String> {
    let mut problems = Vec::new();
    for name in names {
        match open_with(name.as_ref(), RTLD_LAZY | RTLD_LOCAL) {
            Ok(library) => return Ok(library),
            Err(problem) => problems.push(problem),
        }
    }
    Err(problems.join("; "))
}

/// Opens one library.
pub(crate) fn open_with(name: &Path, flags: i32) -> Result<Library, String> {
    // SAFETY: loading runs the initialisers in NVIDIA's libraries, which any program may load at any time; no
    // other library is loaded here.
    unsafe { Library::open(Some(name), flags) }.map_err(|error| match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        other => other.to_string(),
    })
}

/// Builds the error for a missing function.
pub(crate) fn too_old(
    library: &'static str,
    needs: &'static str,
) -> impl Fn(&'static str) -> Error {
    move |function| Error::TooOld { library, function, needs }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_int;

    functions! {
        /// An existing function, and a missing one.
        #[expect(dead_code, reason = "they are only looked up")]
        Partial;
        getpid();
        weft_has_no_such_function(c_int);
    }

    #[test]
    fn a_function_that_is_missing_is_named() {
        let own = Library::this();
        // SAFETY: none of its functions is called.
        let missing = unsafe { Partial::look_up(&own) }.err();
        assert_eq!(missing, Some("weft_has_no_such_function"));
        let error = too_old("libold", "one from this century")(missing.unwrap_or_default());
        assert_eq!(
            error.to_string(),
            "libold has no weft_has_no_such_function: expected one from this century; install a newer \
             version"
        );
    }

    #[test]
    fn every_attempted_name_is_in_the_reason() {
        let why = open(["libweft-none.so.1", "libweft-none.so.2"]).expect_err("there are none");
        assert!(why.contains("libweft-none.so.1") && why.contains("libweft-none.so.2"), "{why}");
    }
}
