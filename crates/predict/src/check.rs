//! Range checks for the numbers in a scenario.

use crate::error::Error;

/// Rejects numbers below 0 and non-finite ones.
pub(crate) fn at_least_0(field: impl Into<String>, value: f64) -> Result<(), Error> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(Error::field(field, value, "at least 0"))
}

/// Rejects numbers up to 0 and non-finite ones.
pub(crate) fn more_than_0(field: impl Into<String>, value: f64) -> Result<(), Error> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(Error::field(field, value, "more than 0"))
}

/// Rejects a zero count or one above `most`.
pub(crate) fn from_1_to(most: u64, field: &str, value: impl Into<u64>) -> Result<(), Error> {
    let value = value.into();
    if (1..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::field(field, value, format!("from 1 to {most}")))
}
