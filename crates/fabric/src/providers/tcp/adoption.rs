//! Connection slot for a link that dials no peer.

use std::sync::{Arc, Mutex, PoisonError};
use weft_control::pair::MaybeTlsStream;

/// Connection slot for an [`super::AdoptedTcp`] link.
#[derive(Clone, Debug, Default)]
pub struct Adoption(Arc<Mutex<Option<MaybeTlsStream>>>);

impl Adoption {
    /// Stores a connected nonblocking stream. Called before the link connects.
    pub fn put(&self, stream: MaybeTlsStream) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
    }

    /// True once a stream is stored.
    pub fn is_filled(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    pub(super) fn take(&self) -> Option<MaybeTlsStream> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
