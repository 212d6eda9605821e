//! Link over a connection that the pair protocol made, without a port of its own.

use super::{TcpAddress, TcpConfig, TcpCounters, TcpDevice, TcpLink, new_token};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::id_map::{PeerMap, RegionMap};
use crate::link::{Link, Membership};
use crate::types::ProviderKind;
use rustix::event::epoll;
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use weft_control::pair::MaybeTlsStream;

/// Slot for the connection of an [`AdoptedTcp`] link.
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

/// Device of one pair: one stream, over the connection in its [`Adoption`].
#[derive(Debug)]
pub struct AdoptedTcp {
    adoption: Adoption,
}

impl AdoptedTcp {
    /// Device of one group of two.
    pub fn new(adoption: Adoption) -> AdoptedTcp {
        AdoptedTcp { adoption }
    }
}

impl Device for AdoptedTcp {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Tcp
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let config = TcpConfig { streams: 1, ..TcpConfig::default() };
        let unspecified = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
        let device = TcpDevice { config, counters: Arc::new(TcpCounters::default()) };
        let mut link = device.link(group, unspecified, None)?;
        link.adoption = Some(self.adoption.clone());
        Ok(Box::new(link))
    }
}

/// Sixteen random bytes that identify a pair's connection.
pub fn random_token() -> Result<[u8; 16]> {
    new_token()
}

impl TcpDevice {
    pub(super) fn link(
        &self,
        group: Membership,
        socket: SocketAddr,
        listener: Option<OwnedFd>,
    ) -> Result<TcpLink> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| Error::system("cannot create an epoll descriptor", e))?;
        let config = self.config.clone();
        let address = TcpAddress {
            host: super::host_identity(),
            max_part_bytes: config.max_part_bytes,
            max_pages: super::wire::MAX_PAGES,
            streams: config.streams,
            socket,
        };
        Ok(TcpLink {
            config,
            group,
            address,
            issued: HashMap::new(),
            listener,
            adoption: None,
            counters: self.counters.clone(),
            epoll,
            regions: RegionMap::default(),
            peers: PeerMap::default(),
            dirty: Vec::new(),
            flushes: super::FIRST_FLUSH,
            unread: Vec::new(),
            ending: Vec::new(),
            hot: super::hot_stream::HotStream::default(),
        })
    }
}
