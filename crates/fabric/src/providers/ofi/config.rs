//! Device configuration, and how the environment chooses provider and NICs.

use super::super::nic_names;
use super::info::{Info, OfiProvider};
use super::{info, sys};
use crate::bytes::put_block;
use crate::error::{Error, Result};
use crate::types::ProviderKind;
use std::net::{IpAddr, Ipv4Addr};
use weft_control::HostIdentity;
use weft_environment as environment;

/// [`super::OfiDevice`] configuration. A pair uses the smaller `max_part_bytes` and `max_unconsumed`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfiConfig {
    /// Libfabric provider, for example `efa`, `efa-direct`, `tcp;ofi_rxm`, `tcp`, `shm` or
    /// `verbs;ofi_rxm`.
    pub provider: OfiProvider,
    /// Host name, for providers that reach only ranks on the same host.
    pub host_id: String,
    /// Address that endpoints listen on, for IP providers.
    pub bind: IpAddr,
    /// Domains (NICs) to use, by libfabric name; names may repeat. Empty: all `efa` NICs, and the first
    /// offer from other providers.
    pub domains: Vec<String>,
    /// Longest part in a write.
    pub max_part_bytes: u64,
    /// Shortest write, in bytes, that is striped over several NICs.
    pub stripe_from: u64,
    /// Parts in flight on each NIC, at least 1.
    pub queue_parts: u32,
    /// Unconsumed arrivals from each peer, at least 4. Fewer if a completion queue could overflow with this
    /// many peers.
    pub max_unconsumed: u32,
    /// Drops and counts an arrival whose lane is granted to another peer than the sender, where the
    /// provider names senders (`FI_SOURCE`). Otherwise an arrival is attributed to the lane's holder.
    pub checks_senders: bool,
}

impl Default for OfiConfig {
    fn default() -> Self {
        OfiConfig {
            provider: OfiProvider::new("tcp;ofi_rxm"),
            host_id: HostIdentity::here().host_id(),
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            domains: Vec::new(),
            max_part_bytes: 1 << 30,
            stripe_from: 128 << 10,
            queue_parts: 1024,
            max_unconsumed: 1024,
            checks_senders: false,
        }
    }
}

/// Environment variable: [`OfiConfig::provider`].
pub const PROVIDER: &str = "WEFT_OFI_PROVIDER";

/// Environment variable: [`OfiConfig::domains`]; `all`: none by name.
pub const DOMAINS: &str = "WEFT_OFI_DOMAINS";

/// Environment variable: 1 sets [`OfiConfig::checks_senders`].
pub const CHECK_SENDERS: &str = "WEFT_OFI_CHECK_SENDERS";

/// Explicit choice of provider and NICs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfiChoice {
    /// [`OfiConfig::provider`]. `None`: `efa` where libfabric offers it, else `tcp;ofi_rxm`. A device with
    /// an explicit provider uses it or fails to open.
    pub provider: Option<String>,
    /// [`OfiConfig::domains`].
    pub domains: Vec<String>,
    /// [`OfiConfig::checks_senders`].
    pub checks_senders: bool,
}

impl OfiChoice {
    /// Choice by `WEFT_OFI_PROVIDER`, `WEFT_OFI_DOMAINS` (names with commas, or `all`) and
    /// `WEFT_OFI_CHECK_SENDERS` (0, 1 or unset).
    ///
    /// # Errors
    /// [`Error::Provider`] for an invalid value.
    pub fn from_env() -> Result<OfiChoice> {
        let failed = |error: environment::Error| provider_error(error.to_string());
        Ok(OfiChoice {
            provider: environment::text(PROVIDER).map_err(failed)?,
            domains: nic_names::parse(environment::text(DOMAINS).map_err(failed)?),
            checks_senders: environment::flag(CHECK_SENDERS, false).map_err(failed)?,
        })
    }

    /// Configuration with this choice.
    pub fn resolve(&self, bind: IpAddr) -> OfiConfig {
        let provider = match &self.provider {
            Some(name) => OfiProvider::new(name),
            None => {
                let efa = OfiProvider::new("efa");
                let has_efa = info::offers(&efa, bind, 0).is_ok();
                if has_efa { efa } else { OfiConfig::default().provider }
            }
        };
        let OfiChoice { domains, checks_senders, .. } = self.clone();
        OfiConfig { provider, domains, checks_senders, ..OfiConfig::default() }
    }

    /// Domains that the provider offers here, by libfabric name. Opens none.
    ///
    /// # Errors
    /// Reason why there are none.
    pub fn offered_domains(&self) -> std::result::Result<Vec<String>, String> {
        let bind = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let offers = info::offers(&self.resolve(bind).provider, bind, 0)?;
        Ok(offers.iter().map(Info::domain_name).collect())
    }

