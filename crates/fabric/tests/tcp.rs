//! Engines over real sockets: random writes byte for byte, back-pressure, unproven connections, malicious
//! peers, and all kinds of peer loss.

#[path = "tcp/classes.rs"]
mod classes;
#[path = "common/mod.rs"]
mod common;
#[path = "tcp/configuration.rs"]
mod configuration;
#[path = "tcp/connecting.rs"]
mod connecting;
#[path = "tcp/ends.rs"]
mod ends;
#[path = "tcp/frames.rs"]
mod frames;
#[path = "tcp/handmade.rs"]
mod handmade;
#[path = "tcp/handover.rs"]
mod handover;
#[path = "tcp/loss.rs"]
mod loss;
#[path = "tcp/traffic.rs"]
mod traffic;
#[path = "tcp/unproven.rs"]
mod unproven;
