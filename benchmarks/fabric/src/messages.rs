//! Tagged messages between two ranks: half a round trip by size, and the rate for a stream of long
//! messages, beside a copy with the same bytes within one process.

use crate::group::{PATIENCE, join, on_processes, pin, waiting};
use crate::statistics::percentile;
use crate::{Outcome, Path, table};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use weft_collectives::messages::{Messages, MessagesConfig};
use weft_fabric::{Communicator, Rank, clock};

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Path between the ranks
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Slots per ring
    #[arg(long, default_value_t = MessagesConfig::default().slots)]
    slots: u32,
    /// Bytes per slot
    #[arg(long, default_value_t = MessagesConfig::default().slot_bytes)]
    slot_bytes: u64,
    /// Round trips per size
    #[arg(long, default_value_t = 20_000)]
    round_trips: usize,
    /// Bytes per message in the stream
    #[arg(long, default_value_t = 16 << 20)]
    stream_bytes: usize,
    /// Messages in the stream
    #[arg(long, default_value_t = 64)]
    stream_messages: usize,
    /// Spin deadline for waits in microseconds
    #[arg(long, default_value_t = 50)]
    spin_us: u64,
    /// JSON lines on standard output
    #[arg(long)]
    json: bool,
}

/// One rank's measurements.
#[derive(Default, Serialize, Deserialize)]
struct RankResult {
    /// Bytes, and half-round-trip microseconds.
    round_trips: Vec<(usize, Vec<f64>)>,
    /// Seconds per message in the stream, and per copy.
    stream: Vec<f64>,
    copies: Vec<f64>,
}

const SIZES: [usize; 5] = [0, 8, 4096, 65_536, 1 << 20];
/// Most bytes over all round trips with one size; this bounds the count.
const BYTES_OF_A_SIZE: usize = 4 << 30;

/// Runs the benchmark and prints the results.
pub fn run(options: &Options) -> Outcome<()> {
    let ranks = on_processes(2, || rank(options))?;
    let (path, cores) = (options.path.name(), std::thread::available_parallelism()?.get());
    let (slots, slot_bytes) = (options.slots, options.slot_bytes);
    let mut rows = Vec::new();
    for (bytes, us) in &ranks[0].round_trips {
        let (p50, p99) = (percentile(us, 50.0), percentile(us, 99.0));
        if options.json {
            let line = serde_json::json!({
                "benchmark": "messages", "path": path, "cores": cores, "pattern": "ping-pong",
                "slots": slots, "slot_bytes": slot_bytes,
                "bytes": bytes, "messages": us.len(), "p50_us": p50, "p99_us": p99,
            });
            println!("{line}");
        }
        rows.push(vec![bytes.to_string(), format!("{p50:.2}"), format!("{p99:.2}")]);
    }
    let rate = |seconds: &[f64]| options.stream_bytes as f64 / percentile(seconds, 50.0) / 1e9;
    // The receiver's times include the sender's.
    let (stream, copy) = (rate(&ranks[1].stream), rate(&ranks[1].copies));
    if options.json {
        let line = serde_json::json!({
            "benchmark": "messages", "path": path, "cores": cores, "pattern": "stream",
            "slots": slots, "slot_bytes": slot_bytes, "bytes": options.stream_bytes,
            "messages": options.stream_messages, "gb_per_s": stream, "copy_gb_per_s": copy,
        });
        println!("{line}");
        return Ok(());
    }
    println!("Messages over {path}, {cores} cores, {slots} slots of {slot_bytes} bytes:\n");
    print!("{}", table::format(&["bytes", "p50 us", "p99 us"], &rows));
    println!(
        "\n{} messages of {} bytes: {stream:.2} GB/s; a copy within a process: {copy:.2} GB/s",
        options.stream_messages, options.stream_bytes
    );
    Ok(())
}

