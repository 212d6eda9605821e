//! Loading a library, and looking its functions up.
//!
//! cudarc can load libraries too, but panics where a function is missing, looks for the toolkit's
//! stub of libcuda first, and takes results as Rust enumerations, which a newer driver's new error
//! would make undefined. So its declarations are used, and a table of functions of our own, which the
//! compiler compares with them.

use crate::error::{Error, Result};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::path::Path;

/// A table of the functions of a library: their names as in C, with their arguments; all return an
/// `int` or an enumeration, which is taken as a `u32`, or what stands behind the arrow.
///
/// With `declared in M as R`, each is compared with what module `M` declares, where its result is `R`.
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
            /// Looks all functions up; or says which one there is not.
            ///
            /// # Safety
            ///
            /// The library is the one that this table declares, and is never unloaded.
            pub(crate) unsafe fn look_up(
                library: &libloading::os::unix::Library,
            ) -> std::result::Result<Self, &'static str> {
                Ok(Self {
                    $(
                        // SAFETY: the library is the one that declares this function so, as the
                        // caller promises, which also keeps it loaded.
                        $name: *unsafe { library.get(stringify!($name)) }
                            .map_err(|_| stringify!($name))?,
                    )*
                })
            }
        }
    };
}
pub(crate) use functions;

/// Opens the first of these libraries that there is, by name or path; or says why there is none.
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
    // SAFETY: loading runs the initialisers of NVIDIA's libraries, which any program may load at any
    // time; none of ours is loaded that is not NVIDIA's.
    unsafe { Library::open(Some(name), flags) }.map_err(|error| match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        other => other.to_string(),
    })
}

/// What a library that cannot be used is called.
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
        /// One function that this process has, and one that none has.
        #[expect(dead_code, reason = "they are only looked up")]
        Partial;
        getpid();
        weft_has_no_such_function(c_int);
    }

    #[test]
    fn a_function_that_is_missing_is_named() {
        let own = Library::this();
        // SAFETY: nothing of it is called.
        let missing = unsafe { Partial::look_up(&own) }.err();
        assert_eq!(missing, Some("weft_has_no_such_function"));
        let error = too_old("libold", "one from this century")(missing.unwrap_or_default());
        assert_eq!(
            error.to_string(),
            "libold has no weft_has_no_such_function: it is too old for Weft, which needs one from \
             this century"
        );
    }

    #[test]
    fn every_name_that_was_tried_is_in_the_reason() {
        let why = open(["libweft-none.so.1", "libweft-none.so.2"]).expect_err("there are none");
        assert!(why.contains("libweft-none.so.1") && why.contains("libweft-none.so.2"), "{why}");
    }
}
