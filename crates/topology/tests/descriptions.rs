//! Network descriptions, and errors for invalid ones.

mod common;

use common::path;
use weft_topology::{EndpointId, Network, Router, Routing};

/// The example in `docs/topology.md`.
const TEN_LINES: &str = include_str!("data/ten-lines.json");

#[test]
fn a_cluster_in_ten_lines_of_json() {
    let network = Network::from_json(TEN_LINES).unwrap();
    assert_eq!(network.endpoints(), 8);
    assert_eq!(network.links().len(), 2 * (8 + 8));
    assert_eq!(network.links()[0].bandwidth, 25e9);
    assert_eq!(network.host(EndpointId(2)), "a");
    let mut router = Router::new(&network, Routing::Static).unwrap();
    let links = path(&mut router, 0, 7, 0);
    assert_eq!(network.link_name(links[1]), "leaf0->spine1#2");
}

#[test]
fn explicit_routes_are_followed_and_a_loop_is_named() {
    let with = |routes: &str| {
        let text =
            TEN_LINES.replacen("\"links\"", &format!("\"routes\": [{routes}],\n\"links\""), 1);
        Router::new(&Network::from_json(&text).unwrap(), Routing::Static)
    };
    let by = |at: &str, to: &str, via: &str| {
        format!(r#"{{"at": "{at}", "to": "{to}", "via": "{via}"}}"#)
    };
    let mut router = with(&by("leaf0", "gpu7", "spine0")).unwrap();
    let links = path(&mut router, 0, 7, 0);
    assert_eq!(router.network().link_name(links[1]), "leaf0->spine0");
    let circle = format!("{}, {}", by("leaf0", "gpu7", "spine0"), by("spine0", "gpu7", "leaf0"));
    assert_eq!(
        with(&circle).unwrap_err().to_string(),
        "the routes to \"gpu7\" form a loop: leaf0 -> spine0 -> leaf0"
    );
    // All other traffic at leaf0 goes by spine1, which returns traffic for leaf0's endpoints.
    let error = with(&by("leaf0", "*", "spine1")).unwrap_err().to_string();
    assert!(error.contains("form a loop: leaf0 -> spine1 -> leaf0"), "{error}");
}

#[test]
fn errors_name_the_place() {
    for (change, into, said) in [
        ("gbps\": 400", "gbps\": 0", "links[2]: bandwidth 0: expected a finite number above"),
        ("gbps\": 400", "gbps\": -4", "links[2]: bandwidth -500000000"),
        ("gbps\": 400", "gbps\": 1e999", "line 8, column 59: number out of range"),
        ("0.6", "-1", "default: latency -0.000001: expected a finite number of seconds"),
        ("\"gpu[4-7]\"]", "\"gpu[3-7]\"]", "endpoints[1]: the name \"gpu3\" is given twice"),
        ("\"spine[0-1]\"]", "\"spine[0-1]\", \"leaf1\"]", "switches[2]: the name \"leaf1\" is"),
        (
            "\"leaf0\"]",
            "\"laef0\"]",
            "links[0].to: there is no node \"laef0\"; did you mean \"leaf0\"",
        ),
        ("\"leaf0\"]", "\"gpu2\"]", "links[0]: a link leads from \"gpu2\" to itself"),
        ("[\"gpu[4-7]\", \"leaf1\"],", "", "no path leads from \"gpu0\" to \"gpu4\""),
        ("\"count\": 2", "\"count\": 0", "links[2].count 0: expected at least 1"),
        ("\"count\": 2", "\"count\": 4000000000", "directed links: 32000000016 needed, 4194304 "),
        ("\"count\": 2", "\"bandwith\": 2", "a link is two names, or an object with from and to"),
        ("\"name\"", "\"nmae\"", "line 2, column 8: unknown field `nmae`"),
        (
            "gpu[0-3]\", \"host",
            "gpu[0-3000000]\", \"host",
            "names: 3000001 needed, 1048576 allowed",
        ),
        (
            "\"gpu[4-7]\"]",
            "\"gpu[4-7\"]",
            "endpoints[1]: \"gpu[4-7\" is not a valid name: expected ']'",
        ),
        (
            "\"latency_us\"",
            "\"latency_s\": 1, \"latency_us\"",
            "default: latency_us and latency_s are",
        ),
        (
            "\"links\"",
            "\"rank_map\": [\"gpu0\", \"gpu0\"], \"links\"",
            "ranks 0 and 1 are both at endpoint 0",
        ),
        (
            "\"links\"",
            "\"rank_map\": [\"leaf0\"], \"links\"",
            "rank_map[0]: \"leaf0\" is not an endpoint",
        ),
        (
            "\"links\"",
            "\"rank_map\": [\"gpu[0-7]\", \"gpu0\"], \"links\"",
            "ranks of the rank map: 9 needed, 8 allowed",
        ),
        ("\"links\"", "\"bigraph\": {}, \"links\"", "bigraph: makes all nodes and links"),
        ("]\n}", "]\n", "line 10, column 0: EOF"),
    ] {
        let text = TEN_LINES.replacen(change, into, 1);
        assert_ne!(text, TEN_LINES, "{change}");
        let error = Network::from_json(&text).unwrap_err().to_string();
        assert!(error.contains(said), "{change} -> {into}: {error}");
    }
    for (spec, said) in [
        ("bigraph:switches=15,endpoints=4", "switches 15: expected an even number"),
        ("bigraph:switches=16", "endpoints is missing"),
        ("bigraph:switches=16,endpoints=4,gbs=1", "there is no option gbs; did you mean \"gbps\"?"),
        ("bigraph:switches=16,endpoints=4,gbps=NaN", "bandwidth NaN: expected"),
        ("bigraph:switches=16,endpoints=4,gbps=inf", "bandwidth inf: expected"),
        ("bigraph:switches=1e30,endpoints=4", "switches 1e30: expected"),
        ("bigraph:switches=1.5,endpoints=4", "switches 1.5: expected a whole number"),
        ("bigraph:switches=4000000000,endpoints=4000000000", "1048576 allowed"),
        ("bigraph:switches=0,endpoints=4", "switches of each half 0: expected"),
        ("bigraph:switches=16,endpoints=4,physical=5", "physical 5: expected a divisor"),
        ("bigraph:switches=16,switches=16", "switches is given twice"),
        ("bigraph:switches", "\"switches\" is not of the form name=number"),
        ("fat-tree:leaves=4,spines=0,hosts=1", "spines 0: expected at least 1 where"),
        ("fat-tree3:k=5", "k 5: expected an even number"),
        ("fat-tree3:pods=2,leaves=2,aggs=2,cores=3,hosts=2", "cores 3: expected a multiple"),
        ("rail:hosts=4,gpus=2,hosts_per_leaf=2", "spines 0: expected at least 1 where a rail"),
        ("fattree:leaves=1", "neither a file nor one of"),
        ("bigrahp:leaves=1", "did you mean \"bigraph\"?"),
        ("", "neither a file nor"),
    ] {
        let error = Network::parse(spec).unwrap_err().to_string();
        assert!(error.contains(said), "{spec}: {error}");
    }
}

#[test]
fn invalid_names_are_rejected_before_they_are_expanded() {
    let zeros = "0".repeat(70_000);
    for pattern in [
        format!("{}[0-1048575]", "a".repeat(100_000)),
        format!("a[{zeros}-9]"),
        format!("a[0-1048575]{}", "b".repeat(100_000)),
    ] {
        let text = format!("{{\"endpoints\": [\"{pattern}\"]}}");
        let error = Network::from_json(&text).unwrap_err().to_string();
        assert!(error.starts_with("endpoints[0]: ") && error.len() < 400, "{}", &error[..300]);
        assert!(error.contains("expected at most 256 bytes"), "{error}");
    }
}

#[test]
fn a_large_network_of_one_way_links_is_checked_in_time() {
    // No neighbour of the first endpoint is reached by all endpoints; the hub is.
    let links = |back: &str| {
        format!(
            r#"{{"switches": ["hub", "up[0-99999]", "down[0-99999]"], "endpoints": ["e[0-99999]"],
            "links": [{{"from": "e[0-99999]", "to": "up[0-99999]", "pairwise": true, "oneway": true}},
                {{"from": "up[0-99999]", "to": "hub", "oneway": true}},
                {{"from": "hub", "to": "down[0-99999]", "oneway": true}},
                {{"from": "down[{back}]", "to": "e[{back}]", "pairwise": true, "oneway": true}}]}}"#
        )
    };
    assert!(Network::from_json(&links("0-99999")).is_ok());
    let error = Network::from_json(&links("0-99998")).unwrap_err().to_string();
    assert_eq!(error, "no path leads from \"e0\" to \"e99999\"");
}

