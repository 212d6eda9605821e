//! The copy provider over a copy engine twin, whose copies complete late and in random order.

#[path = "copy/ends.rs"]
mod ends;
#[path = "copy/faults.rs"]
mod faults;
#[path = "copy/order.rs"]
mod order;
#[path = "copy/regions.rs"]
mod regions;
#[path = "copy/traffic.rs"]
mod traffic;

#[path = "common/mod.rs"]
mod common;
