//! Environment variable values.

use std::env::var_os;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

/// This crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Maximum characters that an error shows from a value.
const SHOWN: usize = 200;

/// Variable whose value cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {value:?}: {problem}; {remedy}")]
pub struct Error {
    /// Variable name.
    pub name: String,
    /// Value, abbreviated if it is long.
    pub value: String,
    /// Problem.
    pub problem: String,
    /// Valid values.
    pub remedy: String,
}

/// Error for a value that is not `expected`, such as "a whole number".
pub fn invalid(name: &str, value: impl AsRef<OsStr>, expected: &str) -> Error {
    let whole = value.as_ref().to_string_lossy();
    let mut value: String = whole.chars().take(SHOWN).collect();
    if value.len() < whole.len() {
        value.push_str("...");
    }
    Error {
        name: name.to_owned(),
        value,
        problem: format!("it is not {expected}"),
        remedy: format!("set it to {expected}, or not at all"),
    }
}

/// Value as text, without white space around it; `None` if it is not set or blank.
///
/// # Errors
/// [`Error`] if it is not UTF-8.
pub fn text(name: &str) -> Result<Option<String>> {
    text_of(name, var_os(name))
}

/// [`text`] for a given value.
///
/// # Errors
/// Same as [`text`].
pub fn text_of(name: &str, value: Option<OsString>) -> Result<Option<String>> {
    let Some(value) = value else { return Ok(None) };
    let text = value.into_string().map_err(|value| invalid(name, value, "UTF-8"))?;
    let text = text.trim();
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

/// Value that is 0 or 1; `default` if it is not set.
///
/// # Errors
/// [`Error`] for any other value.
pub fn flag(name: &str, default: bool) -> Result<bool> {
    match text(name)?.as_deref() {
        None => Ok(default),
        Some("0") => Ok(false),
        Some("1") => Ok(true),
        Some(other) => Err(invalid(name, other, "0 or 1")),
    }
}

/// Value as a path, with any bytes; `None` if it is not set or blank.
pub fn path(name: &str) -> Option<PathBuf> {
    path_of(var_os(name))
}

/// [`path`] for a given value.
pub fn path_of(value: Option<OsString>) -> Option<PathBuf> {
    value.filter(|value| !is_blank(value)).map(PathBuf::from)
}

/// Value as bytes, without ASCII white space around it; `None` if it is not set or blank.
pub fn bytes(name: &str) -> Option<Vec<u8>> {
    bytes_of(var_os(name))
}

/// [`bytes()`] for a given value.
pub fn bytes_of(value: Option<OsString>) -> Option<Vec<u8>> {
    let value = value.filter(|value| !is_blank(value))?.into_vec();
    Some(value.trim_ascii().to_vec())
}

fn is_blank(value: &OsStr) -> bool {
    value.as_bytes().trim_ascii().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(bytes: &[u8]) -> Option<OsString> {
        Some(OsString::from_vec(bytes.to_vec()))
    }

    #[test]
    fn a_value_that_is_no_text_is_an_error_with_its_name() {
        let message = text_of("WEFT_RANK", raw(b"1\xff")).unwrap_err().to_string();
        assert!(message.starts_with("WEFT_RANK is \"1"), "{message}");
        assert!(message.contains("not UTF-8"), "{message}");
        assert_eq!(text_of("WEFT_RANK", raw(" 1\n".as_bytes())), Ok(Some("1".to_owned())));
    }

    #[test]
    fn blank_counts_as_not_set() {
        for blank in [None, raw(b""), raw(b" \t\n")] {
            assert_eq!(text_of("WEFT_RANK", blank.clone()), Ok(None));
            assert_eq!(path_of(blank.clone()), None);
            assert_eq!(bytes_of(blank), None);
        }
    }

    #[test]
    fn paths_and_secrets_keep_their_bytes() {
        assert_eq!(path_of(raw(b" a\xff ")).unwrap().as_os_str().as_bytes(), b" a\xff ");
        assert_eq!(bytes_of(raw(b"\xff\xfe\n")).unwrap(), b"\xff\xfe");
    }

    #[test]
    fn an_error_shows_the_begin_of_a_long_value() {
        let message = invalid("WEFT_RANK", "9".repeat(100_000), "a whole number").to_string();
        assert!(message.len() < 400 && message.contains("999..."), "{message}");
    }
}
