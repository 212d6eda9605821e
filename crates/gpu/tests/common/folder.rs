//! A crate's kernel source list against its `kernels` folder.

use std::path::Path;

fn walk(folder: &Path, found: &mut Vec<String>, root: &Path) {
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            walk(&path, found, root);
        } else {
            found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
        }
    }
}

/// Asserts that `files` are all files under the folder, none empty.
pub fn lists_all_of(folder: &str, files: &[(&str, &str)]) {
    let root = Path::new(folder);
    let mut found = Vec::new();
    walk(root, &mut found, root);
    found.sort();
    let mut listed: Vec<&str> = files.iter().map(|(path, _)| *path).collect();
    listed.sort_unstable();
    assert_eq!(listed, found, "every file of {folder} belongs in the crate's `sources!`");
    assert!(files.iter().all(|(_, text)| !text.is_empty()));
}
