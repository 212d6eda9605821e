//! Side `socket` with several connections: queries alternate between them, so each is sent and received separately.

use super::samples::{Samples, answer};
use super::{ANSWER, HEADER, Measured, start};
use crate::Outcome;
use rustix::event::epoll;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const TRIPS: u64 = 2000;
const REPLY: usize = HEADER + ANSWER;

/// Blocking connections, each with received bytes, and an epoll descriptor for all.
struct Receiver {
    epoll: OwnedFd,
    streams: Vec<(TcpStream, Vec<u8>)>,
    open: usize,
}

impl Receiver {
    fn new(streams: Vec<TcpStream>) -> Outcome<Receiver> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (index, stream) in streams.iter().enumerate() {
            let data = epoll::EventData::new_u64(index as u64);
            epoll::add(&epoll, stream, data, epoll::EventFlags::IN)?;
        }
        let open = streams.len();
        Ok(Receiver {
            epoll,
            streams: streams.into_iter().map(|it| (it, Vec::new())).collect(),
            open,
        })
    }

    /// Receives until all connections have ended; `frame` gets each frame and the connection index; it may write to
    /// that connection.
    fn run(
        &mut self,
        frame: usize,
        mut receive: impl FnMut(usize, &mut TcpStream, &[u8]) -> std::io::Result<()>,
    ) -> Outcome<()> {
        let mut bytes = vec![0; 64 << 10];
        while self.open > 0 {
            let mut room = [const { MaybeUninit::uninit() }; 128];
            let (events, _) = epoll::wait(&self.epoll, &mut room, None)?;
            for event in events {
                let index = { event.data }.u64() as usize;
                let (stream, received) = &mut self.streams[index];
                let read = stream.read(&mut bytes)?;
                if read == 0 {
                    epoll::delete(&self.epoll, &*stream)?;
                    self.open -= 1;
                }
                received.extend_from_slice(&bytes[..read]);
                let whole = received.len() / frame * frame;
                for frame in received[..whole].chunks_exact(frame) {
                    receive(index, stream, frame)?;
                }
                received.drain(..whole);
            }
        }
        Ok(())
    }
}

/// Second process: answers frames until all connections end.
pub fn accelerator(bytes: usize, address: &str, connections: u32) -> Outcome<()> {
    let streams = (0..connections).map(|_| {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    });
    let streams = streams.collect::<std::io::Result<_>>()?;
    Receiver::new(streams)?.run(HEADER + bytes, |_, stream, frame| {
        let mut reply = [0; REPLY];
        reply[HEADER..].copy_from_slice(&answer(&frame[HEADER..]));
        stream.write_all(&reply)
    })
}

pub fn measure(
    samples: &Samples,
    time: Duration,
    slots: u32,
    connections: u32,
) -> Outcome<Measured> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut child = start("socket", samples.bytes(), &listener.local_addr()?.to_string())?;
    let mut streams = Vec::new();
    for _ in 0..connections {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        streams.push(stream);
    }
    let clones = streams.iter().map(TcpStream::try_clone).collect::<std::io::Result<_>>()?;
    let mut receiver = Receiver::new(clones)?;
    let (answered, count) = (AtomicU64::new(0), u64::from(connections));
    let measured = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut next, mut wrong): (Vec<u64>, u64) = ((0..count).collect(), 0);
            // A thread's error has to be sendable.
            let ended = receiver.run(REPLY, |index, _, reply| {
                wrong += u64::from(reply[HEADER..] != samples.answer(next[index])[..]);
                next[index] += count;
                answered.fetch_add(1, Ordering::Release);
                Ok(())
            });
            ended.map(|()| wrong).map_err(|error| error.to_string())
        });
        let limit = u64::from(slots) * count;
        let mut load = Load { streams: &mut streams, samples, answered: &answered, limit, next: 0 };
        let measured = load.measure(time);
        for stream in &streams {
            stream.shutdown(std::net::Shutdown::Write)?;
        }
        let wrong = reader.join().map_err(|_| "the reader of answers panicked")??;
        measured.map(|measured| Measured { wrong, ..measured })
    })?;
    child.wait()?;
    Ok(measured)
}

struct Load<'a> {
    streams: &'a mut [TcpStream],
    samples: &'a Samples,
    answered: &'a AtomicU64,
    limit: u64,
    next: u64,
}

impl Load<'_> {
    fn measure(&mut self, time: Duration) -> Outcome<Measured> {
        self.send_for(time / 5)?;
        let (first, since) = (self.next, Instant::now());
        self.send_for(time)?;
        let queries_per_s = (self.next - first) as f64 / since.elapsed().as_secs_f64();
        let mut round_trips_ns = Vec::new();
        for _ in 0..TRIPS {
            let since = Instant::now();
            self.send()?;
            self.wait();
            round_trips_ns.push(since.elapsed().as_nanos() as f64);
        }
        Ok(Measured { queries_per_s, round_trips_ns, ..Measured::default() })
    }

    fn send_for(&mut self, time: Duration) -> Outcome<()> {
        let since = Instant::now();
        while since.elapsed() < time {
            if self.next - self.answered.load(Ordering::Acquire) >= self.limit {
                std::thread::yield_now();
                continue;
            }
            self.send()?;
        }
        self.wait();
        Ok(())
    }

    fn wait(&self) {
        while self.answered.load(Ordering::Acquire) < self.next {
            std::thread::yield_now();
        }
    }

    /// Sends the next query over the next connection.
    fn send(&mut self) -> std::io::Result<()> {
        let mut frame = vec![0; HEADER];
        frame.extend_from_slice(self.samples.sample(self.next));
        let index = self.next % self.streams.len() as u64;
        self.next += 1;
        self.streams[index as usize].write_all(&frame)
    }
}
