//! Pair providers on this machine.

use weft_fabric::providers::OfiChoice;
use weft_fabric::{ProviderKind, registry};

/// Providers that pairs can use here for host memory; ofi needs libfabric.
pub fn providers() -> Vec<ProviderKind> {
    let usable = |kind: &ProviderKind| {
        let checked = registry::check(*kind, &Some(OfiChoice::default()), &None);
        checked.inspect_err(|why| println!("skipped over {}: {why}", kind.name())).is_ok()
    };
    let of_hosts = registry::of_pairs().into_iter().filter(|kind| *kind != ProviderKind::Copy);
    of_hosts.filter(usable).collect()
}
