//! Numbers of a scenario that cannot be, refused in the same words everywhere.

use crate::error::Error;

/// Refuses a number that is below 0 or not finite.
pub(crate) fn at_least_0(field: impl Into<String>, value: f64) -> Result<(), Error> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(Error::field(field, value, "at least 0"))
}

/// Refuses a number that is not above 0 or not finite.
pub(crate) fn more_than_0(field: impl Into<String>, value: f64) -> Result<(), Error> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(Error::field(field, value, "more than 0"))
}

/// Refuses a count that is 0 or above `most`.
pub(crate) fn from_1_to(most: u64, field: &str, value: impl Into<u64>) -> Result<(), Error> {
    let value = value.into();
    if (1..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::field(field, value, format!("from 1 to {most}")))
}
