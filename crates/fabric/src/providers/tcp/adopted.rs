//! Link over a connection that the pair protocol made, without a separate port.

use super::adoption::Adoption;
use super::config::{TcpConfig, TcpCounters};
use super::device::TcpDevice;
use super::link::new_token;
use crate::device::Device;
use crate::error::Result;
use crate::link::{Link, Membership};
use crate::types::ProviderKind;
use std::net::Ipv4Addr;
use std::sync::Arc;

/// One pair's device: one stream, over the connection in an [`Adoption`].
#[derive(Debug)]
pub struct AdoptedTcp {
    adoption: Adoption,
    /// Limits, with one stream.
    config: TcpConfig,
}

impl AdoptedTcp {
    /// Device for one pair.
    pub fn new(adoption: Adoption, config: TcpConfig) -> AdoptedTcp {
        AdoptedTcp { adoption, config: TcpConfig { streams: 1, ..config } }
    }
}

impl Device for AdoptedTcp {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Tcp
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let config = self.config.clone();
        let device = TcpDevice { config, counters: Arc::new(TcpCounters::default()) };
        let mut link = device.link(group, Ipv4Addr::UNSPECIFIED.into());
        link.adoption = Some(self.adoption.clone());
        Ok(Box::new(link))
    }
}

/// Sixteen random bytes that identify a pair's connection.
pub fn random_token() -> Result<[u8; 16]> {
    new_token()
}
