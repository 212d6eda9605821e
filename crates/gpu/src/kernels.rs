//! The kernels' sources, carried in this crate so that a program needs no files beside it.
//!
//! They lie under `crates/gpu/kernels`. A file joins them with one line in the list below; a test
//! compares the list with the folder, so none can be forgotten.

/// Includes each file under `kernels/` by its path there.
macro_rules! files {
    ($($path:literal),* $(,)?) => {
        /// Every file, by its path under `crates/gpu/kernels`: what `#include "path"` names in a kernel.
        pub const FILES: &[(&str, &str)] =
            &[$(($path, include_str!(concat!("../kernels/", $path)))),*];
    };
}

files![
    "moe.cu",
    "moe/combine.cuh",
    "moe/dispatch.cuh",
    "moe/elements.cuh",
    "moe/launch.cuh",
    "moe/plan.cuh",
    "moe/shape.cuh",
    "weft/device.cuh",
    "weft/ptx.cuh",
];

/// The text of a file.
pub fn text(path: &str) -> Option<&'static str> {
    FILES.iter().find(|(name, _)| *name == path).map(|(_, text)| *text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn walk(folder: &Path, found: &mut Vec<String>, root: &Path) {
        let Ok(entries) = std::fs::read_dir(folder) else { return };
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                walk(&path, found, root);
            } else {
                found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "isolated miri reads no files")]
    fn every_file_of_the_folder_is_listed() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut found = Vec::new();
        walk(&root, &mut found, &root);
        found.sort();
        let mut listed: Vec<&str> = FILES.iter().map(|(path, _)| *path).collect();
        listed.sort_unstable();
        assert_eq!(listed, found, "add the file to `files!` in kernels.rs");
        assert!(listed.iter().all(|path| text(path).is_some_and(|text| !text.is_empty())));
    }
}
