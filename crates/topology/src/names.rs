//! Name patterns with ranges: `gpu[0-7]`, `leaf[0-3].port[0-1]`.

use crate::error::{Error, Result};
use crate::network::{MAX_NODES, limit};

/// Node name length limit, in bytes.
pub const MAX_NAME: usize = 256;
pub const TOO_LONG: &str = "expected at most 256 bytes";

/// Pattern characters that an error shows.
const SHOWN: usize = 64;

/// Names in a pattern, the last range fastest. The count is checked before any name is made.
pub fn expand(pattern: &str, at: &dyn Fn() -> String) -> Result<Vec<String>> {
    let bad = |reason| {
        let mut name: String = pattern.chars().take(SHOWN).collect();
        if name.len() < pattern.len() {
            name.push_str("...");
        }
        Error::BadName { at: at(), name, reason }
    };
    let mut parts: Vec<(&str, u64, u64, usize)> = Vec::new();
    let mut rest = pattern;
    let mut count = 1u128;
    let mut longest = 0;
    while let Some(open) = rest.find('[') {
        let (before, after) = rest.split_at(open);
        let Some(close) = after.find(']') else {
            return Err(bad("expected ']' after '['"));
        };
        let range = &after[1..close];
        let form = "expected a range of two whole numbers, as [0-7]";
        let (first, last) = range.split_once('-').ok_or_else(|| bad(form))?;
        let number = |text: &str| match text.bytes().all(|b| b.is_ascii_digit()) {
            true => text.parse::<u64>().map_err(|_| bad(form)),
            false => Err(bad(form)),
        };
        // [08-11] is 08, 09, 10, 11: the first number sets the width.
        let width = if first.starts_with('0') { first.len() } else { 0 };
        let (first, last) = (number(first)?, number(last)?);
        if last < first {
            return Err(bad("expected a range whose end is not below its start"));
        }
        count = count.saturating_mul(u128::from(last - first) + 1);
        limit("names", count, MAX_NODES)?;
        longest += before.len() + width.max(last.to_string().len());
        parts.push((before, first, last, width));
        rest = &after[close + 1..];
    }
    if longest + rest.len() > MAX_NAME {
        return Err(bad(TOO_LONG));
    }
    let mut names = vec![String::new()];
    for (before, first, last, width) in parts {
        names = names
            .iter()
            .flat_map(|name| {
                (first..=last).map(move |number| format!("{name}{before}{number:0width$}"))
            })
            .collect();
    }
    for name in &mut names {
        name.push_str(rest);
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_become_names() {
        let names = |pattern| expand(pattern, &|| "here".to_owned()).map(|names| names.join(" "));
        assert_eq!(names("a").unwrap(), "a");
        assert_eq!(names("a[0-2]").unwrap(), "a0 a1 a2");
        assert_eq!(names("a[08-10]x").unwrap(), "a08x a09x a10x");
        assert_eq!(names("a[0-1].b[3-4]").unwrap(), "a0.b3 a0.b4 a1.b3 a1.b4");
        for (pattern, reason) in [
            ("a[0-", "expected ']'"),
            ("a[1]", "two whole numbers"),
            ("a[-1-2]", "two whole numbers"),
            ("a[x-y]", "two whole numbers"),
            ("a[3-2]", "not below its start"),
            ("a[0-99999999999999999999999]", "two whole numbers"),
            ("a[0-999999999999]", "1048576 allowed"),
            ("a[0-9999][0-9999]", "1048576 allowed"),
        ] {
            let error = names(pattern).unwrap_err().to_string();
            assert!(error.contains(reason), "{pattern}: {error}");
        }
    }
}
