//! Peer groups for Python.

use crate::numbers::{DestinationOffset, Length, Member, Round, SourceOffset};
use crate::request::Request;
use crate::shared::{Shared, deliver};
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};
use weft_fabric::{MemberWrite, PeerGroup as FabricPeerGroup};

/// Peers that are written to together: a counter, a source and each one's region.
#[pyclass(frozen, module = "weft._native")]
pub struct PeerGroup {
    group: Mutex<FabricPeerGroup>,
    shared: Shared,
}

impl PeerGroup {
    pub fn new(group: FabricPeerGroup, shared: &Shared) -> PeerGroup {
        PeerGroup { group: Mutex::new(group), shared: shared.clone() }
    }
}

#[pymethods]
impl PeerGroup {
    /// Writes source slices to members, as one request, in a round or in the next one toward each:
    /// (member, first byte read, first byte written, length).
    #[pyo3(signature = (writes, round, done))]
    fn scatter(
        &self,
        py: Python<'_>,
        writes: Vec<(Member, SourceOffset, DestinationOffset, Length)>,
        round: Option<Round>,
        done: Option<Py<PyAny>>,
    ) -> PyResult<Request> {
        let id = self.shared.with(py, move |fabric| {
            let write =
                |(member, from, to, length): (Member, SourceOffset, DestinationOffset, Length)| {
                    MemberWrite {
                        member: member.0,
                        source_offset: from.0,
                        destination_offset: to.0,
                        length: length.0,
                    }
                };
            let writes: Vec<MemberWrite> = writes.into_iter().map(write).collect();
            let mut engine = fabric.engine();
            let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
            deliver(&self.shared, done, |done| match round {
                Some(Round(round)) => engine.scatter_group(&mut group, round, &writes, done),
                None => engine.scatter_group_next(&mut group, &writes, done),
            })
        })?;
        Ok(Request { id, shared: self.shared.clone() })
    }
}
