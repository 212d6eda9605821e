//! NIC names in an environment variable.

/// Value for which the default without a GPU holds.
const ALL: &str = "all";

/// NICs that a variable names, separated by commas; none for `all`, or if it is not set.
pub(super) fn parse(text: Option<String>) -> Vec<String> {
    let text = text.filter(|names| names != ALL).unwrap_or_default();
    let names = text.split(',').map(|name| name.trim().to_owned());
    if text.is_empty() { Vec::new() } else { names.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_names_none() {
        let parsed = |text: &str| parse(Some(text.to_owned()));
        assert_eq!(parsed("all"), parse(None));
        assert!(parsed("all").is_empty());
        assert_eq!(parsed("mlx5_0, mlx5_1:2"), ["mlx5_0", "mlx5_1:2"]);
        // An empty name is reported as a NIC that this host lacks.
        assert_eq!(parsed("mlx5_0,"), ["mlx5_0", ""]);
    }
}
