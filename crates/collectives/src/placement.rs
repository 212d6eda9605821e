//! Placement: a group's ranks on a network, the order in which they run HDRM, and times estimated on the network's
//! links.

use crate::algorithm::{Algorithm, Options};
use crate::any_schedule::{AnySchedule, build};
use crate::contention::contention;
use crate::error::Error;
use crate::halving_doubling::HalvingDoubling;
use crate::op::Collective;
use crate::placed_hdrm::PlacedHdrm;
use crate::run_error::RunError;
use crate::tune::{Costs, Estimate, SLACK, estimate};
use crate::tuning::{Prediction, candidates};
use weft_topology::{Description, EndpointId, Router, Routing};

/// Maximum rank count for which times are estimated; more take long to estimate.
const MODEL_RANKS: u32 = 64;
/// Maximum rank count for which a rank map from a file is checked for shared links.
const CHECKED_RANKS: u32 = 1024;

/// Network description.
#[derive(Clone, Copy, Debug)]
pub struct NetworkSource<'a> {
    /// File or short form, for errors.
    pub name: &'a str,
    /// Short form such as `bigraph:switches=8,endpoints=2`, or JSON.
    pub text: &'a str,
}

impl NetworkSource<'_> {
    /// The network described; no file is read.
    pub(crate) fn parse(&self) -> Result<Description, RunError> {
        let text = self.text.trim();
        let parsed = if text.starts_with('{') {
            Description::from_json(text)
        } else {
            Description::from_short_form(text)
        };
        parsed.map_err(|error| {
            let detail = match self.name == text {
                true => error.to_string(),
                false => format!("{}: {error}", self.name),
            };
            RunError::Invalid { what: "network", detail }
        })
    }
}

/// A group's ranks on a network.
#[derive(Clone, Debug)]
pub struct Placement {
    hdrm: Result<Mapped, String>,
}

/// Ranks that fit HDRM's map.
#[derive(Clone, Debug)]
struct Mapped {
    schedule: PlacedHdrm,
    /// Each rank's endpoint.
    endpoints: Vec<EndpointId>,
    /// Endpoint at each HDRM position.
    ordered: Vec<EndpointId>,
    /// Paths, for groups that are small enough for estimates.
    router: Option<Router>,
}

impl Placement {
    /// Rank placement on these hosts, one for each rank.
    ///
    /// # Errors
    /// [`RunError::Invalid`] for a description that is not valid. Ranks that do not fit are no error: HDRM is then
    /// refused.
    pub fn new(source: &NetworkSource<'_>, hosts: &[String]) -> Result<Placement, RunError> {
        let network = source.parse()?;
        let hdrm = Mapped::new(&network, hosts).map_err(|error| match error {
            Error::Topology(weft_topology::Error::NoRankMap { reason, .. }) => reason,
            other => other.to_string(),
        });
        Ok(Placement { hdrm: hdrm.map_err(|reason| format!("network {}: {reason}", source.name)) })
    }

    /// Rank at each HDRM position.
    ///
    /// # Errors
    /// The reason why the ranks do not fit.
    pub fn order(&self) -> Result<&[u32], &str> {
        self.hdrm.as_ref().map(|mapped| mapped.schedule.order()).map_err(String::as_str)
    }

    /// HDRM schedule.
    pub(crate) fn hdrm(&self) -> Result<AnySchedule, RunError> {
        match &self.hdrm {
            Ok(mapped) => Ok(mapped.schedule.clone().into()),
            Err(reason) => {
                let detail = format!("hdrm: {reason}");
                Err(RunError::Invalid { what: "algorithm", detail })
            }
        }
    }

