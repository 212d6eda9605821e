//! Samples in withdrawn queries, which a node may still read.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Failed queries whose memory has not returned.
#[derive(Debug, Default)]
pub(crate) struct Lent {
    queries: Mutex<u64>,
    returned: Condvar,
}

impl Lent {
    /// Adds a query that has failed before the node has answered.
    pub fn add(&self) {
        *self.queries.lock().unwrap_or_else(PoisonError::into_inner) += 1;
    }

    /// Removes a query whose memory has returned.
    pub fn remove(&self) {
        *self.queries.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.returned.notify_all();
    }

    /// Waits until all memory has returned; false if it has not within `limit`.
    pub fn wait(&self, limit: Duration) -> bool {
        let queries = self.queries.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.returned.wait_timeout_while(queries, limit, |queries| *queries > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::Lent;
    use std::time::Duration;

    #[test]
    fn a_wait_ends_with_the_last_return() {
        let lent = Lent::default();
        assert!(lent.wait(Duration::ZERO));
        lent.add();
        lent.add();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| lent.wait(Duration::from_secs(60)));
            lent.remove();
            assert!(!lent.wait(Duration::from_millis(1)));
            lent.remove();
            assert!(waits.join().unwrap());
        });
    }
}
