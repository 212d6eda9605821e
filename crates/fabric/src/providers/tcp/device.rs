//! Device: TCP sockets on this host.

use super::config::{TcpConfig, TcpCounters};
use super::hot_stream::HotStream;
use super::link::{FIRST_FLUSH, TcpLink, host_identity, provider_error, unusable};
use super::regions::TcpRegions;
use super::wire::TcpAddress;
use super::{handshake, wire};
use crate::device::Device;
use crate::error::Result;
use crate::id_map::PeerMap;
use crate::link::{Link, Membership};
use crate::types::ProviderKind;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

/// TCP sockets on this host; see the module documentation.
#[derive(Clone, Debug)]
pub struct TcpDevice {
    pub(super) config: TcpConfig,
    pub(super) counters: Arc<TcpCounters>,
}

impl TcpDevice {
    /// TCP sockets with this configuration.
    ///
    /// # Errors
    /// [`crate::Error::Provider`] if a value is out of range or the address cannot be listened on.
    pub fn new(config: TcpConfig) -> Result<TcpDevice> {
        let limits = [
            ("streams", u64::from(config.streams), u64::from(wire::MAX_STREAMS)),
            ("max_part_bytes", config.max_part_bytes, 1 << 30),
            ("queue_parts", config.queue_parts.into(), u64::from(u32::MAX)),
        ];
        for (name, value, limit) in limits {
            if !(1..=limit).contains(&value) {
                return Err(provider_error(format!("{name} {value}: expected 1 to {limit}")));
            }
        }
        if config.advertise.unwrap_or(config.bind).is_unspecified() {
            let bind = config.bind;
            let detail = format!(
                "bind address {bind}: expected an address that peers can dial; set `advertise`"
            );
            return Err(provider_error(detail));
        }
        handshake::check(config.bind).map_err(|error| unusable(config.bind, error.into()))?;
        Ok(TcpDevice { config, counters: Arc::default() })
    }

    /// Counts of rejected connections and frames.
    pub fn counters(&self) -> &Arc<TcpCounters> {
        &self.counters
    }
}

impl Device for TcpDevice {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Tcp
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        Ok(Box::new(self.link(group, self.config.advertise.unwrap_or(self.config.bind))))
    }
}

impl TcpDevice {
    /// A link without a descriptor, whose peers reach it at `ip`.
    pub(super) fn link(&self, group: Membership, ip: IpAddr) -> TcpLink {
        let config = self.config.clone();
        let address = TcpAddress {
            host: host_identity(),
            max_part_bytes: config.max_part_bytes,
            max_pages: wire::MAX_PAGES,
            streams: config.streams,
            ip,
        };
        TcpLink {
            config,
            group,
            address,
            issued: HashMap::new(),
            listener: None,
            adoption: None,
            counters: self.counters.clone(),
            epoll: None,
            regions: TcpRegions::default(),
            peers: PeerMap::default(),
            dirty: Vec::new(),
            flushes: FIRST_FLUSH,
            unread: Vec::new(),
            ending: Vec::new(),
            hot: HotStream::default(),
        }
    }
}
