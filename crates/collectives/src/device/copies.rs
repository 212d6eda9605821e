//! Copies in a copy-engine call, and the streams that run them side by side.
//!
//! The copies to peers follow the entry, on the call's stream and on side streams; the exit follows them all. The copy
//! for a rank's own part needs no entry: it runs on a separate side stream. Streams that were part of a capture belong
//! to it until it ends, so that eager calls have others.

use super::error::DeviceError;
use super::plan::LaunchPlan;
use std::sync::{Arc, Mutex, PoisonError};
use weft_cuda::{Context, Event, OwnedStream, RelaxedCapture, Stream, copy_async, stream_wait};

/// Maximum streams for copies to peers.
const MAX_LANES: usize = 4;
/// Legacy default stream: between two devices in a process, its copies wait for all earlier work on both, which may be
/// kernels that wait for this copy.
const DEFAULT_STREAM: Stream = Stream(0);

/// Copy into a rank's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copy {
    from: u64,
    to: u64,
    bytes: u64,
}

/// Copies for a rank's call, without empty and in-place ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Copies {
    /// To this rank's own output.
    own: Option<Copy>,
    /// To the peers, those behind this rank first.
    peers: Vec<Copy>,
}

impl Copies {
    /// Copies in the plan for `rank` with this input and output; `outputs`: on all ranks, as mapped here.
    pub fn new(plan: &LaunchPlan, rank: u32, input: u64, output: u64, outputs: &[u64]) -> Copies {
        let (messages, ranks) = (&plan.messages, plan.messages.len());
        // Of all operations that have a direct form, this place is the same at all ranks.
        let at = messages[rank as usize].receive_at;
        let copy = |peer: usize, output: u64| {
            let message = &messages[peer];
            let (from, to) = (input + message.send_at, output + at);
            let bytes = message.send_bytes;
            (bytes > 0 && from != to).then_some(Copy { from, to, bytes })
        };
        let peers = (1..ranks).map(|step| (rank as usize + step) % ranks);
        let peers = peers.filter_map(|peer| copy(peer, outputs[peer])).collect();
        Copies { own: copy(rank as usize, output), peers }
    }
}

/// Side stream, with an event after its last copy.
struct Lane {
    stream: OwnedStream,
    copied: Event,
}

/// Side streams for a rank's calls.
struct Lanes {
    begun: Event,
    entered: Event,
    own: Lane,
    peers: Vec<Lane>,
}

impl Lanes {
    fn new(context: &Arc<Context>, ranks: u32) -> Result<Lanes, DeviceError> {
        let event = || Event::new(context);
        let lane = || -> Result<Lane, DeviceError> {
            Ok(Lane { stream: Stream::create(context)?, copied: event()? })
        };
        let sides = (ranks as usize).saturating_sub(1).min(MAX_LANES);
        let peers = (0..sides).map(|_| lane()).collect::<Result<_, _>>()?;
        Ok(Lanes { begun: event()?, entered: event()?, own: lane()?, peers })
    }
}

/// Streams for a rank's copies, made at the first copy-engine call.
pub(super) struct CopyStreams {
    context: Arc<Context>,
    ranks: u32,
    /// For eager calls, and for captured ones.
    lanes: Mutex<Option<[Lanes; 2]>>,
}

impl CopyStreams {
    /// Streams for a rank in a group of `ranks` ranks.
    pub fn new(context: Arc<Context>, ranks: u32) -> CopyStreams {
        CopyStreams { context, ranks, lanes: Mutex::default() }
    }

