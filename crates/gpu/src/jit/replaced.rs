//! Source override: files in the folder `WEFT_KERNELS` replace those in the library, so that a kernel can be changed
//! without a build.

use crate::error::{Error, Result};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use weft_environment as environment;

/// The variable that names the folder.
const VARIABLE: &str = "WEFT_KERNELS";
/// Longest source that is read: 4 MiB.
const MAX_BYTES: u64 = 4 << 20;

/// Checks the folder and its files for these sources, so that [`text()`] skips none.
///
/// # Errors
/// [`Error::Variable`] if it is no folder, or a file cannot be read.
pub(super) fn check<'a>(paths: impl Iterator<Item = &'a str>) -> Result<()> {
    environment::path(VARIABLE).map_or(Ok(()), |folder| check_folder(&folder, paths))
}

fn check_folder<'a>(folder: &Path, mut paths: impl Iterator<Item = &'a str>) -> Result<()> {
    if !folder.is_dir() {
        return Err(environment::invalid(VARIABLE, folder, "a folder").into());
    }
    paths.try_for_each(|path| match environment::read_text(&folder.join(path), MAX_BYTES) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::Source { path: folder.join(path), problem: error.to_string() })
        }
        _ => Ok(()),
    })
}

/// Text that replaces the source `path`, if the folder has one; read once per path and kept until the process ends.
pub(super) fn text(path: &str) -> Option<&'static str> {
    static READ: Mutex<Option<HashMap<String, Option<&'static str>>>> = Mutex::new(None);
    let folder: PathBuf = environment::path(VARIABLE)?;
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    let read = read.get_or_insert_default();
    *read.entry(path.to_owned()).or_insert_with(|| load(&folder, path))
}

fn load(folder: &Path, path: &str) -> Option<&'static str> {
    let file = folder.join(path);
    match environment::read_text(&file, MAX_BYTES) {
        Ok(text) => {
            log::warn!("kernels are compiled with {} (WEFT_KERNELS)", file.display());
            Some(text.leak())
        }
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => {
            log::warn!("{} (WEFT_KERNELS) is ignored: {error}", file.display());
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "isolated miri reads no files")]
    fn a_file_is_read_if_the_folder_has_it() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        let text = load(Path::new(folder), "weft/ptx.cuh").unwrap();
        assert!(text.contains("namespace weft::ptx"));
        assert_eq!(load(Path::new(folder), "weft/absent.cuh"), None);
        assert_eq!(load(Path::new(folder), "weft"), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "isolated miri reads no files")]
    fn a_folder_that_is_none_and_a_file_that_cannot_be_read_are_errors() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels"));
        check_folder(folder, ["weft/ptx.cuh", "weft/absent.cuh"].into_iter()).unwrap();
        let unreadable = check_folder(folder, ["weft"].into_iter()).unwrap_err().to_string();
        assert!(unreadable.contains("WEFT_KERNELS") && unreadable.contains("regular"));
        let absent = check_folder(&folder.join("absent"), [].into_iter()).unwrap_err().to_string();
        assert!(absent.starts_with("WEFT_KERNELS is"), "{absent}");
    }
}
