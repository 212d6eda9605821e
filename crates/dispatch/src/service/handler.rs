//! Handler: receives a front end's reports.

use crate::front_end::{FrontEnd, Report};
use crate::ledger::{NodeId, Notice};

/// Report receiver, called on a [`super::FrontEndService`] thread. Queries wait while it runs. It may submit through a
/// [`super::FrontEndHandle`] without waiting; calls to the service itself would wait for themselves.
pub trait Handler: Send {
    /// Reports from one service turn, at least one, in the order in which the queries ended. Every query has exactly
    /// one [`Report::Answered`] or [`Report::Failed`].
    fn reports(&mut self, reports: &Reports<'_>);

    /// A node has left or was lost. Its unanswered queries are sent to others, or fail.
    fn node_gone(&mut self, departure: &Departure<'_>) {
        let _ = departure;
    }
}

/// A node connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure<'a> {
    /// Node.
    pub node: NodeId,
    /// Name from the handshake.
    pub name: &'a str,
    /// False for a node that was drained and left in order.
    pub is_lost: bool,
    /// Cause, in a line.
    pub cause: &'a str,
}

/// Reports from one turn. All answers are readable during the call.
#[derive(Clone, Copy, Debug)]
pub struct Reports<'a> {
    front_end: &'a FrontEnd,
    notices: &'a [Notice],
}

impl<'a> Reports<'a> {
    pub(super) fn new(front_end: &'a FrontEnd, notices: &'a [Notice]) -> Reports<'a> {
        Reports { front_end, notices }
    }

    /// Report count.
    pub fn len(&self) -> usize {
        self.notices.len()
    }

    /// True without reports.
    pub fn is_empty(&self) -> bool {
        self.notices.is_empty()
    }

    /// The reports, in order.
    pub fn iter(&self) -> impl Iterator<Item = Report<'a>> + use<'a> {
        let front_end = self.front_end;
        self.notices.iter().filter_map(move |notice| front_end.report(notice))
    }
}
