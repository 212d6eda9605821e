//! Configuration of pairs on this host.

use std::time::Duration;
use weft_control::pair::PairSettings;
use weft_dispatch::Connection;
use weft_fabric::ProviderKind;
use weft_fabric::pair::PairConfig;

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
    });
    config.providers = vec![provider];
    config.engine = Connection::engine_config(slots);
    config
}
