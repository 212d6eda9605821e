//! Chains that a round posts for each peer over verbs, counted at simulated NICs.

#[expect(dead_code, reason = "other tests use the rest")]
mod common;
#[path = "../../fabric/tests/common/connect.rs"]
mod connect;
#[path = "../../fabric/tests/common/ranks.rs"]
mod ranks;

use common::{Batch, batches, check_output, run_expert};
use ranks::{AllGather, PATIENCE, on_threads};
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::providers::verbs::{TwinChains, TwinConfig, TwinNic};
use weft_fabric::providers::{VerbsConfig, VerbsDevice};
use weft_fabric::{
    Device, Engine, EngineConfig, Generation, Grant, Memory, Rank, Time, WaitOptions, clock,
};
use weft_moe::routing::Routing;
use weft_moe::{
    AllToAll, Config, DType, Driver, RoundHandle, Rows, RowsMut, SendPlan, Shape, TokenInput,
    Weighting,
};

const RANKS: u32 = 4;
const ROUNDS: u64 = 40;

/// Decode batches with up to 128 tokens, top-8 from 32 experts on four ranks: up to 128 rows for each peer.
fn config() -> Config {
    Config::new(RANKS, 0, 32, 8).sized(128, 32).dtype(DType::BF16)
}

/// All ranks' batches in a round: every kind of routing, including empty and full batches.
fn batches_of(round: u64) -> Vec<Batch> {
    let zipf = Routing::Zipf { exponent: 1.0 };
    let routing = [Some(Routing::Uniform), Some(zipf), Some(Routing::Incast), None];
    batches(&config(), routing[round as usize % 4], round % 3, round)
}

/// Rank in a group over one simulated NIC each.
struct Member {
    engine: Engine,
    moe: AllToAll,
    /// All ranks' NICs.
    nics: Arc<Vec<Arc<TwinNic>>>,
}

impl Member {
    fn join(rank: Rank, nics: &Arc<Vec<Arc<TwinNic>>>, gather: &mut AllGather<'_>) -> Member {
        // No consumption report is due in as many rounds, so credits are the only signals.
        let verbs = VerbsConfig { max_unconsumed: 4096, ..VerbsConfig::default() };
        let device = VerbsDevice::over(verbs, &nics[rank.index()..][..1]).unwrap();
        let devices: [Arc<dyn Device>; 1] = [Arc::new(device)];
        let deadline = soon();
        let joining = EngineConfig::default();
        let mut engine = Engine::new(joining, rank, RANKS, Generation(1), &devices).unwrap();
        connect::connect(&mut engine, gather, deadline).unwrap();
        let shape = Shape::new(Config { rank: rank.0, ..config() }).unwrap();
        let mut driver = Driver::allocate(&mut engine, &shape).unwrap();
        for owner in (0..RANKS).map(Rank) {
            // One owner's grants, a block for each peer.
            let mut grants = Vec::new();
            for peer in (0..RANKS).map(Rank).filter(|_| owner == rank) {
                let grant = (peer != rank).then(|| driver.grant(&mut engine, peer).unwrap());
                let grant = grant.map_or_else(Vec::new, |grant| grant.encode());
                weft_fabric::bytes::put_block(&mut grants, &grant);
            }
            let grants = gather(grants).swap_remove(owner.index());
            if owner != rank {
                let mut reader = weft_fabric::bytes::Reader::new(&grants);
                for _ in 0..rank.0 {
                    reader.block().unwrap();
                }
                let grant = Grant::decode(reader.block().unwrap()).unwrap();
                driver.link(&mut engine, owner, &grant, deadline).unwrap();
            }
        }
        Member { engine, moe: AllToAll::new(driver), nics: nics.clone() }
    }

    /// Chains posted toward each rank so far.
    fn chains(&self) -> Vec<TwinChains> {
        let own = &self.nics[self.engine.rank().index()];
        self.nics.iter().map(|nic| own.chains_toward(nic)).collect()
    }

