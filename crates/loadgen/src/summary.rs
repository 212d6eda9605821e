//! Test results from LoadGen's summary.

use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Longest summary: 1 MiB, hundreds of times what LoadGen writes.
const MAX_BYTES: u64 = 1 << 20;

/// `key : value` lines in a LoadGen summary file, such as `Result is : VALID`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    values: BTreeMap<String, String>,
}

impl Summary {
    /// Read `mlperf_log_summary.txt`.
    ///
    /// # Errors
    ///
    /// [`Error::Summary`] if there is no such file, or it has no result: the test was aborted, or measured
    /// only accuracy.
    pub fn read(path: &Path) -> Result<Self> {
        let failed = |problem: String| Error::Summary { path: path.to_owned(), problem };
        let text = weft_environment::read_text(path, MAX_BYTES)
            .map_err(|error| failed(error.to_string()))?;
        Self::parse(&text).ok_or_else(|| failed("it has no line `Result is`".to_owned()))
    }

    /// A summary as text, if it has a result.
    fn parse(text: &str) -> Option<Self> {
        let values: BTreeMap<_, _> = text
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned()))
            .collect();
        values.contains_key("Result is").then_some(Self { values })
    }

    /// True if the run meets all scenario limits.
    pub fn is_valid(&self) -> bool {
        self.values["Result is"] == "VALID"
    }

    /// A value, by LoadGen's name for it: `"Samples per second"`, `"99.00 percentile latency (ns)"`.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str)
    }

    /// A value that is a number.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.get(key)?.parse().ok()
    }

    /// All values, by LoadGen's names.
    pub fn values(&self) -> &BTreeMap<String, String> {
        &self.values
    }
}

#[cfg(test)]
mod tests {
    use super::Summary;

    #[test]
    fn a_summary_has_a_result_and_numbers() {
        let text = "====\nMLPerf Results Summary\n====\nSUT name : x\nSamples per second: 12.5\n\
                    Result is : INVALID\n  Min duration satisfied : NO\n";
        let summary = Summary::parse(text).expect("it has a result");
        assert!(!summary.is_valid());
        assert_eq!(summary.number("Samples per second"), Some(12.5));
        assert_eq!(summary.get("Min duration satisfied"), Some("NO"));
        assert_eq!(summary.number("SUT name"), None);
    }

    #[test]
    fn a_summary_without_a_result_is_none() {
        assert_eq!(Summary::parse("Samples per second: 12.5\n"), None);
    }
}
