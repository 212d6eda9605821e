//! HDRM on a network: ranks on network hosts in any order, agreed on by all ranks, refused where the hosts do not fit.

use crate::communicators::communicators;
use crate::{Member, soon, sum_of, sum_of_all, vector};
use weft_collectives::{
    Algorithm, Call, Collectives, CollectivesConfig, NetworkSource, Options, RunError,
    SelectionSources,
};
use weft_fabric::{Communicator, ProviderKind};

const NETWORK: &str = r#"{"bigraph": {"switches": 4, "endpoints": 2}}"#;
/// Network hosts in HDRM map order.
const MAP: [&str; 8] = ["U0.0", "L0.0", "L1.0", "U1.0", "L0.1", "U1.1", "U0.1", "L1.1"];

/// Collectives on a network, which only rank 0 has.
fn connect(
    communicator: &Communicator,
    text: &str,
    hosts: &[&str],
    config: CollectivesConfig,
) -> Result<Collectives, RunError> {
    let rank = communicator.rank().0 as usize;
    let network = NetworkSource { name: "network.json", text };
    let sources = SelectionSources {
        network: (rank == 0).then_some(network),
        host: Some(hosts[rank]),
        ..SelectionSources::default()
    };
    Collectives::connect_with(communicator, config, sources, soon())
}

/// Runs `work` on a rank for each host.
fn on_hosts(hosts: &[&str], config: CollectivesConfig, work: impl Fn(&Member) + Send + Sync) {
    communicators(hosts.len() as u32, ProviderKind::Tcp, None, |communicator| {
        let collectives = connect(&communicator, NETWORK, hosts, config).unwrap();
        let member = Member { communicator, collectives };
        work(&member);
        member.close().unwrap();
    });
}

fn by_name(call: Call, algorithm: Algorithm) -> Call {
    Call { algorithm: Some((algorithm, Options::default())), ..call }
}

/// Algorithm selected for a long vector.
fn selected(member: &Member) -> Algorithm {
    let mut long = vec![0i64; 1 << 21];
    let access = &mut member.communicator.access();
    member.collectives.selected(access, &sum_of(&mut long)).unwrap().0
}

#[test]
fn ranks_in_any_order_sum_right_by_hdrm_and_select_it() {
    let orders: [&[usize]; 3] = [&[5, 2, 7, 0, 1, 6, 3, 4], &[6, 4, 5, 7], &[3, 1, 0]];
    for order in orders {
        let hosts: Vec<_> = order.iter().map(|&number| MAP[number]).collect();
        on_hosts(&hosts, CollectivesConfig::default(), |member| {
            for length in [1, 1000, 300_000] {
                let mut values = vector(length, 3, member.rank());
                member.run(&by_name(sum_of(&mut values), Algorithm::Hdrm)).unwrap();
                assert_eq!(values, sum_of_all(length, 3, hosts.len()), "{order:?}");
            }
            // With a base-three level, links are shared.
            if hosts.len().is_power_of_two() {
                assert_eq!(selected(member), Algorithm::Hdrm, "{order:?}");
            }
        });
    }
}

#[test]
fn hosts_that_do_not_fit_refuse_hdrm_by_name_and_use_another_algorithm() {
    let hosts = [MAP[0], MAP[3]];
    on_hosts(&hosts, CollectivesConfig::default(), |member| {
        let mut values = vector(64, 1, member.rank());
        let error = member.run(&by_name(sum_of(&mut values), Algorithm::Hdrm)).unwrap_err();
        let text = error.to_string();
        let expected =
            "algorithm: hdrm: network network.json: hosts U0.0, U1.0 are no part of HDRM's map";
        assert!(text.starts_with(expected), "{text}");
        assert_ne!(selected(member), Algorithm::Hdrm);
        member.sum(&mut values).unwrap();
        assert_eq!(values, sum_of_all(64, 1, 2));
    });
}

#[test]
fn reproducible_sums_stay_in_the_order_of_ranks() {
    let config = CollectivesConfig { reproducible: true, ..CollectivesConfig::default() };
    on_hosts(&[MAP[1], MAP[0], MAP[3], MAP[2]], config, |member| {
        let mut values = vector(64, 1, member.rank());
        let error = member.run(&by_name(sum_of(&mut values), Algorithm::Hdrm)).unwrap_err();
        assert!(error.to_string().contains("expected one that adds in rank order"), "{error}");
        assert!(selected(member).sums_in_rank_order(weft_collectives::Collective::AllReduce));
    });
}

#[test]
fn a_damaged_network_is_an_error_on_all_ranks() {
    communicators(2, ProviderKind::Tcp, None, |communicator| {
        let config = CollectivesConfig::default();
        for (text, expected) in [("{", "line 1"), ("bigraph:switches=3,endpoints=1", "even number")]
        {
            let error = connect(&communicator, text, &MAP, config).err().unwrap();
            let text = error.to_string();
            assert!(text.contains("network: network.json: ") && text.contains(expected), "{text}");
            let is_first = communicator.rank().0 == 0;
            assert_eq!(matches!(error, RunError::Invalid { .. }), is_first, "{error}");
            assert_eq!(matches!(error, RunError::PeerFailed { .. }), !is_first, "{error}");
        }
    });
}
