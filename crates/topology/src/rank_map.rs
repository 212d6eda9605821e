//! Rank map for halving-doubling with rank mapping (HDRM): a BiGraph endpoint for each rank.

use crate::builders::{BiGraph, Port};
use crate::error::{Error, Result};
use crate::network::EndpointId;

/// HDRM rank map for the BiGraph part that has no contention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMap {
    /// Each rank's endpoint.
    pub endpoints: Vec<EndpointId>,
    /// Number of switches used in each half, a power of two, from the first on.
    pub half: u32,
    /// Number of ports used on each, from the first on.
    pub ports: u32,
    /// Number of endpoints without a rank.
    pub left_out: u64,
    /// Reason for endpoints without a rank.
    pub reason: Option<String>,
}

/// Port for a rank `r = j * 2H + 2i + b`: the half is the parity of r's bits, the switch is `(i + j) mod H` in the
/// upper half and `i` in the lower, the port is `j`.
///
/// Flipping one bit in `r` changes the half, so partners in a halving-doubling step are in different halves, and no two
/// pairs in a step use the same two switches.
///
/// # Panics
/// If `half` is not a power of two.
pub fn hdrm_port(rank: u32, half: u32) -> Port {
    assert!(half.is_power_of_two(), "HDRM needs a power-of-two switch count per half");
    let port = (u64::from(rank) / (2 * u64::from(half))) as u32;
    let switch = rank / 2 % half;
    let lower = rank.count_ones() % 2 == 1;
    Port { lower, switch: if lower { switch } else { switch.wrapping_add(port) % half }, port }
}

impl BiGraph {
    /// HDRM map for all endpoints. Requires `half` to be a power of two and at most `half` endpoints on a switch.
    pub fn rank_map(&self) -> Result<Vec<EndpointId>> {
        let map = self.embedded_rank_map()?;
        match map.reason {
            None => Ok(map.endpoints),
            Some(reason) => {
                let kept = map.endpoints.len();
                let reason = format!("{reason}; the embedded map has {kept} endpoints");
                Err(Error::NoRankMap { ranks: self.ports(), reason })
            }
        }
    }

    /// HDRM map for the largest BiGraph part that has one: the first `H'` switches in each half, `H'` the largest power
    /// of two up to `half`, and the first `min(M, H')` ports on each.
    pub fn embedded_rank_map(&self) -> Result<RankMap> {
        self.check()?;
        self.check_nics_not_shared()?;
        let half = 1 << self.half.ilog2();
        let ports = self.endpoints.min(half);
        let ranks = 2 * half * ports;
        let left_out = self.ports() - u64::from(ranks);
        Ok(RankMap {
            endpoints: (0..ranks).map(|rank| self.number(hdrm_port(rank, half))).collect(),
            half,
            ports,
            left_out,
            reason: self.reason_left_out(half, ports),
        })
    }

    /// HDRM map for `ranks` ranks, at most as many as in the embedded map.
    pub fn rank_map_of(&self, ranks: u32) -> Result<Vec<EndpointId>> {
        let mut map = self.embedded_rank_map()?;
        if ranks == 0 || ranks as usize > map.endpoints.len() {
            let most = map.endpoints.len();
            let why = map.reason.map_or_else(String::new, |reason| format!(": {reason}"));
            let reason = format!("expected 1 to {most}{why}");
            return Err(Error::NoRankMap { ranks: ranks.into(), reason });
        }
        map.endpoints.truncate(ranks as usize);
        Ok(map.endpoints)
    }

    /// Each port's host where hosts have several NICs: host `h` has the ranks from `h * nics` on.
    pub(crate) fn host_names(&self) -> Result<Option<Vec<String>>> {
        if self.nics == 1 {
            return Ok(None);
        }
        if !self.ports().is_multiple_of(self.nics.into()) {
            let must = "a divisor of the port count";
            return Err(Error::Count { what: "nics".to_owned(), value: self.nics.into(), must });
        }
        let mut hosts = vec![String::new(); self.ports() as usize];
        for (rank, endpoint) in self.rank_map()?.into_iter().enumerate() {
            hosts[endpoint.0 as usize] = format!("host{}", rank / self.nics as usize);
        }
        Ok(Some(hosts))
    }