    /// Estimated all-reduce times on a vector of `bytes` bytes, the one to select first; none without a placement and
    /// for more ranks than the model takes. Among those within 5 % of the fastest, the one with the lowest link load
    /// is first.
    pub(crate) fn estimates(&mut self, bytes: u64, costs: &Costs) -> Vec<Prediction> {
        let Ok(Mapped { schedule: hdrm, endpoints, ordered, router: Some(router) }) =
            &mut self.hdrm
        else {
            return Vec::new();
        };
        let ranks = endpoints.len() as u32;
        // By position: the same times as for the placed schedule, by rank. First, so that it wins against its equals.
        let plain = HalvingDoubling::new(hdrm.order().len() as u32, true);
        let options = Options::default();
        let hdrm = estimate(Algorithm::Hdrm, &options, &plain, router, ordered, bytes, costs);
        let mut all: Vec<Estimate> = hdrm.into_iter().collect();
        for (algorithm, options) in candidates(Collective::AllReduce) {
            let found =
                build(Collective::AllReduce, algorithm, ranks, &options).and_then(|plain| {
                    estimate(algorithm, &options, &plain, router, endpoints, bytes, costs)
                });
            all.extend(found);
        }
        all.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
        let fastest = all.first().map_or(0.0, Estimate::seconds);
        let near = all.iter().take_while(|one| one.seconds() <= fastest * (1.0 + SLACK));
        if let Some((index, _)) = near.enumerate().min_by_key(|(_, one)| one.max_load) {
            all[..=index].rotate_right(1);
        }
        let prediction = |one: Estimate| Prediction {
            algorithm: one.algorithm,
            options: one.options,
            seconds: one.seconds(),
        };
        all.into_iter().map(prediction).collect()
    }
}

impl Mapped {
    fn new(network: &Description, hosts: &[String]) -> Result<Mapped, Error> {
        let order = network.rank_order(hosts, None)?;
        let schedule = PlacedHdrm::new(&order.ranks)?;
        let endpoint = |&rank: &u32| order.endpoints[rank as usize];
        let ordered: Vec<_> = order.ranks.iter().map(endpoint).collect();
        let ranks = ordered.len() as u32;
        let is_checked = matches!(network, Description::Explicit(_)) && ranks <= CHECKED_RANKS;
        let mut router = None;
        if is_checked || ranks <= MODEL_RANKS {
            router = Some(Router::new(&network.network()?, Routing::Static)?);
        }
        if let Some(router) = router.as_mut().filter(|_| is_checked) {
            // Only power-of-two levels are free from shared links.
            let whole = 1 << ranks.ilog2();
            let plain = HalvingDoubling::new(whole, true);
            contention(&plain, router, &ordered[..whole as usize])?.require_no_collision()?;
        }
        let router = router.filter(|_| ranks <= MODEL_RANKS);
        Ok(Mapped { schedule, endpoints: order.endpoints, ordered, router })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::verify;
    use weft_fabric::random::SplitMix64;

    const BIGRAPHS: [&str; 4] = [
        "bigraph:switches=4,endpoints=2",
        "bigraph:switches=8,endpoints=2",
        "bigraph:switches=8,endpoints=3",
        "bigraph:switches=8,endpoints=4",
    ];

    fn source(text: &str) -> NetworkSource<'_> {
        NetworkSource { name: "network.json", text }
    }

    /// Network hosts in HDRM map order.
    fn hosts(spec: &str) -> Vec<String> {
        let Ok(Description::BiGraph(graph)) = Description::from_short_form(spec) else { panic!() };
        let map = graph.embedded_rank_map().unwrap().endpoints;
        let places = graph.placements(&map, None).unwrap().ranks;
        places.into_iter().map(|place| place.host).collect()
    }

    fn shuffle(hosts: &mut [String], random: &mut SplitMix64) {
        for at in (1..hosts.len()).rev() {
            hosts.swap(at, random.below(at as u64 + 1) as usize);
        }
    }

    /// Link load for the schedule, with ranks at their endpoints.
    fn load(mapped: &mut Mapped) -> u32 {
        let Mapped { schedule, endpoints, router, .. } = mapped;
        contention(schedule, router.as_mut().unwrap(), endpoints).unwrap().max_load
    }

    #[test]
    fn schedules_of_shuffled_ranks_are_proved_and_share_no_link() {
        let mut random = SplitMix64::new(5);
        for (spec, ranks) in BIGRAPHS.iter().flat_map(|spec| [(spec, 2), (spec, 8), (spec, 24)]) {
            for _ in 0..4 {
                let mut hosts = hosts(spec);
                hosts.truncate(ranks);
                shuffle(&mut hosts, &mut random);
                let mut placement = Placement::new(&source(spec), &hosts).unwrap();
                let proof = verify(&placement.hdrm().unwrap()).unwrap();
                assert_eq!(proof.name, "hdrm");
                let mapped = placement.hdrm.as_mut().unwrap();
                if hosts.len().is_power_of_two() {
                    assert_eq!(load(mapped), 1, "{spec}, {hosts:?}");
                }
            }
        }
    }

