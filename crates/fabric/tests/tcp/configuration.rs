//! Configurations that are refused, and who reaches whom.

use crate::ends::{engine, soon};
use weft_fabric::providers::{TcpConfig, TcpProvider};
use weft_fabric::{Error, Provider};

#[test]
fn ranks_configured_differently_are_told_so() {
    let other = TcpConfig { max_part_bytes: 4096, ..TcpConfig::default() };
    let mut here = engine(0, 2, TcpProvider::new(TcpConfig::default()).unwrap());
    let there = engine(1, 2, TcpProvider::new(other).unwrap());
    let error = here.connect(&[here.address(), there.address()], soon(5)).unwrap_err();
    assert!(error.to_string().contains("configure all ranks alike"), "{error}");
}

#[test]
fn configurations_that_make_no_sense_are_refused() {
    let base = TcpConfig::default;
    let refused = [
        TcpConfig { streams: 0, ..base() },
        TcpConfig { max_part_bytes: 0, ..base() },
        TcpConfig { max_part_bytes: 1 << 31, ..base() },
        TcpConfig { queue_parts: 0, ..base() },
        TcpConfig { bind: "0.0.0.0".parse().unwrap(), ..base() },
        TcpConfig { bind: "192.0.2.1".parse().unwrap(), ..base() },
    ];
    for config in refused {
        let told = TcpProvider::new(config.clone());
        assert!(matches!(told, Err(Error::Provider { .. })), "{config:?}");
    }
    let everywhere = TcpConfig {
        bind: "0.0.0.0".parse().unwrap(),
        advertise: Some("127.0.0.1".parse().unwrap()),
        ..base()
    };
    assert!(TcpProvider::new(everywhere).is_ok());
}

#[test]
fn loopback_reaches_only_its_own_host() {
    let at = |ip: &str| TcpConfig {
        bind: "127.0.0.1".parse().unwrap(),
        advertise: Some(ip.parse().unwrap()),
        ..TcpConfig::default()
    };
    let here = TcpProvider::new(at("127.0.0.1")).unwrap();
    let public = TcpProvider::new(at("192.0.2.1")).unwrap();
    // Its own host's addresses reach; the same addresses told by another host do not.
    assert!(here.reaches(&here.address()) && here.reaches(&public.address()));
    let elsewhere = |provider: &TcpProvider| {
        let mut address = provider.address();
        address[6] ^= 1;
        address
    };
    assert!(!here.reaches(&elsewhere(&here)) && !here.reaches(&elsewhere(&public)));
    assert!(!public.reaches(&elsewhere(&here)) && public.reaches(&elsewhere(&public)));
    assert!(!here.reaches(b"garbage"));
}