    /// Puts `entry`, the copies and `exit` on a call's stream; the copies run side by side.
    ///
    /// # Errors
    /// CUDA errors, and errors from `entry` and `exit`.
    pub fn run(
        &self,
        copies: &Copies,
        stream: Stream,
        captured: bool,
        entry: impl FnOnce() -> Result<(), DeviceError>,
        exit: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let mut known = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let [eager, in_capture] = match &mut *known {
            Some(lanes) => lanes,
            none => {
                let _relaxed = RelaxedCapture::new()?;
                let lanes = || Lanes::new(&self.context, self.ranks);
                none.insert([lanes()?, lanes()?])
            }
        };
        let lanes = if captured { in_capture } else { eager };
        let _bound = self.context.enter()?;
        if let Some(own) = &copies.own {
            lanes.begun.record(stream)?;
            stream_wait(lanes.own.stream.stream(), &lanes.begun)?;
            start(own, lanes.own.stream.stream())?;
            lanes.own.copied.record(lanes.own.stream.stream())?;
        }
        entry()?;
        // The call's own stream takes copies too, if it may.
        let here = (stream != DEFAULT_STREAM).then_some(stream);
        let needed = copies.peers.len().min(lanes.peers.len());
        let sides = &lanes.peers[..needed.saturating_sub(usize::from(here.is_some()))];
        if !sides.is_empty() {
            lanes.entered.record(stream)?;
        }
        for side in sides {
            stream_wait(side.stream.stream(), &lanes.entered)?;
        }
        let streams = sides.iter().map(|side| side.stream.stream());
        let streams: Vec<Stream> = here.into_iter().chain(streams).collect();
        for (copy, on) in copies.peers.iter().zip(streams.iter().cycle()) {
            start(copy, *on)?;
        }
        for side in sides {
            side.copied.record(side.stream.stream())?;
            stream_wait(stream, &side.copied)?;
        }
        if copies.own.is_some() {
            stream_wait(stream, &lanes.own.copied)?;
        }
        exit()
    }
}

fn start(copy: &Copy, stream: Stream) -> Result<(), DeviceError> {
    Ok(copy_async(copy.to, copy.from, copy.bytes as usize, stream)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::layout::Layout;
    use crate::device::message::DeviceOperation;
    use crate::device::plan::{CallOptions, DeviceAlgorithm};

    fn copies(operation: &DeviceOperation, rank: u32, input: u64, output: u64) -> Copies {
        let algorithm = Some(DeviceAlgorithm::CopyEngine);
        let options = CallOptions { algorithm, ..CallOptions::default() };
        let layout = Layout::new(3, 1);
        let plan = LaunchPlan::new(operation, 2, rank, &layout, options, true).unwrap();
        Copies::new(&plan, rank, input, output, &[1000, 2000, 3000])
    }

    fn copy(from: u64, to: u64, bytes: u64) -> Copy {
        Copy { from, to, bytes }
    }

    #[test]
    fn messages_go_to_the_place_of_this_rank_at_each_peer() {
        let found = copies(&DeviceOperation::AllGather { count: 5 }, 1, 70, 2000);
        let peers = vec![copy(70, 3010, 10), copy(70, 1010, 10)];
        assert_eq!(found, Copies { own: Some(copy(70, 2010, 10)), peers });
        let found = copies(&DeviceOperation::AllToAll { count: 5 }, 2, 70, 3000);
        let peers = vec![copy(70, 1020, 10), copy(80, 2020, 10)];
        assert_eq!(found, Copies { own: Some(copy(90, 3020, 10)), peers });
    }

    #[test]
    fn parts_in_place_and_ranks_without_a_message_have_no_copy() {
        let found = copies(&DeviceOperation::AllGather { count: 5 }, 0, 1000, 1000);
        assert_eq!((found.own, found.peers.len()), (None, 2));
        let broadcast = DeviceOperation::Broadcast { count: 5, root: 1 };
        let found = copies(&broadcast, 1, 2000, 2000);
        let peers = vec![copy(2000, 3000, 10), copy(2000, 1000, 10)];
        assert_eq!(found, Copies { own: None, peers });
        assert_eq!(copies(&broadcast, 0, 1000, 1000), Copies::default());
        let scatter = DeviceOperation::Scatter { count: 5, root: 0 };
        let found = copies(&scatter, 0, 70, 1000);
        let peers = vec![copy(80, 2000, 10), copy(90, 3000, 10)];
        assert_eq!(found, Copies { own: Some(copy(70, 1000, 10)), peers });
    }
}
