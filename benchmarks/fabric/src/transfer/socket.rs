//! Bare network operation: one busy-polled socket.

use super::Side;
use crate::Outcome;
use crate::group::PATIENCE;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use weft_control::Control;
use weft_fabric::{Memory, Region};

/// Nonblocking connection to the other rank, without Nagle's algorithm.
pub struct Socket {
    stream: TcpStream,
    source: Arc<Memory>,
    inbox: Arc<Memory>,
    windows_sent: u64,
    acknowledged: u64,
}

impl Socket {
    /// Connects; called by both ranks.
    pub fn open(control: &Control, source: &Region, inbox: &Region) -> Outcome<Socket> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mine = listener.local_addr()?.port().to_le_bytes();
        let all = control.all_gather(&mine, PATIENCE)?;
        let stream = if control.rank().0 == 0 {
            let port = u16::from_le_bytes(all[1].as_slice().try_into()?);
            TcpStream::connect(("127.0.0.1", port))?
        } else {
            listener.accept()?.0
        };
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let (source, inbox) = (source.memory().clone(), inbox.memory().clone());
        Ok(Socket { stream, source, inbox, windows_sent: 0, acknowledged: 0 })
    }

    fn write(&mut self, bytes: &[u8]) -> Outcome<()> {
        busy(bytes.len(), |done| self.stream.write(&bytes[done..]))
    }

    fn read(&mut self, bytes: &mut [u8]) -> Outcome<()> {
        busy(bytes.len(), |done| self.stream.read(&mut bytes[done..]))
    }

    fn await_acknowledged(&mut self, windows: u64) -> Outcome<()> {
        while self.acknowledged < windows {
            self.read(&mut [0])?;
            self.acknowledged += 1;
        }
        Ok(())
    }
}

/// Repeats a call that moves some bytes until it has moved `length`.
fn busy(length: usize, mut call: impl FnMut(usize) -> std::io::Result<usize>) -> Outcome<()> {
    let mut done = 0;
    while done < length {
        match call(done) {
            Ok(0) => return Err("the other rank closed the connection".into()),
            Ok(moved) => done += moved,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

impl Side for Socket {
    fn name(&self) -> &'static str {
        "one bare socket"
    }

    fn barrier(&mut self) -> Outcome<()> {
        self.write(&[0])?;
        self.read(&mut [0])
    }

    fn send(&mut self, offset: usize, length: usize) -> Outcome<()> {
        let source = self.source.clone();
        // SAFETY: sources are never written.
        self.write(unsafe { source.bytes(offset, length) })
    }

    fn receive(&mut self, offset: usize, length: usize) -> Outcome<()> {
        let inbox = self.inbox.clone();
        // SAFETY: a batch's slots are distinct, and only this side writes during its batch.
        self.read(unsafe { inbox.bytes_mut(offset, length) })
    }

    fn send_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()> {
        self.await_acknowledged(self.windows_sent.saturating_sub(1))?;
        for &offset in offsets {
            self.send(offset, length)?;
        }
        self.windows_sent += 1;
        Ok(())
    }

    fn receive_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()> {
        for &offset in offsets {
            self.receive(offset, length)?;
        }
        self.write(&[1])
    }

    fn finish_windows(&mut self) -> Outcome<()> {
        self.await_acknowledged(self.windows_sent)
    }
}
