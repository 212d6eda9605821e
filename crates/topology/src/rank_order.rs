//! Rank order: each rank's position in the HDRM map, whichever hosts a group's ranks run on.
//!
//! Let `r` be an endpoint's number in the map for the whole network. A group fits if the numbers of its endpoints are
//! `c ^ d(0), c ^ d(1), ...`, where `d(p)` has the bits in `p` at fixed places: partners at a level then differ in one
//! bit of `r`, as in the whole map, and use some of the same links.

use crate::builders::BiGraph;
use crate::describe::Description;
use crate::error::{Error, Result};
use crate::network::EndpointId;
use std::collections::HashMap;

/// Maximum number of `c` values that are tried; with a power-of-two rank count, the first one decides.
const ORIGINS: usize = 64;
/// Number of hosts that an error names.
const NAMED: usize = 4;

/// HDRM order for a group's ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankOrder {
    /// Rank at each position.
    pub ranks: Vec<u32>,
    /// Each rank's endpoint.
    pub endpoints: Vec<EndpointId>,
}

impl RankOrder {
    /// Each rank's position.
    pub fn positions(&self) -> Vec<u32> {
        let mut positions = vec![0; self.ranks.len()];
        for (position, &rank) in (0..).zip(&self.ranks) {
            positions[rank as usize] = position;
        }
        positions
    }
}

/// Map endpoint.
struct Place {
    endpoint: EndpointId,
    host: String,
}

impl Description {
    /// Rank order on these hosts, one host for each rank. The ranks on a host take the host's endpoints in order.
    /// `names` are the network's host names, as in [`BiGraph::placements`].
    ///
    /// # Errors
    /// [`Error::NoRankMap`] for a network without an HDRM map, an unknown host, more ranks on a host than it has
    /// endpoints, and hosts that are not in the map; errors from [`BiGraph::placements`].
    pub fn rank_order(&self, hosts: &[String], names: Option<&[String]>) -> Result<RankOrder> {
        let places = self.places(hosts.len() as u64, names)?;
        let numbers = numbers_of(&places, hosts)?;
        let order = fit(&numbers).map_err(|misfit| {
            no_map(hosts.len() as u64, misfit.reason(&numbers, hosts, &places))
        })?;
        let endpoints = numbers.iter().map(|&number| places[number as usize].endpoint).collect();
        Ok(RankOrder { ranks: order, endpoints })
    }

    /// Each rank's host in the HDRM map, for this rank count or for all ranks that have a place.
    ///
    /// # Errors
    /// [`Error::NoRankMap`] for a network without an HDRM map, or with too few endpoints; errors from
    /// [`BiGraph::placements`].
    pub fn hdrm_hosts(&self, ranks: Option<u32>, names: Option<&[String]>) -> Result<Vec<String>> {
        if let (Description::BiGraph(graph), Some(ranks)) = (self, ranks) {
            graph.rank_map_of(ranks)?;
        }
        let wanted = ranks.map(|ranks| ranks as usize);
        let mut places = self.places(ranks.unwrap_or_default().into(), names)?;
        let most = places.len();
        let wanted = wanted.unwrap_or(most);
        if !(1..=most).contains(&wanted) {
            return Err(no_map(wanted as u64, format!("expected 1 to {most}")));
        }
        places.truncate(wanted);
        Ok(places.into_iter().map(|place| place.host).collect())
    }

    /// Endpoint and host for each rank in the whole map.
    fn places(&self, ranks: u64, names: Option<&[String]>) -> Result<Vec<Place>> {
        match self {
            Description::BiGraph(graph) => places_of(graph, names),
            Description::Explicit(network) if network.has_rank_map() => {
                let place = |endpoint| Place { endpoint, host: network.host(endpoint).to_owned() };
                Ok(network.rank_map().into_iter().map(place).collect())
            }
            _ => {
                let reason = "HDRM needs a BiGraph, expected bigraph:..., a JSON file with its options, or one \
                              with a rank_map (`weft topo bigraph --out` writes it); on other networks use ring \
                              or hd, whose ranks need no placement";
                Err(no_map(ranks, reason.to_owned()))
            }
        }
    }
}

