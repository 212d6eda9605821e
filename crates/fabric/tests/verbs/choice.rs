//! NIC choice, and errors that name what is missing.

use std::sync::Arc;
use weft_fabric::providers::{VerbsChoice, VerbsConfig, VerbsDevice};
use weft_fabric::{Device, Error, ProviderKind};

/// Detail in a device's error.
fn refusal(config: VerbsConfig) -> String {
    match VerbsDevice::new(config).map(|device| device.nics().collect::<Vec<_>>()) {
        Err(Error::Provider { provider: ProviderKind::Verbs, detail }) => detail,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_value_out_of_range_is_named_before_the_library_is_loaded() {
    let config = VerbsConfig::default;
    for (config, expected) in [
        (VerbsConfig { queue_requests: 0, ..config() }, "queue_requests 0: expected 1 to 32768"),
        (VerbsConfig { max_unconsumed: 3, ..config() }, "max_unconsumed 3: expected 4 to 1048576"),
        (VerbsConfig { service_level: 16, ..config() }, "service_level 16: expected 0 to 15"),
        (VerbsConfig { ack_timeout: 32, ..config() }, "ack_timeout 32: expected 0 to 31"),
    ] {
        assert_eq!(refusal(config), expected);
    }
}

#[test]
fn a_host_without_an_rdma_nic_is_refused_and_one_with_some_lists_them() {
    match VerbsDevice::new(VerbsConfig::default()) {
        Ok(device) => {
            let details = Arc::new(device).details();
            let nics = &details.iter().find(|(name, _)| *name == "nics").unwrap().1;
            println!("NICs: {nics}");
            assert!(nics.contains(':'), "{nics}");
        }
        Err(Error::Provider { provider: ProviderKind::Verbs, detail }) => {
            println!("skipped: {detail}");
            let reasons =
                ["this host has no RDMA device", "libibverbs", "state of the port", "GID"];
            assert!(reasons.iter().any(|reason| detail.contains(reason)), "{detail}");
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_device_that_is_missing_is_named_with_those_that_are_here() {
    let choice = VerbsChoice { devices: vec!["mlx5_99".into()], ..VerbsChoice::default() };
    if VerbsChoice::default().check().is_err() {
        return println!("skipped: there is no active RDMA NIC here");
    }
    let detail = refusal(choice.resolve());
    assert!(detail.starts_with("device mlx5_99: this host has "), "{detail}");
    assert!(detail.ends_with("name one of these in WEFT_VERBS_DEVICES"), "{detail}");
}
