//! The ofi provider over libfabric's built-in providers: one for any host, one within a host.
//!
//! Skipped, with a message, on a machine without libfabric (Debian: libfabric1).

#[path = "ofi/bounds.rs"]
mod bounds;
#[path = "ofi/ends.rs"]
mod ends;
#[path = "ofi/gpu_memory.rs"]
mod gpu_memory;
#[path = "ofi/layout.rs"]
mod layout;
#[path = "ofi/senders.rs"]
mod senders;
#[path = "ofi/traffic.rs"]
mod traffic;

#[path = "common/mod.rs"]
mod common;

use std::sync::{Arc, LazyLock};
use weft_fabric::Device;
use weft_fabric::providers::{OfiConfig, OfiDevice, OfiProvider, ofi};

/// Providers in every libfabric.
pub const PROVIDERS: [&str; 2] = ["tcp;ofi_rxm", "shm"];

/// Environment variable: the one provider to test, on any host, such as `verbs;ofi_rxm`.
const PROVIDER: &str = "WEFT_TEST_OFI_PROVIDER";
/// Environment variable: a NIC address for the provider (default 127.0.0.1).
const BIND: &str = "WEFT_TEST_BIND";

/// Providers that can be tested here; none without libfabric.
pub fn providers() -> Vec<&'static str> {
    match ofi::library() {
        Ok((path, (major, minor))) => {
            println!("libfabric {major}.{minor} of {}", path.display());
            chosen().map_or_else(|| PROVIDERS.to_vec(), |provider| vec![provider])
        }
        Err(why) => {
            println!("skipped: {why}");
            Vec::new()
        }
    }
}

/// Provider that reaches any host.
pub fn any_host() -> &'static str {
    chosen().unwrap_or(PROVIDERS[0])
}

/// Provider that the environment names.
pub fn chosen() -> Option<&'static str> {
    static CHOSEN: LazyLock<Option<String>> = LazyLock::new(|| std::env::var(PROVIDER).ok());
    CHOSEN.as_deref()
}

/// Makes a run with another library test that one.
#[test]
fn the_library_that_the_environment_names_is_used() {
    if let Ok(named) = std::env::var(ofi::LIBRARY_PATH) {
        assert_eq!(ofi::library().unwrap().0, std::path::PathBuf::from(named));
    }
}

/// Configuration for one such provider.
pub fn config(provider: &str) -> OfiConfig {
    let default = OfiConfig::default();
    let bind = std::env::var(BIND).map_or(default.bind, |address| address.parse().unwrap());
    OfiConfig { provider: OfiProvider::new(provider), bind, ..default }
}

/// Device with this configuration.
pub fn device(config: OfiConfig) -> Arc<dyn Device> {
    Arc::new(OfiDevice::new(config).unwrap())
}
