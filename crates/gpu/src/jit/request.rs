//! Compile request: a program, macros and architecture, and the digest over everything that determines the machine
//! code.

use super::replaced;
use crate::error::{Error, Result};
use crate::kernels;
use sha2::{Digest as _, Sha256};

/// Program to compile, with constants and architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileRequest<'a> {
    /// Program name in `files`; it may include the others, and [`kernels::HEADERS`].
    pub name: &'a str,
    /// Path and text for each of the caller's source files.
    pub files: &'a [(&'a str, &'a str)],
    /// Macros, by name and value.
    pub defines: Vec<(String, String)>,
    /// The architecture, such as `sm_90a`.
    pub arch: String,
    /// Additional compiler options.
    pub options: Vec<String>,
}

impl<'a> CompileRequest<'a> {
    /// The program `name` in `files`, for an architecture.
    pub fn kernel(
        name: &'a str,
        files: &'a [(&'a str, &'a str)],
        arch: &str,
    ) -> CompileRequest<'a> {
        CompileRequest {
            name,
            files,
            defines: Vec::new(),
            arch: arch.to_owned(),
            options: Vec::new(),
        }
    }

    /// Path and text for all files: the caller's, then the headers. A file in the `WEFT_KERNELS` folder replaces the
    /// file with the same path.
    pub fn sources(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let files = self.files.iter().chain(kernels::HEADERS);
        files.map(|(path, text)| (*path, replaced::text(path).unwrap_or(text)))
    }

    /// Program text.
    ///
    /// # Errors
    /// [`Error::NoKernel`] if no file has this name.
    pub fn text(&self) -> Result<&'a str> {
        let mut own = self.sources().take(self.files.len());
        let found = own.find(|(path, _)| *path == self.name);
        found.map(|(_, text)| text).ok_or_else(|| Error::NoKernel {
            name: self.name.to_owned(),
            known: match self.files {
                [] => "none".to_owned(),
                files => files.iter().map(|(path, _)| *path).collect::<Vec<_>>().join(", "),
            },
        })
    }

    /// Path and text for all files that the program includes, directly or through others: the
    /// [`CompileRequest::sources`] named by a literal `#include`. Conditions are not evaluated, so it is a superset of
    /// the compiler's.
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

    /// Compiler options, including the macros.
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments =
            vec![format!("--gpu-architecture={}", self.arch), "--std=c++20".to_owned()];
        // Unmarked functions are for the device: constexpr functions, lambdas.
        arguments.push("--device-as-default-execution-space".to_owned());
        arguments.extend(self.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        arguments.extend_from_slice(&self.options);
        arguments
    }

    pub(super) fn validate(&self) -> Result<()> {
        let files = self.files.iter().chain(kernels::HEADERS);
        replaced::check(files.map(|(path, _)| *path))?;
        self.text()?;
        for (name, _) in &self.defines {
            let mut letters = name.chars();
            let starts = letters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
            if !starts || !letters.all(|c| c.is_ascii_alphanumeric() || c == '_') {
                return Err(Error::Define { name: name.clone() });
            }
        }
        Ok(())
    }

    /// SHA-256 over everything that determines the machine code.
    pub(super) fn key(&self, compiler: &str) -> CacheKey {
        let mut digest = Sha256::new();
        let mut add = |text: &str| {
            digest.update((text.len() as u64).to_le_bytes());
            digest.update(text);
        };
        add("weft kernel 2");
        add(compiler);
        add(self.name);
        add(self.text().unwrap_or_default());
        let included = self.included();
        add(&included.len().to_string());
        for (path, text) in included {
            add(path);
            add(text);
        }
        self.arguments().iter().for_each(|argument| add(argument));
        CacheKey(digest.finalize().into())
    }
}

/// Cache entry key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheKey(pub(super) [u8; 32]);

impl std::fmt::Display for CacheKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Path in an `#include` line, if any.
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
pub(super) mod tests {
    use super::*;

    const FILES: &[(&str, &str)] = &[("a.cu", "#include \"b.cuh\""), ("b.cuh", "int b;")];

    pub fn request() -> CompileRequest<'static> {
        CompileRequest {
            name: "a.cu",
            files: FILES,
            defines: vec![("WEFT_RANKS".into(), "8".into())],
            arch: "sm_90a".into(),
            options: vec![],
        }
    }

    #[test]
    fn all_inputs_of_the_code_are_part_of_the_key() {
        let key = request().key("nvrtc 13.0");
        assert_eq!(key, request().key("nvrtc 13.0"));
        assert_eq!(key.to_string().len(), 64);
        let mut others = vec![request().key("nvrtc 13.1")];
        let mut other = |change: fn(&mut CompileRequest<'static>)| {
            let mut changed = request();
            change(&mut changed);
            others.push(changed.key("nvrtc 13.0"));
        };
        other(|r| r.arch = "sm_100a".into());
        other(|r| r.defines[0].1 = "4".into());
        other(|r| r.options.push("-lineinfo".into()));
        other(|r| r.name = "b.cuh");
        other(|r| r.files = &[("a.cu", "#include \"b.cuh\""), ("b.cuh", "int c;")]);
        other(|r| r.files = &[("a.cu", "#include \"b.cuh\""), ("c.cuh", "int b;")]);
        other(|r| r.files = &[("a.cu", "#include \"b.cuh\"b"), (".cuh", "int b;")]);
        for (number, one) in others.iter().enumerate() {
            assert!(*one != key && !others[..number].contains(one), "change {number}");
        }
    }

    #[test]
    fn a_file_that_is_not_included_is_not_part_of_the_key() {
        let key = request().key("nvrtc 13.0");
        let unrelated: [(&str, &str); 3] =
            [("c.cuh", "int c;"), ("a.cu", "#include \"b.cuh\""), ("b.cuh", "int b;")];
        assert_eq!(CompileRequest { files: &unrelated, ..request() }.key("nvrtc 13.0"), key);
        let mut nested = unrelated;
        nested[2].1 = "#include \"c.cuh\"";
        let before = CompileRequest { files: &nested, ..request() }.key("nvrtc 13.0");
        let mut changed = nested;
        changed[0].1 = "int d;";
        assert_ne!(CompileRequest { files: &changed, ..request() }.key("nvrtc 13.0"), before);
    }

    fn included(files: &[(&str, &str)]) -> Vec<String> {
        let request = CompileRequest::kernel("a.cu", files, "sm_90a");
        request.included().into_iter().map(|(path, _)| path.to_owned()).collect()
    }

    #[test]
    fn includes_are_followed_transitively_and_through_cycles() {
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
