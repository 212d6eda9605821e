//! Symmetric heap layout for device collectives: state, flags, packets and rings for each block, and for each send and
//! receive lane.

/// Minimum chunks per source in a ring.
const MIN_RING_CHUNKS: u32 = 8;
/// Unit size in bytes; a thread handles one unit at a time.
pub(super) const UNIT: u64 = 16;
/// Size in bytes when a unit travels as two packets.
pub(super) const PACKETS_BYTES: u64 = 32;
/// Ring count per block: contributions and results.
pub(super) const RINGS: u32 = 2;

/// Maximum units that a block receives by packets in a call, summed over all sources.
const UNITS_OF_ALL: u32 = 2048;
/// Ring bytes per block, summed over all sources.
const RING_BYTES: u32 = 512 << 10;
/// Maximum chunk size in bytes, for few and for many ranks; stages in shared memory have this size.
const CHUNK_OF_FEW: u32 = 16 << 10;
const CHUNK_OF_MANY: u32 = 8 << 10;
const FEW_RANKS: u32 = 4;
/// Maximum send and receive lanes per ordered rank pair.
const MAX_LANES: u32 = 16;
/// Lane ring bytes per source for few, more and many ranks.
const LANE_BYTES_OF_FEW: u32 = 128 << 10;
const LANE_BYTES_OF_MORE: u32 = 64 << 10;
const LANE_BYTES_OF_MANY: u32 = 32 << 10;
const MORE_RANKS: u32 = 8;
/// Area alignment.
const ALIGNMENT: u64 = 128;

/// Sizes and offsets, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Rank count.
    pub ranks: u32,
    /// Block count in the largest grid.
    pub blocks: u32,
    /// Units per source that a block receives by packets in a call.
    pub slots: u32,
    /// Longest chunk, in bytes.
    pub chunk_capacity: u32,
    /// Chunks per source in a ring: a power of two, so that places continue where sequence numbers wrap around.
    pub ring_chunks: u32,
    /// Flag words per block and ring.
    pub flag_words: u32,
    /// Offset to the word that is nonzero after `close`.
    pub closed: u64,
    /// Offset to the epochs, by block.
    pub epochs: u64,
    /// Offset to the sequence numbers, by ring, block and peer.
    pub sequences: u64,
    /// Offset to the flags, by ring, block and source.
    pub flags: u64,
    /// Offset to the meeting numbers, by block.
    pub meetings: u64,
    /// Offset to the 8-byte meeting signals, by block and source.
    pub signals: u64,
    /// Offset to the packets, by block, epoch parity, source and slot.
    pub packets: u64,
    /// Offset to the rings, by ring, block and source.
    pub rings: u64,
    /// Send and receive lanes per ordered rank pair.
    pub lanes: u32,
    /// Chunks per source in a lane ring: a power of two, like `ring_chunks`.
    pub lane_chunks: u32,
    /// Offset to the counts of chunks that this rank has sent and received, by direction, lane and peer.
    pub transferred: u64,
    /// Offset to the chunk arrival flags, by lane and source.
    pub arrivals: u64,
    /// Offset to the credits (chunks that a peer has consumed), by lane and peer.
    pub credits: u64,
    /// Offset to the headers (message bytes in each chunk), by lane, source and place.
    pub headers: u64,
    /// Offset to the lane rings, by lane and source.
    pub lane_rings: u64,
    /// Total length.
    pub bytes: u64,
}

