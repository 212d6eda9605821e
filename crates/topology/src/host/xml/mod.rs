//! NCCL's topology XML, as `NCCL_TOPO_DUMP_FILE` writes it and `NCCL_TOPO_FILE` reads it.
//!
//! - `reader.rs`: reader
//! - `write.rs`, `rewrite.rs`: writer, and changes to a text that was read

mod reader;
mod rewrite;
mod write;

pub(super) use reader::read;

use super::model::Host;
use rewrite::rewritten;

/// NCCL's XML for a server: the text that it was read from, with what has been added since, or else a new one.
pub(super) fn write(host: &Host) -> String {
    match &host.xml {
        Some(text) => rewritten(host, text).unwrap_or_else(|_| write::write(host)),
        None => write::write(host),
    }
}
