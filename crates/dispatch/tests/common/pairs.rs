//! Pair providers and configuration on this host.

#[path = "../../../fabric/tests/common/pair_providers.rs"]
#[allow(dead_code, reason = "some tests choose one")]
mod pair_providers;

#[allow(unused_imports, reason = "some tests choose one")]
pub use pair_providers::providers;
use std::time::Duration;
use weft_control::pair::PairSettings;
use weft_dispatch::Connection;
use weft_fabric::ProviderKind;
use weft_fabric::pair::PairConfig;

/// Provider with this name.
#[allow(dead_code, reason = "tests with processes use it")]
pub fn provider_named(name: &str) -> ProviderKind {
    weft_fabric::registry::named(name).unwrap().0
}

/// One pair end over one provider, for a connection with this many slots, without a secret.
pub fn pair_config(
    address: &str,
    provider: ProviderKind,
    silence_timeout: Duration,
    slots: u32,
) -> PairConfig {
    let mut config = PairConfig::new(PairSettings {
        address: address.into(),
        source: None,
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
