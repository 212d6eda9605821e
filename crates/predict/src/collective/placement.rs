//! Rank placement: each rank's endpoint.

use serde::{Deserialize, Serialize};
use weft_collectives::Algorithm;
use weft_topology::{Description, EndpointId};

use crate::error::Error;
use crate::world::World;

/// Rank placement on endpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// The description's rank map. Without one: the HDRM map on a BiGraph for HDRM, endpoint order for all other
    /// algorithms.
    #[default]
    Auto,
    /// Rank `r` at endpoint `r`.
    Order,
    /// The description's rank map, or the HDRM map on a BiGraph without one.
    Map,
    /// Rank `r` at the `r`th endpoint in this list.
    Endpoints(Vec<u32>),
}

impl Placement {
    /// Endpoints for `ranks` ranks that run `algorithm`.
    pub fn endpoints(
        &self,
        world: &World,
        algorithm: Algorithm,
        ranks: u32,
    ) -> Result<Vec<EndpointId>, Error> {
        let network = world.network();
        let all = network.endpoints();
        if ranks == 0 || ranks > all {
            let must = format!("from 1 to {all}, the endpoints of {}", network.name());
            return Err(Error::field("ranks", ranks, must));
        }
        match self {
            Placement::Endpoints(list) => explicit(list, all, ranks),
            Placement::Map => map(world, ranks),
            Placement::Auto if algorithm == Algorithm::Hdrm => map(world, ranks),
            Placement::Auto => world.places(ranks),
            Placement::Order => Ok((0..ranks).map(EndpointId).collect()),
        }
    }
}

fn map(world: &World, ranks: u32) -> Result<Vec<EndpointId>, Error> {
    match world.description() {
        Description::BiGraph(shape) if !world.network().has_rank_map() => {
            Ok(shape.rank_map_of(ranks)?)
        }
        _ => world.places(ranks),
    }
}

fn explicit(list: &[u32], all: u32, ranks: u32) -> Result<Vec<EndpointId>, Error> {
    if list.len() != ranks as usize {
        let must = format!("a list of {ranks} endpoints, one for each rank");
        return Err(Error::field("placement", format!("a list of {}", list.len()), must));
    }
    let mut taken = vec![false; all as usize];
    for endpoint in list {
        match taken.get_mut(*endpoint as usize) {
            None => {
                return Err(Error::field(
                    "placement",
                    endpoint,
                    format!("an endpoint below {all}"),
                ));
            }
            Some(true) => {
                return Err(Error::field("placement", endpoint, "each endpoint at most once"));
            }
            Some(free) => *free = true,
        }
    }
    Ok(list.iter().copied().map(EndpointId).collect())
}
