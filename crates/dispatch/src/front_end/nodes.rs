//! Nodes that join, drain, leave and are lost.

use super::FrontEnd;
use super::link::Link;
use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::ledger::NodeId;
use weft_fabric::{RegionKey, Time};

impl FrontEnd {
    /// Adds a node. `keys` are the keys for the [`FrontEnd::new`] memories in this connection's engine, in order.
    ///
    /// # Errors
    /// [`Error::Disagreement`] for another schema or another number of keys; errors from [`Ledger::join`].
    pub fn join(&mut self, connection: Connection, keys: &[RegionKey]) -> Result<NodeId> {
        let agreement = connection.agreement();
        if agreement.schema != self.admission.schema {
            let (ours, name, theirs) = (&self.admission.schema, &agreement.name, &agreement.schema);
            let detail = format!("the front end expects {ours}, node {name} has {theirs}");
            return Err(Error::Disagreement { detail });
        }
        if keys.len() != self.memories.len() {
            let expected = format!("{}, one for each front end memory", self.memories.len());
            return Err(Error::Invalid {
                what: "keys of memories",
                value: keys.len() as u64,
                expected,
            });
        }
        let checksum = agreement.checksum;
        if checksum && self.memories.iter().any(|memory| memory.host().is_none()) {
            let detail = "checksums need memory that the CPU reads; a memory is on a device".into();
            return Err(Error::Disagreement { detail });
        }
        let node = self.ledger.join(agreement.slots)?;
        self.links[node.place()] = Some(Link::new(connection, keys));
        Ok(node)
    }

    /// Stops sending to a node. Its queries are answered; then [`FrontEnd::in_flight`] is 0, and it may leave.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn drain(&mut self, node: NodeId) -> Result<()> {
        self.ledger.drain(node)
    }

    /// True for a node that takes no more queries, by [`FrontEnd::drain`] or by announcement.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn is_draining(&self, node: NodeId) -> Result<bool> {
        self.ledger.is_draining(node)
    }

    /// A node's slots in use.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn in_flight(&self, node: NodeId) -> Result<u32> {
        self.ledger.in_flight(node)
    }

    /// A node's slots whose queries have ended without an answer.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn quarantined(&self, node: NodeId) -> Result<u32> {
        self.ledger.quarantined(node)
    }

    /// Removes a node without slots in use; returns the connection.
    ///
    /// # Errors
    /// [`Error::UnknownNode`]; [`Error::NotIdle`].
    pub fn leave(&mut self, node: NodeId) -> Result<Option<Connection>> {
        self.ledger.leave(node)?;
        Ok(self.links[node.place()].take().map(|link| link.connection))
    }

    /// Removes a node that is lost, once the engine is poisoned. Unanswered queries are sent to other nodes, or
    /// fail. The slot memory lives until the last answer was reported.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn lose(&mut self, node: NodeId) -> Result<()> {
        self.ledger.lose(node)?;
        if let Some(link) = &mut self.links[node.place()] {
            link.end_grace();
        }
        Ok(())
    }

    /// Notes that a node has left in order. It gets no more queries; queries whose answers do not arrive within the
    /// grace period are lost with it.
    pub(super) fn note_departure(&mut self, now: Time, node: NodeId) -> Result<()> {
        let Some(link) = &mut self.links[node.place()] else { return Ok(()) };
        if link.has_just_left(now) {
            self.ledger.drain(node)?;
        }
        if link.grace().is_some_and(|end| end <= now) {
            link.end_grace();
            let in_flight = self.ledger.in_flight(node)?;
            if in_flight > 0 {
                let detail = format!("node {node} has left with {in_flight} slots in use");
                link.connection.peer.poison(detail);
            }
        }
        Ok(())
    }

    /// Node name, from the handshake.
    pub fn name(&self, node: NodeId) -> Option<&str> {
        let link: &Link = self.links.get(node.place())?.as_ref()?;
        Some(&link.connection.agreement().name)
    }
}
