//! Builders of the usual networks.

mod attach;
mod bigraph;
mod fat_tree;
mod rail;

pub use attach::Attach;
pub use bigraph::{BiGraph, Port};
pub use fat_tree::{FatTree, FatTree3};
pub use rail::Rail;
