//! Rank placement: each rank's host and endpoint, in the files that launchers read.

use crate::builders::BiGraph;
use crate::error::{Error, Result};
use crate::network::EndpointId;
use serde::Serialize;
use std::collections::HashMap;
use std::fmt::Write as _;

/// Placement for one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankPlacement {
    /// The rank.
    pub rank: u32,
    /// Endpoint number.
    pub endpoint: u32,
    /// Endpoint name.
    pub name: String,
    /// Host name.
    pub host: String,
    /// Index among the ranks on the host.
    pub local_rank: u32,
    /// Switch to which the endpoint is cabled.
    pub switch: String,
    /// Port on that switch, from 0.
    pub port: u32,
}

/// Placements for all ranks, in rank order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankPlacements {
    /// Placement for each rank.
    pub ranks: Vec<RankPlacement>,
}

impl BiGraph {
    /// Placements for a rank map on this BiGraph. `hosts` are host names: with one NIC per host in endpoint order, else
    /// in rank order. The default is the endpoint name, or `host0`, `host1`, ... for hosts with several NICs.
    ///
    /// # Errors
    /// [`Error::Field`] for a wrong host count; [`Error::BadName`], [`Error::DuplicateName`],
    /// [`Error::EndpointOutOfRange`].
    pub fn placements(
        &self,
        map: &[EndpointId],
        hosts: Option<&[String]>,
    ) -> Result<RankPlacements> {
        let own = self.host_names()?;
        let needed = self.ports() / u64::from(self.nics);
        if let Some(hosts) = hosts {
            if hosts.len() as u64 != needed {
                let reason = format!("{} host names: expected {needed}, one per host", hosts.len());
                return Err(Error::Field { at: "hosts".to_owned(), reason });
            }
            check_names(hosts)?;
        }
        let mut locals: HashMap<String, u32> = HashMap::new();
        let mut ranks = Vec::with_capacity(map.len());
        for (rank, &endpoint) in map.iter().enumerate() {
            if u64::from(endpoint.0) >= self.ports() {
                let endpoints = self.ports() as u32;
                return Err(Error::EndpointOutOfRange { endpoint: endpoint.0, endpoints });
            }
            let port = self.port(endpoint);
            let name = self.port_name(port);
            let host = match (hosts, &own) {
                (Some(hosts), None) => hosts[endpoint.0 as usize].clone(),
                (None, None) => name.clone(),
                (given, Some(own)) => {
                    let own = &own[endpoint.0 as usize];
                    let number = own.trim_start_matches("host").parse::<usize>().unwrap_or(0);
                    given.map_or_else(|| own.clone(), |hosts| hosts[number].clone())
                }
            };
            let next = locals.entry(host.clone()).or_insert(0);
            *next += 1;
            ranks.push(RankPlacement {
                rank: rank as u32,
                endpoint: endpoint.0,
                local_rank: *next - 1,
                switch: self.switch_name(port.lower, port.switch),
                port: port.port,
                name,
                host,
            });
        }
        Ok(RankPlacements { ranks })
    }
}

/// Checks that host names are unique and fit into files made of words and lines.
fn check_names(hosts: &[String]) -> Result<()> {
    let mut seen = HashMap::new();
    for (line, host) in hosts.iter().enumerate() {
        let at = format!("hosts[{line}]");
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
        if host.is_empty() || !host.chars().all(plain) {
            let reason = "expected letters, digits, dots, colons, hyphens and underscores";
            return Err(Error::BadName { at, name: host.clone(), reason });
        }
        if seen.insert(host, line).is_some() {
            return Err(Error::DuplicateName { at, name: host.clone() });
        }
    }
    Ok(())
}

impl RankPlacements {
    /// Hosts with their ranks, in the order of their first ranks.
    fn hosts(&self) -> Vec<(&str, Vec<u32>)> {
        let mut indices = HashMap::new();
        let mut hosts: Vec<(&str, Vec<u32>)> = Vec::new();
        for placement in &self.ranks {
            let number = *indices.entry(placement.host.as_str()).or_insert_with(|| {
                hosts.push((&placement.host, Vec::new()));
                hosts.len() - 1
            });
            hosts[number].1.push(placement.rank);
        }
        hosts
    }

    /// Hosts with their rank counts, if each host has consecutive ranks.
    fn filled(&self, form: &'static str) -> Result<Vec<(&str, usize)>> {
        let hosts = self.hosts();
        for (host, ranks) in &hosts {
            if let Some(pair) = ranks.windows(2).find(|pair| pair[1] != pair[0] + 1) {
                let reason = format!(
                    "it needs consecutive ranks on each host, but {host} has ranks {} and {} and none between; \
                     use the rankfile, or set RANK for each process",
                    pair[0], pair[1]
                );
                return Err(Error::NoForm { form, reason });
            }
        }
        Ok(hosts.into_iter().map(|(host, ranks)| (host, ranks.len())).collect())
    }

