//! Durations in messages, rounded.

use std::fmt;
use std::time::Duration;

/// Duration with the digits that a reader needs: `1.5 s`, `30 s`, `250 ms`, `40 us`.
#[derive(Clone, Copy, Debug)]
pub struct Rounded(pub Duration);

impl fmt::Display for Rounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_nanos().div_ceil(1000);
        // Tenths of a second, and whole milliseconds: a 1.0007 s wait is shown as 1 s.
        let (tenths, millis) = ((micros + 50_000) / 100_000, (micros + 500) / 1000);
        match (tenths, millis) {
            _ if millis >= 1000 && tenths.is_multiple_of(10) => write!(f, "{} s", tenths / 10),
            _ if millis >= 1000 => write!(f, "{}.{} s", tenths / 10, tenths % 10),
            (_, 1..) => write!(f, "{millis} ms"),
            _ => write!(f, "{micros} us"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_that_no_reader_needs_are_rounded_away() {
        for (seconds, expected) in [
            (1.000_735_08, "1 s"),
            (0.999_7, "1 s"),
            (1.549, "1.5 s"),
            (30.02, "30 s"),
            (3600.0, "3600 s"),
            (0.1, "100 ms"),
            (0.001_2, "1 ms"),
            (0.000_04, "40 us"),
            (0.0, "0 us"),
        ] {
            assert_eq!(Rounded(Duration::from_secs_f64(seconds)).to_string(), expected);
        }
        assert!(Rounded(Duration::MAX).to_string().ends_with(" s"));
    }
}
