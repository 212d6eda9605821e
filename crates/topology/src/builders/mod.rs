//! Builders for common networks: BiGraph, fat tree, rail-optimised.

mod attach;
mod bigraph;
mod fat_tree;
mod rail;

pub use attach::Attachment;
pub use bigraph::{BiGraph, Port};
pub use fat_tree::{FatTree, FatTree3};
pub use rail::Rail;