    /// Open MPI hostfile (`mpirun --hostfile`), filled by slot: lines such as `host slots=4`.
    pub fn hostfile(&self) -> Result<String> {
        let hosts = self.filled("hostfile")?;
        Ok(hosts.iter().map(|(host, slots)| format!("{host} slots={slots}\n")).collect())
    }

    /// Node ranks for torchrun: `node_rank host` lines, after a comment with the common arguments.
    pub fn torchrun(&self) -> Result<String> {
        let form = "torchrun";
        let hosts = self.filled(form)?;
        let each = hosts.first().map_or(0, |host| host.1);
        if let Some((host, ranks)) = hosts.iter().find(|host| host.1 != each) {
            let reason = format!(
                "it needs equal numbers of ranks on all hosts, but {} has {each} and {host} {ranks}",
                hosts[0].0
            );
            return Err(Error::NoForm { form, reason });
        }
        let mut text = format!(
            "# torchrun --nnodes={} --nproc-per-node={each} --node-rank=NODE_RANK \
             --rdzv-backend=static --master-addr={}\n# node_rank host\n",
            hosts.len(),
            hosts.first().map_or("", |host| host.0)
        );
        for (number, (host, _)) in hosts.iter().enumerate() {
            let _ = writeln!(text, "{number} {host}");
        }
        Ok(text)
    }

    /// Open MPI rankfile, which can express any map: lines such as `rank 3=host slot=0`.
    pub fn rankfile(&self) -> String {
        let line = |place: &RankPlacement| {
            format!("rank {}={} slot={}\n", place.rank, place.host, place.local_rank)
        };
        self.ranks.iter().map(line).collect()
    }

    /// All fields as CSV with a header.
    pub fn csv(&self) -> String {
        let mut text = String::from("rank,host,local_rank,switch,port,endpoint\n");
        for RankPlacement { rank, host, local_rank, switch, port, name, .. } in &self.ranks {
            let _ = writeln!(text, "{rank},{host},{local_rank},{switch},{port},{name}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_nic_for_each_host_has_every_form() {
        let shape = BiGraph::new(2, 2);
        let places = shape.placements(&shape.rank_map().unwrap(), None).unwrap();
        // U0 {0,7}, U1 {3,5}, ...: a rank's host is its port.
        assert!(places.hostfile().unwrap().starts_with("U0.0 slots=1\nL0.0 slots=1\n"));
        let torchrun = places.torchrun().unwrap();
        assert!(torchrun.contains("--nnodes=8 --nproc-per-node=1"), "{torchrun}");
        assert!(torchrun.contains("\n0 U0.0\n1 L0.0\n"), "{torchrun}");
        assert!(places.rankfile().starts_with("rank 0=U0.0 slot=0\nrank 1=L0.0 slot=0\n"));
        assert!(places.csv().contains("\n0,U0.0,0,U0,0,U0.0\n"));
        let names: Vec<String> = (0..8).map(|host| format!("node{host}")).collect();
        let named = shape.placements(&shape.rank_map().unwrap(), Some(&names)).unwrap();
        assert!(named.hostfile().unwrap().starts_with("node0 slots=1\nnode4 slots=1\n"));
        assert!(shape.placements(&shape.rank_map().unwrap(), Some(&names[1..])).is_err());
    }

    #[test]
    fn hosts_of_several_nics_are_filled_in_the_order_of_ranks() {
        let shape = BiGraph { nics: 4, ..BiGraph::new(8, 4) };
        let places = shape.placements(&shape.rank_map().unwrap(), None).unwrap();
        assert!(places.hostfile().unwrap().starts_with("host0 slots=4\nhost1 slots=4\n"));
        assert!(places.torchrun().unwrap().contains("--nnodes=16 --nproc-per-node=4"));
        assert_eq!(places.ranks[6].local_rank, 2);
    }

    #[test]
    fn maps_that_a_format_cannot_express_are_rejected() {
        let place = |rank, host: &str| RankPlacement {
            rank,
            endpoint: rank,
            name: String::new(),
            host: host.to_owned(),
            local_rank: 0,
            switch: String::new(),
            port: 0,
        };
        let split = RankPlacements { ranks: vec![place(0, "a"), place(1, "b"), place(2, "a")] };
        let error = split.hostfile().unwrap_err().to_string();
        assert!(error.contains("a has ranks 0 and 2 and none between"), "{error}");
        let uneven = RankPlacements { ranks: vec![place(0, "a"), place(1, "a"), place(2, "b")] };
        assert!(uneven.hostfile().is_ok());
        assert!(uneven.torchrun().unwrap_err().to_string().contains("a has 2 and b 1"));
    }
}