    /// Runs one half of a round until it ends.
    fn wait<T>(
        &mut self,
        half: impl FnOnce(&AllToAll, &mut Engine, &mut WaitOptions<'_>) -> T,
    ) -> T {
        let (deadline, mut never) = (soon(), || false);
        let mut options = WaitOptions { deadline, spin: Duration::ZERO, interrupted: &mut never };
        half(&self.moe, &mut self.engine, &mut options)
    }

    fn dispatch(&mut self, batch: &Batch) -> RoundHandle {
        let region = self.engine.register(Memory::from_bytes(batch.tokens.clone())).unwrap();
        let input = TokenInput { region: region.key(), memory: region.memory().clone() };
        let Member { engine, moe, .. } = self;
        let weights = batch.weights.as_deref();
        let handle = moe.dispatch_send(engine, input, &batch.ids, weights, None).unwrap();
        self.wait(|moe, engine, options| moe.dispatch_recv(engine, handle, options)).unwrap();
        self.engine.release(&region);
        handle
    }

    /// Outputs from this rank's experts, a row for each position.
    fn run_experts(&mut self, handle: RoundHandle) -> Vec<u8> {
        let Member { engine, moe, .. } = self;
        let outputs = moe.with_received(engine, handle, |received, _| {
            let shape = received.plan.shape();
            let config = shape.config();
            let out = shape.row_bytes(config.combine_dtype);
            let mut token = vec![0; shape.token_bytes()];
            let mut outputs = vec![0; received.plan.positions() * out];
            for (local, expert) in shape.placement().experts_of(config.rank).enumerate() {
                let first = received.plan.expert_offsets()[local] as usize;
                let count = received.plan.expert_counts()[local] as usize;
                for position in first..first + count {
                    let at = received.bytes.start + position * received.stride;
                    received.memory.copy_out(at, &mut token);
                    let output = &mut outputs[position * out..][..out];
                    run_expert(config, expert, 1.0, (&token, &[]), output);
                }
            }
            outputs
        });
        outputs.unwrap()
    }

    /// Returns the combined rows, in the output type.
    fn combine(&mut self, handle: RoundHandle, outputs: &[u8], tokens: usize) -> Vec<u8> {
        let Member { engine, moe, .. } = self;
        let row = moe.shape().row_bytes(config().combine_dtype);
        moe.combine_send(engine, handle, Rows::new(outputs, row, row)).unwrap();
        let row = moe.shape().row_bytes(config().output_dtype);
        let mut combined = vec![0; tokens * row];
        let out = RowsMut::new(&mut combined, row, row);
        self.wait(|moe, engine, options| moe.combine_recv(engine, handle, out, options)).unwrap();
        combined
    }
}

fn soon() -> Time {
    clock::now().after(PATIENCE)
}

/// Data chains from `before` to `after`, by peer.
fn data(before: &[TwinChains], after: &[TwinChains]) -> Vec<u64> {
    before.iter().zip(after).map(|(before, after)| after.data - before.data).collect()
}

/// A dispatch is a header, the private rows and the remainder, a combine the replies: each is one chain where
/// it is not empty, whatever the routing. The round's credit is the only signal.
#[test]
#[cfg_attr(miri, ignore = "the simulated NIC has descriptors")]
fn a_round_posts_three_chains_of_dispatch_one_of_combine_and_one_credit_for_each_peer() {
    let nics = Arc::new((0..RANKS).map(|_| TwinNic::new(TwinConfig::default())).collect());
    on_threads(RANKS, |rank, gather| {
        let mut member = Member::join(rank, &nics, gather);
        let shape = member.moe.shape().clone();
        let private = config().private_rows;
        let peers: Vec<usize> = member.engine.peers().map(Rank::index).collect();
        let mut most = [0, 0];
        gather(Vec::new());
        let connected = member.chains();
        for round in 0..ROUNDS {
            let batches = batches_of(round);
            // Rows between this rank and each other: those that it sends, and those that it receives.
            let rows = |from: u32, to: u32| {
                let sender = Shape::new(Config { rank: from, ..config() }).unwrap();
                let mut plan = SendPlan::new(&sender);
                plan.build(&batches[from as usize].ids, None).unwrap();
                plan.rows_to_rank()[to as usize]
            };
            let batch = &batches[rank.index()];
            let before = member.chains();
            let handle = member.dispatch(batch);
            let dispatched = member.chains();
            let outputs = member.run_experts(handle);
            let tokens = batch.ids.len() / config().top_k as usize;
            let output = member.combine(handle, &outputs, tokens);
            let combined = member.chains();
            member.moe.release(&mut member.engine, handle).unwrap();
            check_output(&shape, batch, Weighting::AtCombine, &output);
            let (of_dispatch, of_combine) =
                (data(&before, &dispatched), data(&dispatched, &combined));
            for &peer in &peers {
                let (sent, received) = (rows(rank.0, peer as u32), rows(peer as u32, rank.0));
                let expected = 1 + u64::from(sent > 0) + u64::from(sent > private);
                assert_eq!(
                    of_dispatch[peer], expected,
                    "round {round}: {sent} rows, {rank} to {peer}"
                );
                assert_eq!(of_combine[peer], u64::from(received > 0), "round {round}: {peer}");
                most = [most[0].max(of_dispatch[peer]), most[1].max(sent.into())];
            }
        }
        // The last round's credit leaves with a poll.
        let deadline = soon();
        let credits = |member: &Member| -> Vec<u64> {
            let chains = member.chains();
            peers.iter().map(|&peer| chains[peer].signals - connected[peer].signals).collect()
        };
        while credits(&member).iter().any(|sent| *sent < ROUNDS) {
            assert!(
                clock::now() < deadline,
                "{rank}: credits to {peers:?}: {:?}",
                credits(&member)
            );
            member.moe.drive(&mut member.engine).unwrap();
        }
        let rows = gather(vec![most[1] as u8]).concat();
        assert_eq!(credits(&member), vec![ROUNDS; peers.len()]);
        // The routings reach the bound, and a full batch for one peer.
        assert_eq!((most[0], rows.iter().max()), (3, Some(&128)), "{rows:?}");
        gather(Vec::new());
    });
}