#[test]
fn a_field_without_effect_is_rejected() {
    let text = r#"{"default": {"gbps": 400}, "rail": {"hosts": 4, "gpus": 2}}"#;
    let error = Network::from_json(text).unwrap_err().to_string();
    assert_eq!(error, "default: ignored by rail; set rail.gbps and rail.latency_us");
}

#[test]
fn numbers_whose_sums_are_infinite_are_rejected() {
    for (spec, said) in [
        ("gbps=1e300", "bandwidth 1.25e308: expected a number of bytes/s from 1e-30 to 1e30"),
        ("gbps=1e-300", "expected a number of bytes/s from 1e-30 to 1e30"),
        ("latency_us=1e300", "expected a number of seconds from 0 to 1e30"),
    ] {
        let spec = format!("fat-tree:leaves=1,spines=0,hosts=2,{spec}");
        let error = Network::parse(&spec).unwrap_err().to_string();
        assert!(error.contains(said), "{spec}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn a_file_without_an_end_is_rejected() {
    let error = Network::parse("/dev/zero").unwrap_err().to_string();
    assert!(error.contains("/dev/zero") && error.contains("not a regular file"), "{error}");
}

#[test]
fn json_may_name_a_builder() {
    let text = r#"{"bigraph": {"switches": 16, "endpoints": 4, "gbps": 50.8}}"#;
    let short = Network::parse("bigraph:switches=16,endpoints=4,gbps=50.8").unwrap();
    assert_eq!(Network::from_json(text).unwrap(), short);
    for text in ["[\"a\", {}]", "[]", "nonsense", "", "7"] {
        let error = Network::from_json(text).unwrap_err().to_string();
        assert!(error.contains("line 1, column 1: a network is an object: {"), "{text}: {error}");
    }
    let twice = r#"{"rail": {"hosts": 4, "gpus": 2, "hosts": 8}}"#;
    let error = Network::from_json(twice).unwrap_err();
    assert_eq!(error.to_string(), "rail.hosts: given twice");
    let error = Network::from_json(r#"{"rail": {"hosts": "four"}}"#).unwrap_err();
    assert_eq!(error.to_string(), "rail.hosts: \"four\" is not a number");
}
