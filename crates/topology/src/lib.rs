//! Hosts and networks as values.
//!
//! A [`Network`] is a graph of endpoints, switches and directed links; builders make the usual ones
//! ([`BiGraph`], [`FatTree`], [`FatTree3`], [`Rail`]) and JSON any other. A [`Router`] says which links a
//! message crosses, by an explicit [`Routing`]. A [`Host`] is a server's PCIe tree with its GPUs and NICs, and
//! says what is wrong with it. `docs/topology.md` tells how to describe a cluster.

#![warn(missing_docs)]

mod adjacency;
mod build;
mod builder;
mod cabling;
mod describe;
mod error;
mod forms;
pub mod host;
mod json;
mod names;
mod network;
mod rank_map;
mod reach;
pub mod report;
mod routing;

/// Builders of the usual networks.
pub use build::{Attach, BiGraph, FatTree, FatTree3, Port, Rail};
/// Networks node by node.
pub use builder::NetworkBuilder;
/// What is plugged into what.
pub use cabling::{Cable, CableEnd, cables_csv, cables_of};
/// Short forms.
pub use describe::Description;
/// What can go wrong.
pub use error::{Error, Result};
/// Rank maps for launchers.
pub use forms::{Place, Places};
/// Servers.
pub use host::Host;
/// Networks.
pub use network::{
    EndpointId, LinkId, LinkInfo, LinkSpec, MAX_LINKS, MAX_NODES, Network, NodeId, NodeKind, Route,
};
/// Rank maps.
pub use rank_map::{RankMap, hdrm_port};
/// Paths.
pub use routing::{Router, Routing};
