//! Making an all-to-all on all ranks of a communicator.

use crate::all_to_all::AllToAll;
use crate::error::Error;
use crate::shape::Config;
use weft_fabric::descriptor::Grant;
use weft_fabric::{Communicator, Rank, Time};

impl AllToAll {
    /// Makes an all-to-all over a communicator; every rank calls this with the same configuration but
    /// for `rank`.
    ///
    /// # Errors
    /// Those of [`crate::Shape::new`]; [`Error::Disagreement`] if the ranks' configurations differ,
    /// before anything is allocated; those of the fabric.
    pub fn connect(
        communicator: &mut Communicator,
        config: Config,
        deadline: Time,
    ) -> Result<AllToAll, Error> {
        let copies = vec![config.encode(); communicator.world_size() as usize];
        config.agree(&communicator.trade(&copies, deadline)?)?;
        let mut all_to_all = AllToAll::allocate(communicator.engine(), config)?;
        let mut grants = Vec::new();
        for rank in (0..communicator.world_size()).map(Rank) {
            grants.push(if rank == communicator.rank() {
                Vec::new()
            } else {
                all_to_all.driver().grant(communicator.engine(), rank)?.encode()
            });
        }
        for (number, bytes) in communicator.trade(&grants, deadline)?.into_iter().enumerate() {
            let peer = Rank(number as u32);
            if peer == communicator.rank() {
                continue;
            }
            let grant = Grant::decode(&bytes).ok_or(weft_fabric::Error::Malformed {
                peer,
                what: "a grant",
                detail: format!("{} bytes", bytes.len()),
            })?;
            all_to_all.driver().link(communicator.engine(), peer, &grant, deadline)?;
        }
        Ok(all_to_all)
    }
}
