//! Slurm node list expansion: for example, `gpu[003-007,9],login1` has seven hosts.

/// Brackets in one item: bound on the recursion, more than any real machine needs.
const MAX_BRACKETS: usize = 16;

/// First `limit` hosts in a list, in order. `None` if it is not a node list; items past the limit are not
/// checked.
pub(crate) fn expand(list: &str, limit: usize) -> Option<Vec<String>> {
    let mut hosts = Vec::new();
    for item in split_outside_brackets(list)? {
        if item.matches('[').count() > MAX_BRACKETS {
            return None;
        }
        expand_item(item, limit, &mut hosts)?;
        if hosts.len() >= limit {
            break;
        }
    }
    hosts.truncate(limit);
    if hosts.is_empty() { None } else { Some(hosts) }
}

fn split_outside_brackets(list: &str) -> Option<Vec<&str>> {
    let (mut items, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, letter) in list.char_indices() {
        match letter {
            '[' if !inside => inside = true,
            ']' if inside => inside = false,
            '[' | ']' => return None,
            ',' if !inside => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(&list[start..]);
    if inside || items.iter().any(|item| item.trim().is_empty()) { None } else { Some(items) }
}

/// Expands one item. `a[1-2]b[3-4]` is a product whose last bracket varies fastest.
fn expand_item(item: &str, limit: usize, hosts: &mut Vec<String>) -> Option<()> {
    let Some((before, rest)) = item.trim().split_once('[') else {
        hosts.push(item.trim().to_string());
        return Some(());
    };
    let (ranges, after) = rest.split_once(']')?;
    let mut tails = Vec::new();
    if after.is_empty() {
        tails.push(String::new());
    } else {
        expand_item(after, limit, &mut tails)?;
    }
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(first) || !digits(last) {
            return None;
        }
        let (from, to): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        if to < from {
            return None;
        }
        for number in from..=to {
            for tail in &tails {
                if hosts.len() >= limit {
                    return Some(());
                }
                hosts.push(format!("{before}{number:0width$}{tail}", width = first.len()));
            }
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(list: &str) -> Vec<String> {
        expand(list, 100).unwrap_or_default()
    }

    #[test]
    fn plain_names_ranges_and_widths() {
        assert_eq!(all("node7"), ["node7"]);
        assert_eq!(all("a,b"), ["a", "b"]);
        assert_eq!(all("node[003-005,9]"), ["node003", "node004", "node005", "node9"]);
        assert_eq!(all("gpu[08-10]-ib,login1"), ["gpu08-ib", "gpu09-ib", "gpu10-ib", "login1"]);
        assert_eq!(all("r[1-2]n[1-2]"), ["r1n1", "r1n2", "r2n1", "r2n2"]);
    }

    #[test]
    fn what_is_no_list_is_refused_and_a_huge_one_is_cut() {
        for bad in ["", "a[", "a]", "a[1-]", "a[x]", "a[2-1]", "a[[1]]", "a,,b", "a[]"] {
            assert_eq!(expand(bad, 10), None, "{bad:?}");
        }
        assert_eq!(expand("n[0-18446744073709551615]", 2).unwrap(), ["n0", "n1"]);
        assert_eq!(expand(&"a[1]".repeat(100_000), 2), None);
    }

    proptest! {
        #[test]
        fn nothing_panics(list in "[a-c0-9\\[\\],-]{0,24}") {
            let _ = expand(&list, 8);
        }
    }
}
