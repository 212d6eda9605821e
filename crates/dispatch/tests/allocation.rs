//! Allocation after construction: both drivers allocate neither in polls nor in submissions and reports.

#[path = "../../fabric/tests/common/counting.rs"]
mod counting;

use counting::counting;
use std::sync::Arc;
use std::time::Duration;
use weft_dispatch::{
    Accelerator, AcceleratorConfig, Agreement, Connection, Error, FrontEnd, Input, LedgerConfig,
    NoOp, Report, Role, Schema,
};
use weft_fabric::providers::sim::{Cluster, World, WorldConfig};
use weft_fabric::{Event, Memory, Rank, Requests, Time};

const SLOTS: u32 = 16;
const QUERIES: u64 = 400;

#[test]
#[cfg_attr(miri, ignore = "400 queries take minutes")]
fn drivers_allocate_at_construction_alone() -> Result<(), Error> {
    let world = World::new(WorldConfig { reuse: true, ..WorldConfig::new(2, 1) });
    let mut cluster = Cluster::with_config(&world, Connection::engine_config(SLOTS))?;
    let schema = Schema::bytes(100, 60);
    let (slots, checksum, name) = (SLOTS, true, "node".to_owned());
    let agreement = Agreement { slots, checksum, name, schema: schema.clone() };
    let ranks = [Rank(0), Rank(1)];
    let [front, node] = ranks;
    let mut ends = [
        Connection::allocate(cluster.engine(front), node, Role::FrontEnd, agreement.clone())?,
        Connection::allocate(cluster.engine(node), front, Role::Accelerator, agreement)?,
    ];
    for rank in ranks {
        let grant = ends[rank.index()].grant(cluster.engine(rank))?;
        let peer = Rank(1 - rank.0);
        ends[peer.index()].link(cluster.engine(peer), &grant, Time::MAX)?;
    }
    let memory = Arc::new(Memory::shared(100)?);
    let key = cluster.engine(front).register(memory.clone())?.key();
    let config = LedgerConfig { queries: 24, nodes: 1, slots: SLOTS, ..LedgerConfig::default() };
    let mut front_end = FrontEnd::new(config, schema.clone(), &[memory])?;
    let [front_connection, node_connection] = ends;
    let id = front_end.join(front_connection, &[key])?;
    let config = AcceleratorConfig { max_batch: 5, window: Duration::ZERO, ..Default::default() };
    let mut accelerator = Accelerator::new(config, schema, NoOp)?;
    let index = accelerator.join(node_connection)?;
    let mut requests = Requests::with_capacity(256, 512);
    let (mut submitted, mut ended, mut answered) = (0, 0, 0);
    let mut step = |events: &[Event], now: Time, rank: Rank, requests: &mut Requests| {
        if rank == node {
            accelerator.poll(now, index, events, requests)?;
            return Ok(ended == QUERIES);
        }
        while submitted < QUERIES {
            let input = Input { memory: 0, offset: 0, length: submitted % 101 };
            match front_end.submit(submitted, &[input], Time(now.0 + 1_000_000_000)) {
                Ok(query) if submitted % 9 == 0 => front_end.cancel(query)?,
                Ok(_) => {}
                Err(Error::Full { .. }) => break,
                Err(error) => return Err(error),
            }
            submitted += 1;
        }
        front_end.poll(now, id, events, requests)?;
        while let Some(report) = front_end.next_report() {
            answered += u64::from(matches!(report, Report::Answered { .. }));
            ended += u64::from(!matches!(report, Report::Returned { .. }));
        }
        Ok(ended == QUERIES)
    };
    let (mut allocated, mut polls) = (0, 0);
    let outcomes = cluster.run(|engine, now, events, wanted| {
        let rank = engine.rank();
        let (result, allocations) = counting(|| step(events, now, rank, &mut requests));
        (allocated, polls) = (allocated + allocations, polls + 1);
        engine.submit(&mut requests)?;
        debug_assert!(wanted.is_empty());
        result
    });
    assert!(outcomes.is_ok(), "{outcomes:?}");
    assert_eq!((ended, allocated), (QUERIES, 0));
    assert!(answered > QUERIES / 2 && polls > 100, "{answered} answers in {polls} polls");
    Ok(())
}