fn places_of(graph: &BiGraph, names: Option<&[String]>) -> Result<Vec<Place>> {
    let map = graph.embedded_rank_map()?.endpoints;
    let places = graph.placements(&map, names)?.ranks;
    Ok(map
        .into_iter()
        .zip(places)
        .map(|(endpoint, place)| Place { endpoint, host: place.host })
        .collect())
}

fn no_map(ranks: u64, reason: String) -> Error {
    Error::NoRankMap { ranks, reason }
}

/// Each rank's number in the whole map.
fn numbers_of(places: &[Place], hosts: &[String]) -> Result<Vec<u32>> {
    let mut free: HashMap<&str, Vec<u32>> = HashMap::new();
    for (number, place) in places.iter().enumerate().rev() {
        free.entry(&place.host).or_default().push(number as u32);
    }
    let mut numbers = Vec::with_capacity(hosts.len());
    for host in hosts {
        let Some(of_host) = free.get_mut(host.as_str()) else {
            let known = some(places.iter().map(|place| place.host.as_str()));
            let reason = format!(
                "host {host} has no endpoint in HDRM's map, whose hosts are {known}; name hosts as the network does"
            );
            return Err(no_map(hosts.len() as u64, reason));
        };
        let Some(number) = of_host.pop() else {
            let ranks = hosts.iter().filter(|&other| other == host).count();
            let endpoints = places.iter().filter(|place| place.host == *host).count();
            let reason = format!(
                "host {host} has {ranks} ranks and {endpoints} of the endpoints of HDRM's map; start at most one \
                 rank for each endpoint"
            );
            return Err(no_map(hosts.len() as u64, reason));
        };
        numbers.push(number);
    }
    Ok(numbers)
}

/// Position without a rank: the number in the whole map.
struct Misfit {
    position: usize,
    number: u32,
}

impl Misfit {
    fn reason(&self, numbers: &[u32], hosts: &[String], places: &[Place]) -> String {
        let Misfit { position, number } = self;
        let mut of_group: Vec<_> = numbers.iter().zip(hosts).collect();
        of_group.sort_unstable();
        let hosts = some(of_group.into_iter().map(|(_, host)| host.as_str()));
        let missing = match places.get(*number as usize) {
            Some(place) => format!("at host {}, which has none", place.host),
            None => "beyond its endpoints".to_owned(),
        };
        let fitting = some(places.iter().take(numbers.len()).map(|place| place.host.as_str()));
        format!(
            "hosts {hosts} are no part of HDRM's map: rank {position} of the order would be {missing}; the first \
             hosts of the map fit: {fitting}"
        )
    }
}

/// Rank at each position.
fn fit(numbers: &[u32]) -> std::result::Result<Vec<u32>, Misfit> {
    let mut sorted: Vec<u32> = (0..numbers.len() as u32).collect();
    sorted.sort_unstable_by_key(|&rank| numbers[rank as usize]);
    let mut first = None;
    for &rank in sorted.iter().take(ORIGINS) {
        let origin = numbers[rank as usize];
        let mut order = sorted.clone();
        order.sort_unstable_by_key(|&rank| numbers[rank as usize] ^ origin);
        match check(&order, |rank| numbers[rank as usize] ^ origin) {
            Ok(()) => return Ok(order),
            Err((position, number)) => {
                first.get_or_insert(Misfit { position, number: number ^ origin });
            }
        }
    }
    first.map_or(Ok(sorted), Err)
}

/// Checks that the number at each position has the position's bits at fixed places. Otherwise: the first position
/// without a rank, and the number.
fn check(order: &[u32], number: impl Fn(u32) -> u32) -> std::result::Result<(), (usize, u32)> {
    let mut places: Vec<u32> = Vec::new();
    for (position, &rank) in order.iter().enumerate().skip(1) {
        let found = number(rank);
        if position.is_power_of_two() {
            if !found.is_power_of_two() {
                // The lowest bit that is in no number so far.
                let used = places.iter().fold(0, |all, place| all | place);
                let free = found & !used;
                return Err((position, free & free.wrapping_neg()));
            }
            places.push(found);
        }
        let bit =
            |(index, place): (usize, &u32)| if position >> index & 1 == 1 { *place } else { 0 };
        let expected = places.iter().enumerate().map(bit).fold(0, |all, bit| all | bit);
        if found != expected {
            return Err((position, expected));
        }
    }
    Ok(())
}

