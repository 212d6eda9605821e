//! Engines over real sockets: every byte of random writes, back-pressure, strangers, hostile peers,
//! and every way in which a peer can go.

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
#[path = "tcp/strangers.rs"]
mod strangers;
#[path = "tcp/traffic.rs"]
mod traffic;