    #[test]
    fn parts_of_a_network_share_no_link() {
        let spec = BIGRAPHS[3];
        let all = hosts(spec);
        let mut random = SplitMix64::new(9);
        for bits in 1..=4 {
            for _ in 0..8 {
                // Hosts whose numbers differ in only `bits` bits.
                let mut places = Vec::new();
                while places.len() < bits {
                    let place = 1usize << random.below(5);
                    if !places.contains(&place) {
                        places.push(place);
                    }
                }
                let origin = random.below(32) as usize;
                let number = |at: usize| {
                    let bit = |(index, place): (usize, &usize)| (at >> index & 1) * place;
                    origin ^ places.iter().enumerate().map(bit).sum::<usize>()
                };
                let mut part: Vec<_> = (0..1 << bits).map(|at| all[number(at)].clone()).collect();
                shuffle(&mut part, &mut random);
                let mut placement = Placement::new(&source(spec), &part).unwrap();
                verify(&placement.hdrm().unwrap()).unwrap();
                assert_eq!(load(placement.hdrm.as_mut().unwrap()), 1, "{part:?}");
            }
        }
    }

    #[test]
    fn hdrm_is_selected_for_long_vectors_and_its_own_estimate_is_never_beaten() {
        let spec = BIGRAPHS[3];
        let mut hosts = hosts(spec);
        shuffle(&mut hosts, &mut SplitMix64::new(2));
        let mut placement = Placement::new(&source(spec), &hosts).unwrap();
        for bytes in [4u64, 4 << 10, 256 << 10, 16 << 20, 1 << 30] {
            let all = placement.estimates(bytes, &Costs::default());
            let fastest = all.iter().map(|one| one.seconds).fold(f64::INFINITY, f64::min);
            assert!(all[0].seconds <= fastest * (1.0 + SLACK), "{bytes}");
            assert!(all.iter().any(|one| one.algorithm == Algorithm::Hdrm));
            if bytes == 16 << 20 {
                assert_eq!(all[0].algorithm, Algorithm::Hdrm);
            }
        }
    }

    #[test]
    fn ranks_that_do_not_fit_are_refused_with_the_reason() {
        let spec = BIGRAPHS[1];
        let all = hosts(spec);
        let part = [all[0].clone(), all[3].clone()];
        let mut placement = Placement::new(&source(spec), &part).unwrap();
        assert!(placement.estimates(1 << 20, &Costs::default()).is_empty());
        let reason = placement.order().unwrap_err().to_owned();
        assert!(reason.starts_with("network network.json: hosts U0.0, "), "{reason}");
        let error = placement.hdrm().unwrap_err().to_string();
        assert_eq!(error, format!("algorithm: hdrm: {reason}"));
    }

    #[test]
    fn a_rank_map_of_a_file_that_shares_links_is_refused() {
        let Ok(Description::BiGraph(graph)) = Description::from_short_form(BIGRAPHS[1]) else {
            panic!()
        };
        let network = graph.network().unwrap();
        let file = |map: Vec<EndpointId>| network.with_rank_map(map).unwrap().to_json();
        let map = graph.rank_map().unwrap();
        let of = |text: &str| Placement::new(&source(text), &hosts(BIGRAPHS[1])).unwrap();
        assert!(of(&file(map.clone())).order().is_ok());
        let in_order = file((0..16).map(EndpointId).collect());
        let reason = of(&in_order).order().unwrap_err().to_owned();
        assert!(reason.contains("collisions; the first"), "{reason}");
    }

    #[test]
    fn a_damaged_description_is_an_error_and_no_file_is_read() {
        let of = |text: &str| Placement::new(&source(text), &[]).unwrap_err().to_string();
        assert!(of("{").starts_with("network: network.json: "), "{}", of("{"));
        assert!(
            of("/etc/hostname").contains("neither a file nor one of"),
            "{}",
            of("/etc/hostname")
        );
    }
}
