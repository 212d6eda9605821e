//! Files that a program includes: what its machine code depends on, and all that the compiler is given.

use super::Request;

impl<'a> Request<'a> {
    /// Path and text of each file that the program includes, directly or through others: those of
    /// [`Request::sources`] that `#include` names literally. Conditions are not evaluated, so there may be
    /// more than the compiler reads, and never fewer.
    pub fn included(&self) -> Vec<(&'a str, &'a str)> {
        let mut found: Vec<(&str, &str)> = Vec::new();
        let mut texts: Vec<&str> = self.text().into_iter().collect();
        while let Some(text) = texts.pop() {
            for path in text.lines().filter_map(include) {
                let known = path == self.name || found.iter().any(|(name, _)| *name == path);
                let file = self.sources().find(|(name, _)| *name == path && !known);
                found.extend(file);
                texts.extend(file.map(|(_, text)| text));
            }
        }
        found
    }
}

/// The path that a line includes, if it includes one.
fn include(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?;
    let rest = rest.trim_start();
    let end = match rest.chars().next()? {
        '"' => '"',
        '<' => '>',
        _ => return None,
    };
    rest[1..].split_once(end).map(|(path, _)| path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn included(files: &[(&str, &str)]) -> Vec<String> {
        let request = Request::kernel("a.cu", files, "sm_90a");
        request.included().into_iter().map(|(path, _)| path.to_owned()).collect()
    }

    #[test]
    fn files_are_followed_through_others_and_round_circles() {
        let files = [
            ("a.cu", "#include \"b.cuh\"\n  # include <c/c.cuh> // twice\n#include \"b.cuh\""),
            ("b.cuh", "#pragma once\n#include \"c/c.cuh\"\n#include \"a.cu\""),
            ("c/c.cuh", "#ifdef D\n#include \"d.cuh\"\n#endif\n#include \"b.cuh\""),
            ("d.cuh", "#include D\n#include\n#include \"open\n#included \"e.cuh\""),
            ("e.cuh", "int unused;"),
        ];
        let mut found = included(&files);
        found.sort();
        assert_eq!(found, ["b.cuh", "c/c.cuh", "d.cuh"]);
    }

    #[test]
    fn headers_of_this_crate_are_followed() {
        let found = included(&[("a.cu", "#include \"weft/device.cuh\"")]);
        assert!(found.contains(&"weft/ptx.cuh".to_owned()), "{found:?}");
        assert_eq!(included(&[]), [""; 0]);
    }
}
