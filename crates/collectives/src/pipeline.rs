//! Pipeline: interleaved operations from several overlapping chunk streams, by random access.

/// Streams with `chunks` items each: item `c` in a stream takes a fixed number of operations at time `start + c`.
/// Operations are ordered by time, and at one time by stream.
#[derive(Clone, Debug)]
pub(crate) struct Pipeline<const STREAMS: usize> {
    /// Start time and operations for each item.
    streams: [(u32, u32); STREAMS],
    chunks: u32,
    /// Maximal intervals with the same active streams, in order. The last one marks the end.
    segments: Vec<Segment>,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    /// First operation.
    operation: u32,
    time: u32,
    /// Operations at each time.
    each: u32,
}

impl<const STREAMS: usize> Pipeline<STREAMS> {
    /// Stream pipeline, given by start time and operations for each item.
    pub(crate) fn new(streams: [(u32, u32); STREAMS], chunks: u32) -> Pipeline<STREAMS> {
        let mut times: Vec<u32> =
            streams.iter().flat_map(|&(start, _)| [start, start + chunks]).collect();
        times.sort_unstable();
        times.dedup();
        let mut operation = 0;
        let mut segments = Vec::new();
        for (i, &time) in times.iter().enumerate() {
            let active = |&&(start, _): &&(u32, u32)| (start..start + chunks).contains(&time);
            let each = streams.iter().filter(active).map(|&(_, operations)| operations).sum();
            if each > 0 {
                segments.push(Segment { operation, time, each });
                operation += each * (times[i + 1] - time);
            }
        }
        segments.push(Segment { operation, time: u32::MAX, each: 1 });
        Pipeline { streams, chunks, segments }
    }

    /// Operation count.
    pub(crate) fn len(&self) -> u32 {
        self.segments[self.segments.len() - 1].operation
    }

    /// A stream's start time.
    pub(crate) fn start(&self, stream: usize) -> u32 {
        self.streams[stream].0
    }

    /// An operation's stream and item, and its index among the item's operations.
    pub(crate) fn item(&self, index: u32) -> (usize, u32, u32) {
        // At most two segments for each stream.
        let after = self.segments.iter().take_while(|segment| segment.operation <= index).count();
        let segment = self.segments[after - 1];
        let inside = index - segment.operation;
        let time = segment.time + inside / segment.each;
        let mut part = inside % segment.each;
        for (stream, &(start, operations)) in self.streams.iter().enumerate() {
            if !(start..start + self.chunks).contains(&time) {
                continue;
            }
            if part < operations {
                return (stream, time - start, part);
            }
            part -= operations;
        }
        unreachable!("a segment's operations are those of its streams")
    }
}