/// A rank with messages.
struct Member {
    communicator: Communicator,
    messages: Messages,
    peer: Rank,
    spin: Duration,
}

fn rank(options: &Options) -> Outcome<RankResult> {
    let spin = Duration::from_micros(options.spin_us);
    let communicator = join(options.path, Some(spin))?;
    pin(communicator.rank());
    let (slots, slot_bytes) = (options.slots, options.slot_bytes);
    let config = MessagesConfig { slots, slot_bytes, ..MessagesConfig::default() };
    let messages = Messages::connect(&communicator, config, clock::now().after(PATIENCE))?;
    let peer = Rank(1 - communicator.rank().0);
    let member = Member { communicator, messages, peer, spin };
    let mut result = RankResult::default();
    for bytes in SIZES {
        let count = options.round_trips.min(BYTES_OF_A_SIZE / bytes.max(1));
        result.round_trips.push((bytes, member.round_trips(bytes, count)?));
    }
    result.stream = member.stream(options.stream_bytes, options.stream_messages)?;
    if member.communicator.rank() == Rank(1) {
        result.copies = copies(options.stream_bytes, options.stream_messages);
    }
    waiting(spin, |waiter| member.messages.close(&member.communicator, waiter))?;
    member.communicator.leave();
    Ok(result)
}

impl Member {
    fn send(&self, bytes: &[u8]) -> Outcome<()> {
        let access = &mut self.communicator.access();
        let (from, length) = (bytes.as_ptr(), bytes.len() as u64);
        // SAFETY: the bytes outlive this call, which waits for the end.
        let id = unsafe { self.messages.send(access, self.peer, 1, from, length)? };
        waiting(self.spin, |waiter| self.messages.wait(access, id, waiter))?;
        Ok(())
    }

    fn receive(&self, bytes: &mut [u8]) -> Outcome<()> {
        let access = &mut self.communicator.access();
        let (to, length) = (bytes.as_mut_ptr(), bytes.len() as u64);
        // SAFETY: as in `send`.
        let id = unsafe { self.messages.receive(access, Some(self.peer), 1, to, length)? };
        waiting(self.spin, |waiter| self.messages.wait(access, id, waiter))?;
        Ok(())
    }

    /// Half-round-trip microseconds.
    fn round_trips(&self, bytes: usize, count: usize) -> Outcome<Vec<f64>> {
        let (source, mut target) = (vec![1; bytes], vec![0; bytes]);
        let mut taken = Vec::with_capacity(count);
        for number in 0..count + count / 10 {
            let begin = Instant::now();
            if self.communicator.rank() == Rank(0) {
                self.send(&source)?;
                self.receive(&mut target)?;
            } else {
                self.receive(&mut target)?;
                self.send(&source)?;
            }
            // The first ones warm up.
            if number >= count / 10 {
                taken.push(begin.elapsed().as_secs_f64() * 1e6 / 2.0);
            }
        }
        Ok(taken)
    }

    /// Seconds per message in a stream from rank 0 to rank 1.
    fn stream(&self, bytes: usize, count: usize) -> Outcome<Vec<f64>> {
        let mut memory = vec![1; bytes];
        let mut taken = Vec::with_capacity(count);
        for _ in 0..count {
            let begin = Instant::now();
            if self.communicator.rank() == Rank(0) {
                self.send(&memory)?;
            } else {
                self.receive(&mut memory)?;
            }
            taken.push(begin.elapsed().as_secs_f64());
        }
        Ok(taken)
    }
}

/// Seconds per copy with that many bytes.
fn copies(bytes: usize, count: usize) -> Vec<f64> {
    let (source, mut target) = (vec![1u8; bytes], vec![0u8; bytes]);
    let copy = |_| {
        let begin = Instant::now();
        target.copy_from_slice(std::hint::black_box(&source));
        std::hint::black_box(&target);
        begin.elapsed().as_secs_f64()
    };
    (0..count).map(copy).collect()
}
