//! Configurations that differ, configurations that are rejected, and reachability between hosts.

use crate::common::{bare_link, connect_all};
use crate::ends::{End, engine, link, waiting};
use weft_fabric::providers::{TcpConfig, TcpDevice};
use weft_fabric::{Engine, Error, Link, Page, PartRule, Rank};

#[test]
fn ranks_configured_differently_meet_by_the_smaller_of_each_limit() {
    const LENGTH: u64 = 10_000;
    let few = TcpConfig { max_part_bytes: 4096, streams: 3, ..TcpConfig::default() };
    let long = TcpConfig { max_part_bytes: 1 << 20, streams: 1, ..TcpConfig::default() };
    let device = |config: &TcpConfig| TcpDevice::new(config.clone()).unwrap();
    for configs in [[&few, &long], [&long, &few]] {
        let mut engines: Vec<Engine> =
            (0..).zip(configs).map(|(rank, config)| engine(rank, 2, device(config))).collect();
        connect_all(&mut engines);
        let mut ends: Vec<End> = link(engines, LENGTH as usize);
        for from in 0..2 {
            let to = 1 - from;
            let (writer, owner) = (Rank(from as u32), Rank(to as u32));
            let route = ends[from].engine.route(owner).unwrap();
            let rule =
                PartRule { max_part_bytes: 4096, max_pages_per_part: 256, ..PartRule::WHOLE };
            assert_eq!((route.parts, route.ordered), (rule, true));
            let bytes: Vec<u8> = (0..LENGTH).map(|at| (at * 7 + from as u64) as u8).collect();
            let end = &mut ends[from];
            end.source.memory().copy_in(0, &bytes);
            let page = Page {
                source: end.source.key(),
                source_offset: 0,
                destination: end.remotes[to].unwrap().key,
                destination_offset: from as u64 * LENGTH,
                length: LENGTH,
            };
            let request = end.engine.write(owner, end.counter, 0, &[page]).unwrap();
            waiting(|w| end.engine.wait_for_request(request, w)).unwrap();
            let end = &mut ends[to];
            let parts = end.engine.route(writer).unwrap().parts.count_contiguous(LENGTH);
            assert_eq!(parts, 3);
            waiting(|w| end.engine.wait(end.counter, &[(writer, parts)], w)).unwrap();
            let mut seen = vec![0; LENGTH as usize];
            end.destination.memory().copy_out(from * LENGTH as usize, &mut seen);
            assert_eq!(seen, bytes);
            assert_eq!(end.engine.count(end.counter, writer).unwrap(), parts);
        }
    }
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
        let made = TcpDevice::new(config.clone());
        assert!(matches!(made, Err(Error::Provider { .. })), "{config:?}");
    }
    let everywhere = TcpConfig {
        bind: "0.0.0.0".parse().unwrap(),
        advertise: Some("127.0.0.1".parse().unwrap()),
        ..base()
    };
    assert!(TcpDevice::new(everywhere).is_ok());
}

#[test]
fn loopback_reaches_only_its_own_host() {
    let at = |ip: &str| TcpConfig {
        bind: "127.0.0.1".parse().unwrap(),
        advertise: Some(ip.parse().unwrap()),
        ..TcpConfig::default()
    };
    let open = |ip: &str| bare_link(&TcpDevice::new(at(ip)).unwrap(), Rank(0), 4).0;
    let (here, public) = (open("127.0.0.1"), open("192.0.2.1"));
    let reaches = |link: &dyn Link, address: &[u8]| link.route(address).is_some();
    // Addresses on the same host reach each other; the same addresses on another host do not.
    assert!(reaches(&*here, &here.address()) && reaches(&*here, &public.address()));
    let elsewhere = |link: &dyn Link| {
        let mut address = link.address();
        address[6] ^= 1;
        address
    };
    assert!(!reaches(&*here, &elsewhere(&*here)) && !reaches(&*here, &elsewhere(&*public)));
    assert!(!reaches(&*public, &elsewhere(&*here)) && reaches(&*public, &elsewhere(&*public)));
    assert!(!reaches(&*here, b"garbage"));
}
