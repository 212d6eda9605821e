//! The wrapped device.

use super::super::copy::CopyEngine;
use super::super::copy::ticker::Ticker;
use super::config::{OpenEngine, StagedConfig, StagedCounters};
use super::link::StagedLink;
use super::mode::StagedMode;
use super::wire;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::id_map::{PeerMap, RegionMap};
use crate::link::{Link, Membership, Sink};
use crate::types::ProviderKind;
use std::sync::Arc;

/// Device whose links move GPU memory through slots in host memory; see the module documentation.
pub struct StagedDevice {
    inner: Arc<dyn Device>,
    config: StagedConfig,
    open: Arc<OpenEngine>,
    counters: Arc<StagedCounters>,
}

impl StagedDevice {
    /// Wraps `inner`.
    ///
    /// # Errors
    /// [`Error::Provider`] if a value is out of range, or the mode is not [`StagedMode::Always`] over a
    /// provider other than tcp.
    pub fn over(inner: Arc<dyn Device>, config: StagedConfig) -> Result<StagedDevice> {
        let limits = [
            ("slots", u64::from(config.slots), u64::from(wire::MAX_SLOTS)),
            ("slot_bytes", config.slot_bytes, wire::MAX_SLOT_BYTES),
        ];
        for (name, value, limit) in limits {
            if !(1..=limit).contains(&value) {
                let detail = format!("{name} {value}: expected 1 to {limit}");
                return Err(Error::Provider { provider: inner.kind(), detail });
            }
        }
        if config.mode != StagedMode::Always && inner.kind() != ProviderKind::Tcp {
            let detail = format!("mode {:?}: expected Always; the others are tcp's", config.mode);
            return Err(Error::Provider { provider: inner.kind(), detail });
        }
        let engines = config.engines;
        let open = Arc::new(move || engines.open());
        Ok(StagedDevice { inner, config, open, counters: Arc::default() })
    }

    /// Replaces the copy engines by ones that `open` constructs for each link.
    pub fn with_engines(
        self,
        open: impl Fn() -> std::result::Result<Box<dyn CopyEngine>, String> + Send + Sync + 'static,
    ) -> StagedDevice {
        StagedDevice { open: Arc::new(open), ..self }
    }

    /// Counts for all links.
    pub fn counters(&self) -> &Arc<StagedCounters> {
        &self.counters
    }
}

impl Device for StagedDevice {
    fn kind(&self) -> ProviderKind {
        self.inner.kind()
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        Ok(Box::new(self.link(group)?))
    }

    fn details(&self) -> Vec<(&'static str, String)> {
        self.inner.details()
    }

    fn demands_thread(&self) -> bool {
        self.inner.demands_thread()
    }
}

impl StagedDevice {
    pub(super) fn link(&self, group: Membership) -> Result<StagedLink> {
        let inner = self.inner.open(group.clone())?;
        let inner_kind = inner.kind();
        Ok(StagedLink {
            address: inner.address(),
            peers_raise: inner.peers_raise(),
            inner: Some(inner),
            passes_keys: inner_kind == ProviderKind::Tcp,
            // Arrivals by stores, and slots that every route has.
            is_active: self.config.mode == StagedMode::Always && inner_kind != ProviderKind::Tcp,
            has_routes: false,
            watched: Vec::new(),
            config: self.config.clone(),
            open: self.open.clone(),
            engine: None,
            engines_only: false,
            counters: self.counters.clone(),
            group,
            introduced: PeerMap::default(),
            peers: PeerMap::default(),
            regions: RegionMap::default(),
            ticker: Ticker::new()?,
            events: Sink::default(),
            pages: Vec::new(),
            header: Vec::new(),
        })
    }
}
