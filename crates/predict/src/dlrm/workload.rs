//! Recommendation model workload: the iteration's state machine.

use weft_topology::EndpointId;

use super::job::DlrmJob;
use crate::cluster::Cluster;
use crate::error::Error;
use crate::trace::Span;
use crate::workload::Workload;
use crate::world::{Path, World};

/// One iteration on all ranks.
pub struct DlrmWorkload {
    job: DlrmJob,
    fused: bool,
    ranks: Vec<DlrmRank>,
    /// Each rank's endpoint.
    endpoints: Vec<EndpointId>,
    paths: Vec<Path>,
    left: u32,
    /// Longest time on a rank from the end of pooling to the last vector.
    pub(super) exchange_s: f64,
    finished: Option<f64>,
}

#[derive(Clone, Debug, Default)]
struct DlrmRank {
    slow: f64,
    late_s: f64,
    sliced: u32,
    vectors: u32,
    gradients: u32,
    bottom_done: bool,
    bottom_back_done: bool,
    pooled_at: f64,
    /// Time when the top MLP begins.
    top_at: Option<f64>,
    updating: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DlrmEvent {
    Begin,
    /// A slice has been pooled.
    Slice,
    /// Pooling and bottom MLP have ended.
    Bottom,
    /// The top MLP's forward and backward passes have ended.
    Top,
    /// The bottom MLP's backward pass has ended.
    BottomBack,
    Updated,
    /// Vectors or gradients have arrived.
    Vectors,
    Gradients,
}

const EVENTS: [DlrmEvent; 8] = [
    DlrmEvent::Begin,
    DlrmEvent::Slice,
    DlrmEvent::Bottom,
    DlrmEvent::Top,
    DlrmEvent::BottomBack,
    DlrmEvent::Updated,
    DlrmEvent::Vectors,
    DlrmEvent::Gradients,
];

const SIDE_BITS: u32 = 16;

impl DlrmWorkload {
    /// Workload for one iteration.
    pub fn new(
        world: &mut World,
        job: &DlrmJob,
        cluster: &Cluster,
        fused: bool,
    ) -> Result<DlrmWorkload, Error> {
        job.check()?;
        let endpoints = world.places(job.ranks)?;
        let mut ranks = vec![DlrmRank { slow: 1.0, ..DlrmRank::default() }; job.ranks as usize];
        for straggler in &cluster.stragglers {
            // Stragglers beyond this job's ranks are ignored.
            if let Some(rank) = ranks.get_mut(straggler.rank as usize) {
                (rank.slow, rank.late_s) = (straggler.slow, straggler.late_s);
            }
        }
        let mut paths = vec![world.private_path(&[], 0.0)?; (job.ranks * job.ranks) as usize];
        for from in 0..job.ranks {
            let source = endpoints[from as usize];
            world.attach(source);
            for to in (0..job.ranks).filter(|to| *to != from) {
                let at = from * job.ranks + to;
                paths[at as usize] = world.path(source, endpoints[to as usize], at.into())?;
            }
        }
        Ok(DlrmWorkload {
            fused,
            ranks,
            endpoints,
            paths,
            left: job.ranks,
            exchange_s: 0.0,
            finished: None,
            job: job.clone(),
        })
    }

    fn tag(kind: DlrmEvent, from: u32, to: u32) -> u64 {
        (u64::from(kind as u8) << SIDE_BITS | u64::from(from)) << SIDE_BITS | u64::from(to)
    }

    fn after(
        &self,
        world: &mut World,
        rank: u32,
        kind: DlrmEvent,
        seconds: f64,
    ) -> Result<(), Error> {
        let slow = self.ranks[rank as usize].slow;
        world.timer(seconds * slow, DlrmWorkload::tag(kind, rank, rank))
    }

