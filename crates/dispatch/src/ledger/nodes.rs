//! Nodes that join, drain, leave and are lost.

use super::node::{Node, NodeState};
use super::types::{Failure, NodeId, Outcome};
use super::{Ledger, State};
use crate::error::{Error, Result};

impl Ledger {
    /// Adds a node with this many slots; it takes queries at once.
    ///
    /// # Errors
    /// [`Error::Full`] with as many nodes as the ledger takes; [`Error::Invalid`] for the slot count.
    pub fn join(&mut self, slots: u32) -> Result<NodeId> {
        if slots == 0 || slots > self.config.slots {
            let expected = format!("1 to {}", self.config.slots);
            return Err(Error::Invalid { what: "slots of a node", value: slots.into(), expected });
        }
        let vacant = self.nodes.iter().position(|node| node.state == NodeState::Vacant);
        let limit = self.config.nodes;
        let place = vacant.ok_or(Error::Full { what: "nodes", limit })?;
        self.nodes[place].join(slots);
        Ok(NodeId { place: place as u32, reuse: self.nodes[place].reuse })
    }

    /// Stops sending to a node. Its queries in flight are answered as before.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn drain(&mut self, id: NodeId) -> Result<()> {
        self.node(id)?;
        self.nodes[id.place()].state = NodeState::Draining;
        Ok(())
    }

    /// Removes a node without slots in use.
    ///
    /// # Errors
    /// [`Error::UnknownNode`]; [`Error::NotIdle`].
    pub fn leave(&mut self, id: NodeId) -> Result<()> {
        let in_flight = self.node(id)?.load.in_flight;
        if in_flight > 0 {
            return Err(Error::NotIdle { node: id, in_flight });
        }
        self.nodes[id.place()].leave();
        Ok(())
    }

    /// Removes a node that can no longer answer, once the connection is closed, so that it reads no query memory any
    /// more. Unanswered queries wait for other nodes, before all other ones, or fail if they have been sent
    /// [`super::LedgerConfig::max_sends`] times. Memory for quarantined ones returns. Answers that the caller has
    /// not released stay readable.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn lose(&mut self, id: NodeId) -> Result<()> {
        let slots = self.node(id)?.slots();
        // The last slot first: the first one's query stands first then.
        for slot in (0..slots).rev() {
            let Some(index) = self.nodes[id.place()].query_in(slot) else { continue };
            let query = &self.queries[index as usize];
            let sends = query.sends;
            match query.state {
                State::Ended(Outcome::Answered { .. }) => {}
                State::Sent if sends < self.config.max_sends => {
                    // The tokens are void.
                    self.notices.remove(index);
                    self.put_slot_back(index);
                    self.queries[index as usize].state = State::Queued;
                    self.waiting.push_first(index);
                }
                State::Sent => {
                    self.put_slot_back(index);
                    self.end(index, Outcome::Failed(Failure::NodeLost { node: id, sends }));
                }
                State::Ended(Outcome::Failed(_)) => {
                    self.nodes[id.place()].quarantined -= 1;
                    self.put_slot_back(index);
                    self.returned(index);
                }
                State::Free | State::Queued => {}
            }
        }
        let node = &mut self.nodes[id.place()];
        match node.load.in_flight {
            0 => node.leave(),
            _ => node.state = NodeState::Lost,
        }
        Ok(())
    }

    /// A node's slots in use, including answers that the caller has not released.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn in_flight(&self, id: NodeId) -> Result<u32> {
        Ok(self.node(id)?.load.in_flight)
    }

    /// A node's slots whose queries have ended without an answer.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn quarantined(&self, id: NodeId) -> Result<u32> {
        Ok(self.node(id)?.quarantined)
    }

    /// True for a node that takes no more queries.
    ///
    /// # Errors
    /// [`Error::UnknownNode`].
    pub fn is_draining(&self, id: NodeId) -> Result<bool> {
        Ok(self.node(id)?.state == NodeState::Draining)
    }

    /// True if a lost node's answers are all released, or the node has left: the memory may be freed.
    pub fn is_gone(&self, id: NodeId) -> bool {
        !self
            .nodes
            .get(id.place())
            .is_some_and(|node| node.reuse == id.reuse && node.state != NodeState::Vacant)
    }

    pub(super) fn node(&self, id: NodeId) -> Result<&Node> {
        let known = self.nodes.get(id.place()).filter(|node| {
            node.reuse == id.reuse && matches!(node.state, NodeState::Ready | NodeState::Draining)
        });
        let Some(known) = known else { return Err(Error::UnknownNode(id)) };
        Ok(known)
    }
}
