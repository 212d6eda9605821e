//! Grants of whole regions: to all ranks at once, or to one peer as bytes.

use crate::errors::Error;
use weft_fabric::{
    Communicator, CounterId, Error as FabricError, Grant, Rank, Region, RemoteRegion, Time,
};

/// A region at a peer: key and length.
pub type Remote = (u32, u64);

/// Grants all of `regions` to every peer and links `counters`; returns by rank what it granted.
pub fn share(
    fabric: &Communicator,
    regions: &[Region],
    counters: Vec<u32>,
    deadline: Time,
) -> Result<Vec<Vec<Remote>>, Error> {
    let regions: Vec<_> = regions.iter().map(|region| (region, whole(region))).collect();
    let counters: Vec<_> = counters.into_iter().map(CounterId::from_number).collect();
    let remotes = fabric.share(&regions, &counters, deadline)?;
    Ok(remotes.iter().map(|granted| granted.iter().map(remote).collect()).collect())
}

/// Grant for one peer, encoded.
pub fn grant(
    fabric: &Communicator,
    region: &Region,
    peer: Rank,
    deadline: Time,
) -> Result<Vec<u8>, Error> {
    let granted = fabric
        .retry_until(deadline, |engine, _| engine.grant(peer, &[(region, whole(region))], &[]));
    Ok(granted?.encode())
}

/// The region that a peer's grant has.
pub fn import(
    fabric: &Communicator,
    peer: Rank,
    grant: &[u8],
    deadline: Time,
) -> Result<Remote, Error> {
    let malformed = || {
        let detail = format!("{} bytes", grant.len());
        FabricError::Malformed { peer, what: "a region's grant", detail }
    };
    let decoded = Grant::decode(grant).ok_or_else(malformed)?;
    let remotes = fabric
        .retry_until(deadline, |engine, limit| engine.import_within(peer, &decoded, &[], limit))?;
    Ok(remote(remotes.first().ok_or_else(malformed)?))
}

fn whole(region: &Region) -> std::ops::Range<u64> {
    0..region.memory().len() as u64
}

fn remote(region: &RemoteRegion) -> Remote {
    (region.key.0, region.length)
}
