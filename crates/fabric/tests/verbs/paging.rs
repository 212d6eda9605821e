//! On-demand region paging, over simulated NICs.

use crate::links::{BYTES, Links, devices, membership};
use std::sync::Arc;
use weft_fabric::link::PostStatus;
use weft_fabric::providers::verbs::{OnDemandPaging, TwinConfig, TwinNic};
use weft_fabric::providers::{VerbsConfig, VerbsDevice};
use weft_fabric::{Device, Error, Memory, Rank, RegionKey};

fn config(on_demand_paging: OnDemandPaging) -> VerbsConfig {
    VerbsConfig { on_demand_paging, ..VerbsConfig::default() }
}

fn nic(on_demand_paging: bool, max_locked: u64) -> TwinConfig {
    TwinConfig { on_demand_paging, max_locked, ..TwinConfig::default() }
}

/// Rank 1 regions that are paged on demand after rank 0 has written into one, and how many bytes were
/// prefetched.
fn paged_after_a_write(paging: OnDemandPaging, nic: &TwinConfig) -> (usize, u64) {
    let mut links = Links::over(devices(&config(paging), nic, 2));
    links.connect(|_| {});
    assert_eq!(links.post(0, 1, 7, 4), PostStatus::InFlight);
    links.settle();
    assert_eq!((links.raised(1, 0), links.byte(1, 3), links.byte(1, 4)), (1, 1, 2));
    links.0[1].nic.statistics().paged
}

#[test]
fn regions_are_paged_on_demand_where_their_memory_cannot_be_locked_or_the_choice_is_always() {
    use OnDemandPaging::{Always, Auto, Never};
    // A granted region is registered once.
    let all = (1, BYTES);
    for (paging, has_paging, max_locked, expected) in [
        (Auto, true, BYTES - 1, all),
        (Always, true, u64::MAX, all),
        (Auto, true, BYTES, (0, 0)),
        (Never, true, BYTES, (0, 0)),
        (Auto, false, BYTES, (0, 0)),
    ] {
        let found = paged_after_a_write(paging, &nic(has_paging, max_locked));
        assert_eq!(found, expected, "{paging:?}, {max_locked}");
    }
}

#[test]
fn a_region_that_can_be_neither_locked_nor_paged_is_refused_with_the_remedy() {
    use OnDemandPaging::{Auto, Never};
    for (paging, has_paging, is_tried) in
        [(Never, true, false), (Auto, false, false), (Auto, true, true)]
    {
        let nic = TwinConfig { max_paged: BYTES - 1, ..nic(has_paging, BYTES - 1) };
        let (_nic, device) = devices(&config(paging), &nic, 1).remove(0);
        let mut link = device.open(membership(Rank(0), 1)).unwrap();
        let memory = Arc::new(Memory::shared(BYTES as usize).unwrap());
        let Err(Error::Unusable { detail, .. }) = link.register(RegionKey(0), &memory) else {
            panic!("registered");
        };
        assert!(detail.starts_with("ibv_reg_mr of 10000 bytes: "), "{detail}");
        assert!(detail.contains("ulimit -l unlimited"), "{detail}");
        // Both causes, if both were tried.
        assert_eq!(detail.contains("; on demand: "), is_tried, "{detail}");
    }
}

#[test]
fn paging_that_is_demanded_of_a_nic_without_it_is_refused_by_name() {
    let twins = [true, false].map(|has_paging| TwinNic::new(nic(has_paging, u64::MAX)));
    let refused = VerbsDevice::over(config(OnDemandPaging::Always), &twins).map(drop);
    let Err(Error::Provider { detail, .. }) = refused else { panic!("{refused:?}") };
    let start = format!("{}:1: WEFT_VERBS_ON_DEMAND_PAGING=always: ", twins[1].name());
    assert!(detail.starts_with(&start), "{detail}");
    assert!(detail.contains("set auto or never"), "{detail}");
    assert!(VerbsDevice::over(config(OnDemandPaging::Auto), &twins).is_ok());
}