impl Layout {
    /// Layout for grids of at most `blocks` blocks on each of `ranks` ranks; both are at least 1.
    pub fn new(ranks: u32, blocks: u32) -> Layout {
        let peers = (ranks - 1).max(1);
        let slots = (UNITS_OF_ALL / peers).max(1);
        let chunk_capacity = if ranks <= FEW_RANKS { CHUNK_OF_FEW } else { CHUNK_OF_MANY };
        let ring_chunks = (RING_BYTES / peers / chunk_capacity).max(MIN_RING_CHUNKS);
        let ring_chunks = (ring_chunks / 2 + 1).next_power_of_two();
        let flag_words = ranks.next_multiple_of(ALIGNMENT as u32 / 4);
        let (ranks_each, blocks_each) = (u64::from(ranks), u64::from(blocks));
        let mut end = 0u64;
        let mut area = |bytes: u64| {
            let at = end;
            end = (at + bytes).next_multiple_of(ALIGNMENT);
            at
        };
        let closed = area(4);
        let epochs = area(4 * blocks_each);
        let sequences = area(4 * u64::from(RINGS) * blocks_each * ranks_each);
        let flags = area(4 * u64::from(RINGS) * blocks_each * u64::from(flag_words));
        let meetings = area(4 * blocks_each);
        let signals = area(8 * blocks_each * u64::from(flag_words));
        let packets = area(blocks_each * 2 * ranks_each * (u64::from(slots) + 1) * PACKETS_BYTES);
        let ring = blocks_each * ranks_each * u64::from(ring_chunks) * u64::from(chunk_capacity);
        let rings = area(u64::from(RINGS) * ring);
        let lanes = blocks.min(MAX_LANES);
        let lane_bytes = match ranks {
            _ if ranks <= FEW_RANKS => LANE_BYTES_OF_FEW,
            _ if ranks <= MORE_RANKS => LANE_BYTES_OF_MORE,
            _ => LANE_BYTES_OF_MANY,
        };
        let lane_chunks = lane_bytes / chunk_capacity;
        let lanes_each = u64::from(lanes);
        let transferred = area(4 * 2 * lanes_each * ranks_each);
        let arrivals = area(4 * lanes_each * u64::from(flag_words));
        let credits = area(4 * lanes_each * u64::from(flag_words));
        let places = lanes_each * ranks_each * u64::from(lane_chunks);
        let headers = area(8 * places);
        let lane_rings = area(places * u64::from(chunk_capacity));
        Layout {
            ranks,
            blocks,
            slots,
            chunk_capacity,
            ring_chunks,
            flag_words,
            closed,
            epochs,
            sequences,
            flags,
            meetings,
            signals,
            packets,
            rings,
            lanes,
            lane_chunks,
            transferred,
            arrivals,
            credits,
            headers,
            lane_rings,
            bytes: end,
        }
    }

    /// Kernel macros.
    pub(super) fn defines(&self, first_phase: u32, first_code: u32) -> Vec<(String, String)> {
        let of = |name: &str, value: u64| (format!("WEFT_{name}"), value.to_string());
        vec![
            of("RANKS", self.ranks.into()),
            of("BLOCKS", self.blocks.into()),
            of("SLOTS", self.slots.into()),
            of("RING_CHUNKS", self.ring_chunks.into()),
            of("CHUNK_CAPACITY", self.chunk_capacity.into()),
            of("FLAG_WORDS", self.flag_words.into()),
            of("FIRST_PHASE", first_phase.into()),
            of("FIRST_CODE", first_code.into()),
            of("AT_CLOSED", self.closed),
            of("AT_EPOCHS", self.epochs),
            of("AT_SEQUENCES", self.sequences),
            of("AT_FLAGS", self.flags),
            of("AT_MEETINGS", self.meetings),
            of("AT_SIGNALS", self.signals),
            of("AT_PACKETS", self.packets),
            of("AT_RINGS", self.rings),
            of("LANES", self.lanes.into()),
            of("LANE_CHUNKS", self.lane_chunks.into()),
            of("AT_TRANSFERRED", self.transferred),
            of("AT_ARRIVALS", self.arrivals),
            of("AT_CREDITS", self.credits),
            of("AT_HEADERS", self.headers),
            of("AT_LANE_RINGS", self.lane_rings),
        ]
    }

    /// Offset to a block's epoch.
    pub(super) fn epoch(&self, block: u32) -> u64 {
        self.epochs + 4 * u64::from(block)
    }

    /// Offset to the sequence number for a block and a peer.
    pub(super) fn sequence(&self, ring: u32, block: u32, peer: u32) -> u64 {
        let row = u64::from(ring * self.blocks + block);
        self.sequences + 4 * (row * u64::from(self.ranks) + u64::from(peer))
    }

    /// Offset to a source's flag.
    pub(super) fn flag(&self, ring: u32, block: u32, source: u32) -> u64 {
        let row = u64::from(ring * self.blocks + block);
        self.flags + 4 * (row * u64::from(self.flag_words) + u64::from(source))
    }

    /// Offset to a block's meeting number.
    pub(super) fn meeting(&self, block: u32) -> u64 {
        self.meetings + 4 * u64::from(block)
    }

    /// Offset to a source's signal.
    pub(super) fn signal(&self, block: u32, source: u32) -> u64 {
        let row = u64::from(block) * u64::from(self.flag_words);
        self.signals + 8 * (row + u64::from(source))
    }

    /// Offset to a unit; slot [`Layout::slots`] is the credit.
    pub(super) fn unit(&self, block: u32, source: u32, epoch: u32, slot: u32) -> u64 {
        let row = u64::from((block * 2 + (epoch & 1)) * self.ranks + source);
        self.packets + (row * (u64::from(self.slots) + 1) + u64::from(slot)) * PACKETS_BYTES
    }