    fn write(
        &self,
        world: &mut World,
        kind: DlrmEvent,
        from: u32,
        to: u32,
        bytes: u64,
    ) -> Result<(), Error> {
        let now = world.now();
        let post_s = world.constants().post_s * self.ranks[from as usize].slow;
        let posted = world.post(self.endpoints[from as usize], now, post_s);
        let path = self.paths[(from * self.job.ranks + to) as usize];
        let delay = posted - now + path.latency_s;
        world.start_flow(path, bytes, delay, DlrmWorkload::tag(kind, from, to))
    }

    /// Slice count on a rank, its own included.
    fn slices(&self) -> u32 {
        self.job.ranks * self.job.slices_per_peer
    }

    /// Slice destination: peers in rotated order, the rank itself last.
    fn owner_of_slice(&self, rank: u32, slice: u32) -> u32 {
        (rank + 1 + slice % self.job.ranks) % self.job.ranks
    }

    fn pool(&mut self, world: &mut World, rank: u32) -> Result<(), Error> {
        let launch_s = world.constants().launch_s;
        let pooling_s = self.job.pooling_s();
        if self.fused {
            return self.next_slice(world, rank, launch_s);
        }
        self.after(world, rank, DlrmEvent::Slice, launch_s + pooling_s)
    }

    fn next_slice(&mut self, world: &mut World, rank: u32, launch_s: f64) -> Result<(), Error> {
        let slice_s =
            self.job.pooling_s() * (1.0 + self.job.fused_overhead) / f64::from(self.slices());
        self.after(world, rank, DlrmEvent::Slice, launch_s + slice_s)
    }

    /// Sends the pooled slice, or all vectors.
    fn sliced(&mut self, world: &mut World, rank: u32) -> Result<(), Error> {
        let (ranks, per_peer) = (self.job.ranks, u64::from(self.job.slices_per_peer));
        if !self.fused {
            self.ranks[rank as usize].sliced = self.slices();
            for step in 1..ranks {
                let peer = (rank + step) % ranks;
                self.write(world, DlrmEvent::Vectors, rank, peer, self.job.bytes_for_peer())?;
            }
            return self.pooled(world, rank);
        }
        let slice = self.ranks[rank as usize].sliced;
        self.ranks[rank as usize].sliced += 1;
        let owner = self.owner_of_slice(rank, slice);
        if owner != rank {
            let (all, turn) = (self.job.bytes_for_peer(), u64::from(slice / ranks));
            let bytes = all * (turn + 1) / per_peer - all * turn / per_peer;
            self.write(world, DlrmEvent::Vectors, rank, owner, bytes)?;
        }
        if slice + 1 < self.slices() {
            return self.next_slice(world, rank, 0.0);
        }
        self.pooled(world, rank)
    }

    fn pooled(&mut self, world: &mut World, rank: u32) -> Result<(), Error> {
        self.ranks[rank as usize].pooled_at = world.now();
        self.span(world, rank, "pooling", self.ranks[rank as usize].late_s);
        let bottom_s = self.job.mlp_s(self.job.bottom_flops);
        self.after(world, rank, DlrmEvent::Bottom, bottom_s)
    }

    /// Begins the top MLP after the bottom MLP and the last vector.
    fn begin_top(&mut self, world: &mut World, rank: u32) -> Result<(), Error> {
        let slices = if self.fused { self.job.slices_per_peer } else { 1 };
        let expected = (self.job.ranks - 1) * slices;
        let state = &mut self.ranks[rank as usize];
        if !state.bottom_done || state.vectors < expected || state.top_at.is_some() {
            return Ok(());
        }
        state.top_at = Some(world.now());
        let wait_s = world.constants().wait_s;
        self.span(world, rank, "exchange", self.ranks[rank as usize].pooled_at);
        // A backward pass takes twice as long as the forward pass.
        let passes = if self.job.training { 3.0 } else { 1.0 };
        let top_s = self.job.mlp_s(self.job.top_flops) * passes;
        self.after(world, rank, DlrmEvent::Top, wait_s + top_s)
    }

