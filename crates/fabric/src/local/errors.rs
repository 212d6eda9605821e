//! Errors from connections between ranks on one host.

use crate::error::Error;
use crate::types::ProviderKind;
use weft_control::{Rank, limits};

/// Error for a failed connection to `peer`, or for this process if it lacks a resource for one.
pub(super) fn io_error(provider: ProviderKind, peer: Rank, error: std::io::Error) -> Error {
    if limits::is_exhausted(&error) {
        return Error::system("cannot exchange descriptors with a rank of this host", error);
    }
    connect_error(provider, peer, error)
}

/// Error for a failed connection to `peer`.
pub(super) fn connect_error(provider: ProviderKind, peer: Rank, detail: impl ToString) -> Error {
    Error::Connect { peer, provider, detail: detail.to_string() }
}