    /// Checks that library, provider and NICs exist, without opening them.
    ///
    /// # Errors
    /// [`Error::Provider`] if one is missing.
    pub fn check(&self) -> Result<()> {
        let bind = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let config = OfiConfig { bind, ..self.resolve(bind) };
        refuse_cache(&config.provider, variable)?;
        let offers = info::offers(&config.provider, bind, 0).map_err(provider_error)?;
        select_offers(&config, offers).map(drop)
    }
}

/// RDMA device that a domain is on, if the domain is on one: efa names the domain `rdmap85s0-rdm` after the device
/// `rdmap85s0`, verbs by the device's name.
pub fn device_of_domain(domain: &str) -> &str {
    domain.strip_suffix("-rdm").unwrap_or(domain)
}

/// A libfabric environment variable. Bytes that are not UTF-8 make a value that [`refuse_cache`] rejects.
pub(super) fn variable(name: &str) -> Option<String> {
    environment::text(name).ok().flatten()
}

/// Refuses a provider over verbs whose registrations libfabric caches: peers could write to released regions.
pub(super) fn refuse_cache(
    provider: &OfiProvider,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<()> {
    let is = |name: &str, value| variable(name).is_some_and(|found| found.trim() == value);
    let has_cache = !is("FI_MR_CACHE_MAX_COUNT", "0") && !is("FI_MR_CACHE_MONITOR", "disabled");
    if provider.name().starts_with("verbs") && has_cache {
        return Err(provider_error(format!(
            "provider {}: libfabric caches registrations, so a released region stays writable; set \
             FI_MR_CACHE_MAX_COUNT=0 in the environment of all ranks",
            provider.name()
        )));
    }
    Ok(())
}

/// Capability for CUDA device memory, on a host with a CUDA driver.
pub(super) fn device_capability() -> u64 {
    if weft_cuda::driver().is_ok() { sys::FI_HMEM } else { 0 }
}

/// Offers named by a configuration, or the provider's default.
pub(super) fn select_offers(config: &OfiConfig, offers: Vec<Info>) -> Result<Vec<Info>> {
    if config.domains.is_empty() {
        let count = if config.provider.is_efa() { offers.len() } else { 1 };
        return Ok(offers.into_iter().take(count).collect());
    }
    let named = |name: &String| {
        let found = offers.iter().find(|offer| offer.domain_name() == *name);
        found.cloned().ok_or_else(|| {
            let names: Vec<String> = offers.iter().map(Info::domain_name).collect();
            let (provider, names) = (config.provider.name(), names.join(", "));
            let at = if config.provider.is_ip() && !config.bind.is_unspecified() {
                format!(" at {}", config.bind)
            } else {
                String::new()
            };
            provider_error(format!(
                "domain {name}: provider {provider} offers {names}{at}; name one of these in {DOMAINS}"
            ))
        })
    };
    config.domains.iter().map(named).collect()
}

pub(super) fn provider_error(detail: impl Into<String>) -> Error {
    Error::Provider { provider: ProviderKind::Ofi, detail: detail.into() }
}

/// Scope within which a provider's endpoints reach each other; empty without such a bound.
pub(super) fn realm(config: &OfiConfig) -> Vec<u8> {
    let HostIdentity { boot, network, processes, user, .. } = HostIdentity::here();
    let mut realm = Vec::new();
    if config.provider.is_single_host() {
        put_block(&mut realm, config.host_id.as_bytes());
        put_block(&mut realm, processes.as_bytes());
        realm.extend(user.to_le_bytes());
    } else if config.provider.is_ip() && config.bind.is_loopback() {
        put_block(&mut realm, boot.as_bytes());
        put_block(&mut realm, network.as_bytes());
    }
    realm
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_names_its_rdma_device() {
        // Names from `fi_info -p efa` and from `fi_info -p verbs`.
        assert_eq!(device_of_domain("rdmap85s0-rdm"), "rdmap85s0");
        assert_eq!(device_of_domain("efa_0-rdm"), "efa_0");
        assert_eq!(device_of_domain("mlx5_0"), "mlx5_0");
        assert_eq!(device_of_domain("eth0"), "eth0");
    }

    #[test]
    fn verbs_is_refused_while_libfabric_caches_registrations() {
        let refusal = |provider, variables: &[(&str, &str)]| {
            let value = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            refuse_cache(&OfiProvider::new(provider), value).err().map(|error| error.to_string())
        };
        let why = refusal("verbs;ofi_rxm", &[("FI_MR_CACHE_MAX_COUNT", "1024")]).unwrap();
        assert!(why.contains("verbs;ofi_rxm") && why.contains("FI_MR_CACHE_MAX_COUNT=0"), "{why}");
        assert!(refusal("verbs;ofi_rxm", &[]).is_some());
        assert_eq!(refusal("verbs;ofi_rxm", &[("FI_MR_CACHE_MAX_COUNT", "0")]), None);
        assert_eq!(refusal("verbs;ofi_rxm", &[("FI_MR_CACHE_MONITOR", "disabled")]), None);
        assert_eq!(refusal("tcp;ofi_rxm", &[]), None);
    }
}
