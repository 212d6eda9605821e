//! Test ranks in this process: heaps, tables and twins.

use super::super::*;
use super::case::Prepared;
use super::memory::Memory;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use weft_gpu::Watch;
use weft_gpu::table::TABLE_BYTES;

pub(super) struct Rank {
    pub(super) twin: Twin,
    /// Behind a pointer, so that the address stays valid when a rank moves.
    pub(super) watch: Arc<Watch>,
    pub(super) table: Memory,
}

pub(super) struct Group {
    pub(super) layout: Layout,
    pub(super) heaps: Vec<Memory>,
    pub(super) ranks: Vec<Rank>,
}

impl Group {
    pub(super) fn new(ranks: u32, blocks: u32) -> Group {
        let layout = Layout::new(ranks, blocks);
        let heaps: Vec<Memory> = (0..ranks).map(|_| Memory::new(layout.bytes as usize)).collect();
        let peers: Vec<u64> = heaps.iter().map(|heap| heap.address).collect();
        let rank = |rank| {
            let (watch, table) = (Arc::new(Watch::on_host()), Memory::new(TABLE_BYTES as usize));
            let (record, abort) = (watch.record_address(), watch.abort_address());
            // SAFETY: memory and watch live as long as the group.
            let twin =
                unsafe { Twin::new(layout, rank, peers.clone(), table.address, record, abort) };
            twin.watch.set_limit(Duration::from_secs(60));
            Rank { twin, watch, table }
        };
        Group { layout, ranks: (0..ranks).map(rank).collect(), heaps }
    }

    pub(super) fn set_limit(&self, limit: Duration) {
        self.ranks.iter().for_each(|rank| rank.twin.watch.set_limit(limit));
    }

    /// State as after that many calls: epochs and sequence numbers, with the sequence flags.
    pub(super) fn set_state(&self, epoch: u32, sequence: u32) {
        let layout = self.layout;
        for heap in &self.heaps {
            let set = |at: u64, value| heap.raw().word(at).store(value, Relaxed);
            for block in 0..layout.blocks {
                set(layout.epoch(block), epoch);
                set(layout.meeting(block), sequence);
                for peer in 0..layout.ranks {
                    let signal = heap.raw().packet(layout.signal(block, peer));
                    signal.store(u64::from(sequence) << 32, Relaxed);
                }
                for (ring, peer) in
                    (0..2).flat_map(|ring| (0..layout.ranks).map(move |peer| (ring, peer)))
                {
                    set(layout.sequence(ring, block, peer), sequence);
                    set(layout.flag(ring, block, peer), sequence);
                }
            }
        }
    }

    /// Runs the calls on the named ranks, each a thread.
    pub(super) fn run(&self, calls: &[Prepared], ranks: &[u32]) {
        thread::scope(|scope| {
            for rank in ranks.iter().map(|rank| *rank as usize) {
                scope.spawn(move || {
                    calls.iter().for_each(|call| call.run(&self.ranks[rank].twin, rank))
                });
            }
        });
    }
}
