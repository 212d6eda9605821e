//! Nodes that join, drain, leave and are lost.

use super::FrontEnd;
use super::link::Link;
use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::ledger::NodeId;
use weft_fabric::{RegionKey, Time};

impl FrontEnd {
    /// Adds a node. `keys` are the keys of the memories of [`FrontEnd::new`] in the engine of this connection, in
    /// order.
    ///
    /// # Errors
    /// [`Error::Disagreement`] for another schema or another number of keys; those of [`Ledger::join`].
    pub fn join(&mut self, connection: Connection, keys: &[RegionKey]) -> Result<NodeId> {
        let agreement = connection.agreement();
        if agreement.schema != self.admission.schema {
            let (ours, name, theirs) = (&self.admission.schema, &agreement.name, &agreement.schema);
            let detail = format!("the front end expects {ours}, node {name} has {theirs}");
            return Err(Error::Disagreement { detail });
        }
        if keys.len() != self.memories.len() {
            let expected = format!("{}, one for each memory of the front end", self.memories.len());
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

    /// Ends the sends to a node. Its queries are answered; then [`FrontEnd::in_flight`] is 0, and it may leave.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn drain(&mut self, node: NodeId) -> Result<()> {
        self.ledger.drain(node)
    }

    /// True for a node that takes no more queries, by [`FrontEnd::drain`] or its own announcement.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn is_draining(&self, node: NodeId) -> Result<bool> {
        self.ledger.is_draining(node)
    }

    /// Slots in use of a node.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn in_flight(&self, node: NodeId) -> Result<u32> {
        self.ledger.in_flight(node)
    }

    /// Slots of a node whose queries have ended without its answer.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn quarantined(&self, node: NodeId) -> Result<u32> {
        self.ledger.quarantined(node)
    }

    /// Removes a node without slots in use; returns its connection.
    ///
    /// # Errors
    /// [`Error::UnknownNode`]; [`Error::NotIdle`].
    pub fn leave(&mut self, node: NodeId) -> Result<Option<Connection>> {
        self.ledger.leave(node)?;
        Ok(self.links[node.place()].take().map(|link| link.connection))
    }

    /// Removes a node that is lost, once its engine is poisoned. Its unanswered queries are sent to other nodes, or
    /// fail. The memory of its slots lives until its last answer was reported.
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

    /// Takes note of a node that has left in order. It gets no more queries; those whose answers do not arrive within
    /// the grace period are lost with it.
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

    /// Name of a node, from its handshake.
    pub fn name(&self, node: NodeId) -> Option<&str> {
        let link: &Link = self.links.get(node.place())?.as_ref()?;
        Some(&link.connection.agreement().name)
    }
}
