//! Faults over real pairs: refused handshakes, peers that violate the protocol, departures, slow readers, late answers,
//! front ends that vanish. The others go on.
//!
//! `WEFT_TEST_DISPATCH_LOSSES` says how many front ends vanish over each provider (default 2).
#![cfg(not(miri))]

#[path = "faults/handshake.rs"]
mod handshake;
#[path = "faults/load.rs"]
mod load;
#[path = "faults/rogue.rs"]
mod rogue;
#[path = "faults/setup.rs"]
mod setup;
#[path = "faults/vanishing.rs"]
mod vanishing;
#[path = "faults/violations.rs"]
mod violations;