    fn check_nics_not_shared(&self) -> Result<()> {
        if self.attach.gpus_per_nic == 1 {
            return Ok(());
        }
        let reason = format!(
            "{} GPUs share each NIC, so each step would share a link",
            self.attach.gpus_per_nic
        );
        Err(Error::NoRankMap { ranks: self.ports(), reason })
    }

    fn reason_left_out(&self, half: u32, ports: u32) -> Option<String> {
        let mut why = Vec::new();
        if half < self.half {
            why.push(format!(
                "{} switches of each half is not a power of two: {half} of them can be used",
                self.half
            ));
        }
        if ports < self.endpoints {
            why.push(format!(
                "{} endpoints on a switch exceed its {half} links to the other half: {ports} of them can \
                 be used",
                self.endpoints
            ));
        }
        (!why.is_empty()).then(|| why.join(", and "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn sixteen_endpoints_on_eight_switches_are_as_published() {
        let graph = BiGraph::new(4, 2);
        let mut ranks: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (rank, endpoint) in graph.rank_map().unwrap().into_iter().enumerate() {
            let Port { lower, switch, .. } = graph.port(endpoint);
            ranks.entry(graph.switch_name(lower, switch)).or_default().push(rank);
        }
        let found: Vec<_> = ranks.iter().map(|(name, ranks)| (name.as_str(), &ranks[..])).collect();
        let published: [(&str, &[usize]); 8] = [
            ("L0", &[1, 8]),
            ("L1", &[2, 11]),
            ("L2", &[4, 13]),
            ("L3", &[7, 14]),
            ("U0", &[0, 15]),
            ("U1", &[3, 9]),
            ("U2", &[5, 10]),
            ("U3", &[6, 12]),
        ];
        assert_eq!(found, published);
    }

    #[test]
    fn every_endpoint_has_one_rank_and_no_step_uses_a_pair_of_switches_twice() {
        for power in 0..7 {
            let half = 1u32 << power;
            for ports in 1..=half {
                let graph = BiGraph::new(half, ports);
                let map = graph.rank_map().unwrap();
                let places: BTreeSet<_> = map.iter().collect();
                assert_eq!(places.len(), map.len());
                assert_eq!(map.len() as u64, graph.ports());
                let ranks = map.len() as u32;
                let whole = 1u32 << ranks.ilog2();
                for bit in 0..whole.ilog2() {
                    check_step(&graph, &map, (0..whole).filter(|r| r >> bit & 1 == 0), 1 << bit);
                }
                // Ranks beyond the power of two fold onto the rank without the top bit.
                check_step(&graph, &map, 0..ranks - whole, whole);
            }
        }
    }

    fn check_step(graph: &BiGraph, map: &[EndpointId], ranks: impl Iterator<Item = u32>, bit: u32) {
        let mut used = BTreeSet::new();
        for rank in ranks {
            let one = graph.port(map[rank as usize]);
            let other = graph.port(map[(rank | bit) as usize]);
            assert_ne!(one.lower, other.lower, "ranks {rank} and {} are in one half", rank | bit);
            let (upper, lower) = if one.lower { (other, one) } else { (one, other) };
            // Both directions are used, only by this pair.
            assert!(used.insert((upper.switch, lower.switch)), "{graph:?}: {rank} in step {bit}");
        }
    }

    #[test]
    fn halves_that_are_no_power_of_two_are_embedded_or_rejected() {
        let graph = BiGraph::new(6, 5);
        let map = graph.embedded_rank_map().unwrap();
        assert_eq!((map.half, map.ports, map.endpoints.len(), map.left_out), (4, 4, 32, 28));
        let error = graph.rank_map().unwrap_err().to_string();
        assert!(error.contains("6 switches of each half is not a power of two"), "{error}");
        assert!(error.contains("the embedded map has 32 endpoints"), "{error}");
        assert!(graph.rank_map_of(33).is_err());
        assert_eq!(graph.rank_map_of(7).unwrap(), map.endpoints[..7]);
    }
}
