//! Hosts and networks as values.
//!
//! A [`Network`] is a graph of endpoints, switches and directed links, made by a builder, for example [`BiGraph`],
//! [`FatTree`], [`FatTree3`] or [`Rail`], or from JSON. A [`Router`] returns the links that a message crosses under a
//! [`Routing`]. A [`Host`] is a server's PCIe tree with GPUs and NICs; the lint reports findings that cost bandwidth.
//! `docs/topology.md` shows how to describe a cluster.

#![warn(missing_docs)]

mod adjacency;
mod builder;
mod builders;
mod cabling;
mod describe;
mod error;
pub mod host;
mod ids;
mod inner_paths;
mod json;
mod links;
mod names;
mod network;
mod placement;
mod rank_map;
mod rank_order;
mod reach;
pub mod report;
mod routing;

/// Builder for any network, node by node.
pub use builder::NetworkBuilder;
/// Builders for common networks.
pub use builders::{Attachment, BiGraph, FatTree, FatTree3, Port, Rail};
/// Cabling lists.
pub use cabling::{Cable, CableEnd, cables_csv, cables_of};
/// Descriptions in short form or JSON.
pub use describe::Description;
/// Errors.
pub use error::{Error, Result};
/// Servers.
pub use host::Host;
/// Networks.
pub use network::{
    EndpointId, LinkId, LinkInfo, LinkSpec, MAX_LINKS, MAX_NODES, Network, NodeId, NodeKind, Route,
};
/// Rank placements in the files that launchers read.
pub use placement::{RankPlacement, RankPlacements};
/// Rank maps.
pub use rank_map::{RankMap, hdrm_port};
/// Rank order in a group.
pub use rank_order::RankOrder;
/// Paths.
pub use routing::{Router, Routing};
