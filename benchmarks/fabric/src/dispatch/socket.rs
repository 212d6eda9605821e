//! Side `socket`: the same headers, queries and answers over one connection.

use super::samples::{Samples, answer};
use super::{ANSWER, HEADER, Measured, start};
use crate::Outcome;
use crate::group::PATIENCE;
use std::io::{IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes that are copied together for one system call, and bytes per read.
const BATCH: usize = 64 << 10;
/// Round trips with one query.
const TRIPS: u64 = 2000;
const REPLY: usize = HEADER + ANSWER;

/// Second process: answers frames until the connection ends.
pub fn accelerator(bytes: usize, address: &str) -> Outcome<()> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let frame = HEADER + bytes;
    let mut buffer = vec![0; frame.max(4 * BATCH)];
    let (mut filled, mut replies) = (0, Vec::new());
    loop {
        // A long frame is read separately into its place; short ones as many as there are.
        let end = if frame > BATCH { frame } else { buffer.len() };
        let read = stream.read(&mut buffer[filled..end])?;
        if read == 0 {
            return Ok(());
        }
        filled += read;
        let whole = filled / frame * frame;
        replies.clear();
        for frame in buffer[..whole].chunks_exact(frame) {
            replies.extend_from_slice(&[0; HEADER]);
            replies.extend_from_slice(&answer(&frame[HEADER..]));
        }
        if !replies.is_empty() {
            stream.write_all(&replies)?;
        }
        buffer.copy_within(whole..filled, 0);
        filled -= whole;
    }
}

pub fn measure(samples: &Samples, time: Duration, slots: u32) -> Outcome<Measured> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut child = start("socket", samples.bytes(), &listener.local_addr()?.to_string())?;
    let (stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let answered = AtomicU64::new(0);
    let measured = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_answers(&stream, samples, &answered));
        let load = Load { stream: &stream, samples, answered: &answered, slots: slots.into() };
        let measured = load.measure(time);
        stream.shutdown(std::net::Shutdown::Write)?;
        let wrong = reader.join().map_err(|_| "the reader of answers panicked")??;
        measured.map(|measured| Measured { wrong, ..measured })
    })?;
    child.wait()?;
    Ok(measured)
}

/// Counts and compares answers, which arrive in query order. Returns how many are wrong.
fn read_answers(
    mut stream: &TcpStream,
    samples: &Samples,
    answered: &AtomicU64,
) -> std::io::Result<u64> {
    let (mut buffer, mut filled, mut next, mut wrong) = (vec![0; BATCH], 0, 0, 0);
    loop {
        let read = stream.read(&mut buffer[filled..])?;
        if read == 0 {
            return Ok(wrong);
        }
        filled += read;
        let whole = filled / REPLY * REPLY;
        for reply in buffer[..whole].chunks_exact(REPLY) {
            wrong += u64::from(reply[HEADER..] != samples.answer(next)[..]);
            next += 1;
        }
        answered.store(next, Ordering::Release);
        buffer.copy_within(whole..filled, 0);
        filled -= whole;
    }
}

struct Load<'a> {
    stream: &'a TcpStream,
    samples: &'a Samples,
    answered: &'a AtomicU64,
    slots: u64,
}

impl Load<'_> {
    fn measure(&self, time: Duration) -> Outcome<Measured> {
        let first = self.send_for(0, time / 5)?;
        let since = Instant::now();
        let next = self.send_for(first, time)?;
        let queries_per_s = (next - first) as f64 / since.elapsed().as_secs_f64();
        let mut round_trips_ns = Vec::new();
        let mut buffer = Vec::new();
        for number in next..next + TRIPS {
            let since = Instant::now();
            self.send(number, number + 1, &mut buffer)?;
            while self.answered.load(Ordering::Acquire) <= number {
                std::thread::yield_now();
            }
            round_trips_ns.push(since.elapsed().as_nanos() as f64);
        }
        Ok(Measured { queries_per_s, round_trips_ns, ..Measured::default() })
    }

    /// Sends queries from number `first` on for some time, and waits for the answers. Returns the next number.
    fn send_for(&self, first: u64, time: Duration) -> Outcome<u64> {
        let (since, mut next, mut buffer) = (Instant::now(), first, Vec::new());
        let batch = (BATCH / (HEADER + self.samples.bytes())).max(1) as u64;
        while since.elapsed() < time {
            let room = self.answered.load(Ordering::Acquire) + self.slots - next;
            if room == 0 {
                std::thread::yield_now();
                continue;
            }
            let end = next + room.min(batch);
            self.send(next, end, &mut buffer)?;
            next = end;
        }
        while self.answered.load(Ordering::Acquire) < next {
            if since.elapsed() > time + PATIENCE {
                return Err("queries without an answer".into());
            }
            std::thread::yield_now();
        }
        Ok(next)
    }

    /// Sends queries in one system call: long ones from the source memory, short ones as a copy.
    fn send(&self, begin: u64, end: u64, buffer: &mut Vec<u8>) -> Outcome<()> {
        let (mut stream, header) = (self.stream, [0; HEADER]);
        if self.samples.bytes() > BATCH {
            let sample = self.samples.sample(begin);
            let sent = stream.write_vectored(&[IoSlice::new(&header), IoSlice::new(sample)])?;
            let rest = sent.checked_sub(HEADER).ok_or("a header was sent in parts")?;
            return Ok(stream.write_all(&sample[rest..])?);
        }
        buffer.clear();
        for query in begin..end {
            buffer.extend_from_slice(&header);
            buffer.extend_from_slice(self.samples.sample(query));
        }
        Ok(stream.write_all(buffer)?)
    }
}
