//! Source override: files in the folder `WEFT_KERNELS` replace those in the library, so that a kernel can be changed
//! without a build.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Text that replaces the source `path`, if the folder has one; read once per path and kept until the process ends.
pub(super) fn text(path: &str) -> Option<&'static str> {
    static READ: Mutex<Option<HashMap<String, Option<&'static str>>>> = Mutex::new(None);
    let folder = std::env::var_os("WEFT_KERNELS").filter(|folder| !folder.is_empty())?;
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    let read = read.get_or_insert_default();
    *read.entry(path.to_owned()).or_insert_with(|| load(Path::new(&folder), path))
}

fn load(folder: &Path, path: &str) -> Option<&'static str> {
    let file = folder.join(path);
    match std::fs::read_to_string(&file) {
        Ok(text) => {
            log::warn!("kernels are compiled with {} (WEFT_KERNELS)", file.display());
            Some(text.leak())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
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
}