    fn top_ended(&mut self, world: &mut World, rank: u32) -> Result<(), Error> {
        self.span(world, rank, "top MLP", self.ranks[rank as usize].top_at.unwrap_or(0.0));
        if !self.job.training {
            return self.ended(world);
        }
        for step in 1..self.job.ranks {
            let peer = (rank + step) % self.job.ranks;
            self.write(world, DlrmEvent::Gradients, rank, peer, self.job.bytes_for_peer())?;
        }
        let back_s = 2.0 * self.job.mlp_s(self.job.bottom_flops);
        self.after(world, rank, DlrmEvent::BottomBack, back_s)
    }

    fn begin_update(&mut self, world: &mut World, rank: u32) -> Result<(), Error> {
        let expected = self.job.ranks - 1;
        let state = &mut self.ranks[rank as usize];
        if !state.bottom_back_done || state.gradients < expected || state.updating {
            return Ok(());
        }
        state.updating = true;
        let wait_s = world.constants().wait_s;
        let update_s = self.job.pooling_s() * self.job.update_passes;
        self.after(world, rank, DlrmEvent::Updated, wait_s + update_s)
    }

    fn ended(&mut self, world: &mut World) -> Result<(), Error> {
        self.left -= 1;
        if self.left == 0 {
            self.finished = Some(world.now());
        }
        Ok(())
    }

    fn span(&self, world: &mut World, rank: u32, name: &str, begin_s: f64) {
        if world.traced() {
            let (end_s, name) = (world.now(), name.to_owned());
            world.span(Span { job: 0, rank, row: "phases", name, begin_s, end_s, bytes: 0 });
        }
    }
}

impl Workload for DlrmWorkload {
    fn start(&mut self, world: &mut World) -> Result<(), Error> {
        for rank in 0..self.job.ranks {
            let late_s = self.ranks[rank as usize].late_s;
            world.timer(late_s, DlrmWorkload::tag(DlrmEvent::Begin, rank, rank))?;
        }
        Ok(())
    }

    fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error> {
        let rank = (tag & ((1 << SIDE_BITS) - 1)) as u32;
        match EVENTS[(tag >> (2 * SIDE_BITS)) as usize] {
            DlrmEvent::Begin => self.pool(world, rank),
            DlrmEvent::Slice => self.sliced(world, rank),
            DlrmEvent::Bottom => {
                self.ranks[rank as usize].bottom_done = true;
                self.begin_top(world, rank)
            }
            DlrmEvent::Vectors => {
                self.ranks[rank as usize].vectors += 1;
                let since = world.now() - self.ranks[rank as usize].pooled_at;
                if self.ranks[rank as usize].pooled_at > 0.0 {
                    self.exchange_s = self.exchange_s.max(since);
                }
                self.begin_top(world, rank)
            }
            DlrmEvent::Top => self.top_ended(world, rank),
            DlrmEvent::BottomBack => {
                self.ranks[rank as usize].bottom_back_done = true;
                self.begin_update(world, rank)
            }
            DlrmEvent::Gradients => {
                self.ranks[rank as usize].gradients += 1;
                self.begin_update(world, rank)
            }
            DlrmEvent::Updated => self.ended(world),
        }
    }

    fn finished(&self) -> Option<f64> {
        self.finished
    }

    fn deadlock(&self) -> Error {
        let behind = self.ranks.iter().position(|rank| rank.top_at.is_none()).unwrap_or(0);
        Error::Blocked { what: "the recommendation model", rank: behind as u32, round: 0 }
    }

    fn flow_name(&self, tag: u64) -> String {
        let side = |bits: u64| bits & ((1 << SIDE_BITS) - 1);
        format!("rank {} to rank {}", side(tag >> SIDE_BITS), side(tag))
    }

    fn progress(&self) -> f64 {
        1.0 - f64::from(self.left) / f64::from(self.job.ranks)
    }
}