/// The first few names, each once, and how many others there are.
fn some<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut all: Vec<&str> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    all.extend(names.filter(|name| seen.insert(*name)));
    let more = all.len().saturating_sub(NAMED);
    let text = all[..all.len() - more].join(", ");
    if more > 0 { format!("{text} and {more} more") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NETWORK: &str = "bigraph:switches=8,endpoints=2";

    /// Host for each number in the map.
    fn map(spec: &str) -> Vec<String> {
        let network = Description::parse(spec).unwrap();
        network.places(0, None).unwrap().into_iter().map(|place| place.host).collect()
    }

    fn order_of(hosts: &[String]) -> Result<RankOrder> {
        Description::parse(NETWORK).unwrap().rank_order(hosts, None)
    }

    fn chosen(numbers: &[usize]) -> Vec<String> {
        let map = map(NETWORK);
        numbers.iter().map(|&number| map[number].clone()).collect()
    }

    #[test]
    fn ranks_in_any_order_take_the_places_of_their_hosts() {
        let mut hosts = map(NETWORK);
        hosts.reverse();
        hosts.swap(3, 11);
        let order = order_of(&hosts).unwrap();
        for (position, &rank) in order.ranks.iter().enumerate() {
            assert_eq!(hosts[rank as usize], map(NETWORK)[position]);
            assert_eq!(order.positions()[rank as usize], position as u32);
        }
    }

    #[test]
    fn parts_of_the_map_fit_and_keep_one_bit_between_partners() {
        for numbers in [
            &[4usize, 5, 6, 7][..],
            &[14, 6, 12, 4],
            &[9, 1],
            &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
            // Three ranks in a square, without the lowest.
            &[1, 2, 3],
            &[11],
        ] {
            let order = order_of(&chosen(numbers)).unwrap();
            let at: Vec<_> = order.ranks.iter().map(|&rank| numbers[rank as usize]).collect();
            for position in 0..at.len() {
                for bit in (0..4).map(|bit| 1 << bit).filter(|bit| position & bit == 0) {
                    if let Some(partner) = at.get(position | bit) {
                        assert!((at[position] ^ partner).is_power_of_two(), "{numbers:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn groups_that_do_not_fit_are_refused_with_the_reason() {
        let refusal = |hosts: &[String]| order_of(hosts).unwrap_err().to_string();
        let other = refusal(&chosen(&[0, 1, 2, 4]));
        assert!(other.contains("rank 3 of the order would be at host"), "{other}");
        let far = refusal(&chosen(&[0, 3]));
        assert!(far.contains("rank 1 of the order would be at host"), "{far}");
        let twice = refusal(&chosen(&[0, 0]));
        assert!(twice.contains("has 2 ranks and 1 of the endpoints"), "{twice}");
        let unknown = refusal(&["node7".to_owned()]);
        assert!(unknown.contains("host node7 has no endpoint in HDRM's map"), "{unknown}");
        let tree = Description::parse("fat-tree:leaves=2,spines=1,hosts=2").unwrap();
        let tree = tree.rank_order(&chosen(&[0, 1]), None).unwrap_err().to_string();
        assert!(tree.contains("HDRM needs a BiGraph"), "{tree}");
    }

    #[test]
    fn a_network_with_a_rank_map_is_taken_as_it_is() {
        let Ok(Description::BiGraph(graph)) = Description::parse(NETWORK) else { unreachable!() };
        let network = graph.network().unwrap();
        let plain = Description::from_json(&network.to_json()).unwrap();
        assert!(plain.rank_order(&chosen(&[0, 1]), None).is_err());
        let mapped = network.with_rank_map(graph.rank_map().unwrap()).unwrap();
        let mapped = Description::from_json(&mapped.to_json()).unwrap();
        let hosts = chosen(&[13, 15, 12, 14]);
        assert_eq!(mapped.rank_order(&hosts, None).unwrap(), order_of(&hosts).unwrap());
    }
}
