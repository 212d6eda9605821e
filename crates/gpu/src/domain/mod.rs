//! The domain: what all operators between the GPUs of a host stand on.

mod alarm;

pub use alarm::{Alarm, Group};
