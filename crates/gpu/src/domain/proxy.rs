//! A proxy's fields in the domain's table.

use super::Domain;
use crate::error::{Error, Result};
use crate::table::Table;
use std::mem::offset_of;
use std::sync::atomic::Ordering;

/// First of these fields behind the ring's address.
const AFTER_RING: u64 = offset_of!(Table, ticket) as u64;

impl Domain {
    /// Publishes a proxy's addresses to kernels: the table's fields from [`Table::ring`] on.
    ///
    /// # Errors
    /// [`Error::ProxyPresent`]; CUDA's.
    pub(crate) fn publish_proxy(&self, fields: &Table) -> Result<()> {
        if self.has_proxy.swap(true, Ordering::AcqRel) {
            return Err(Error::ProxyPresent);
        }
        // A kernel that finds the ring finds all.
        let written = self
            .write(AFTER_RING, &fields.bytes()[AFTER_RING as usize..])
            .and_then(|()| self.write_ring(fields.ring));
        if written.is_err() {
            self.has_proxy.store(false, Ordering::Release);
        }
        written
    }

    /// Takes a proxy's ring back: kernels that start later push nothing and wait for nothing. A kernel that has found the
    /// ring may use the other addresses until it ends.
    pub(crate) fn withdraw_proxy(&self) -> Result<()> {
        self.write_ring(0)?;
        self.has_proxy.store(false, Ordering::Release);
        Ok(())
    }

    fn write_ring(&self, address: u64) -> Result<()> {
        self.write(offset_of!(Table, ring) as u64, &address.to_ne_bytes())
    }

    /// Tickets that kernels have taken for commands.
    pub(crate) fn proxy_tickets(&self) -> Result<u64> {
        let mut ticket = [0; 8];
        self.load(self.table + offset_of!(Table, ticket) as u64, &mut ticket)?;
        Ok(u64::from_ne_bytes(ticket))
    }
}