    /// Offset to a chunk.
    pub(super) fn chunk(&self, ring: u32, block: u32, source: u32, sequence: u32) -> u64 {
        let row = u64::from(ring * self.blocks + block) * u64::from(self.ranks) + u64::from(source);
        let place = row * u64::from(self.ring_chunks) + u64::from(sequence % self.ring_chunks);
        self.rings + place * u64::from(self.chunk_capacity)
    }

    /// Offset to the count of chunks sent to (`receives`: received from) a peer in a lane.
    pub(super) fn transferred(&self, receives: bool, lane: u32, peer: u32) -> u64 {
        let row = u64::from(u32::from(receives) * self.lanes + lane);
        self.transferred + 4 * (row * u64::from(self.ranks) + u64::from(peer))
    }

    /// Offset to the flag that counts chunks from a source in a lane.
    pub(super) fn arrival(&self, lane: u32, source: u32) -> u64 {
        self.arrivals + 4 * (u64::from(lane) * u64::from(self.flag_words) + u64::from(source))
    }

    /// Offset to the credit: lane chunks that a peer has consumed.
    pub(super) fn credit(&self, lane: u32, peer: u32) -> u64 {
        self.credits + 4 * (u64::from(lane) * u64::from(self.flag_words) + u64::from(peer))
    }

    fn lane_place(&self, lane: u32, source: u32, sequence: u32) -> u64 {
        let row = u64::from(lane * self.ranks + source);
        row * u64::from(self.lane_chunks) + u64::from(sequence % self.lane_chunks)
    }

    /// Offset to a lane chunk's header.
    pub(super) fn header(&self, lane: u32, source: u32, sequence: u32) -> u64 {
        self.headers + 8 * self.lane_place(lane, source, sequence)
    }

    /// Offset to a lane chunk.
    pub(super) fn lane_chunk(&self, lane: u32, source: u32, sequence: u32) -> u64 {
        let place = self.lane_place(lane, source, sequence);
        self.lane_rings + place * u64::from(self.chunk_capacity)
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::DeviceConfig;
    use super::*;

    #[test]
    fn areas_are_disjoint_and_hold_their_last_elements() {
        for (ranks, blocks) in [(1, 1), (2, 32), (3, 7), (8, 32), (64, 16)] {
            let layout = Layout::new(ranks, blocks);
            let (block, rank) = (blocks - 1, ranks - 1);
            let ends = [
                (layout.epoch(block) + 4, layout.sequences),
                (layout.sequence(1, block, rank) + 4, layout.flags),
                (layout.flag(1, block, rank) + 4, layout.meetings),
                (layout.meeting(block) + 4, layout.signals),
                (layout.signal(block, rank) + 8, layout.packets),
                (layout.unit(block, rank, 1, layout.slots) + PACKETS_BYTES, layout.rings),
                (
                    layout.chunk(1, block, rank, layout.ring_chunks - 1)
                        + u64::from(layout.chunk_capacity),
                    layout.transferred,
                ),
                (layout.transferred(true, layout.lanes - 1, rank) + 4, layout.arrivals),
                (layout.arrival(layout.lanes - 1, rank) + 4, layout.credits),
                (layout.credit(layout.lanes - 1, rank) + 4, layout.headers),
                (
                    layout.header(layout.lanes - 1, rank, layout.lane_chunks - 1) + 8,
                    layout.lane_rings,
                ),
                (
                    layout.lane_chunk(layout.lanes - 1, rank, layout.lane_chunks - 1)
                        + u64::from(layout.chunk_capacity),
                    layout.bytes,
                ),
            ];
            for (end, limit) in ends {
                assert!(end <= limit, "{ranks} ranks, {blocks} blocks: {end} > {limit}");
            }
            assert!(layout.closed + 4 <= layout.epochs);
            assert!(layout.chunk_capacity.is_multiple_of(16));
            assert!(layout.ring_chunks.is_power_of_two() && layout.ring_chunks >= MIN_RING_CHUNKS);
            assert!(layout.lane_chunks.is_power_of_two() && layout.lane_chunks >= 4);
        }
    }

    #[test]
    fn memory_of_up_to_sixteen_ranks_is_less_than_120_mib() {
        for ranks in 2..=16 {
            let blocks = DeviceConfig::usual_sms(ranks);
            let bytes = Layout::new(ranks, blocks).bytes;
            assert!(bytes < 120 << 20, "{ranks} ranks: {bytes}");
            assert!(Layout::new(ranks, 32).bytes < 80 << 20, "{ranks} ranks: {bytes}");
        }
    }
}
