//! Providers and configuration of pairs on this host.

use std::time::Duration;
use weft_control::pair::PairSettings;
use weft_dispatch::Connection;
use weft_fabric::ProviderKind;
use weft_fabric::pair::PairConfig;
use weft_fabric::providers::ofi;

/// Providers of pairs on this machine; ofi needs libfabric.
#[allow(dead_code, reason = "some tests choose one")]
pub fn providers() -> Vec<ProviderKind> {
    match ofi::library() {
        Ok(_) => vec![ProviderKind::Shm, ProviderKind::Tcp, ProviderKind::Ofi],
        Err(why) => {
            println!("skipped over ofi: {why}");
            vec![ProviderKind::Shm, ProviderKind::Tcp]
        }
    }
}

/// Provider of this name.
#[allow(dead_code, reason = "tests with processes use it")]
pub fn provider_named(name: &str) -> ProviderKind {
    weft_fabric::registry::named(name).unwrap().0
}

/// One end of a pair over one provider, for a connection of this many slots, without a secret.
pub fn pair_config(
    address: &str,
    provider: ProviderKind,
    silence_timeout: Duration,
    slots: u32,
) -> PairConfig {
    let mut config = PairConfig::new(PairSettings {
        address: address.into(),
        secret: None,
        host_id: "host".into(),
        silence_timeout,
        interrupt: None,
        tls: Default::default(),
    });
    config.providers = vec![provider];
    config.engine = Connection::engine_config(slots);
    config
}
