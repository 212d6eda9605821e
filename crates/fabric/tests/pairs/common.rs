//! Listener, connector, and an echo between them.

#[path = "../common/pair_providers.rs"]
mod pair_providers;

use std::time::{Duration, Instant};
use weft_control::pair::PairSettings;
use weft_fabric::pair::{Listener, PairConfig, connect};
use weft_fabric::providers::CopyBackend;
use weft_fabric::{
    Communicator, CounterId, Page, ProviderKind, Rank, Region, RemoteRegion, Time, clock,
};

/// Time limit to detect a loss on a busy machine, before silence would be one. An idle machine has 2 s.
pub const LOSS: Duration = Duration::from_secs(10);
/// Time limit for steps that are not under test.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Providers that pairs can use here, copy over a twin.
pub fn providers() -> Vec<ProviderKind> {
    [vec![ProviderKind::Copy], pair_providers::providers()].concat()
}

pub fn by(patience: Duration) -> Time {
    clock::now().after(patience)
}

pub fn config(address: &str, provider: ProviderKind) -> PairConfig {
    let mut config = PairConfig::new(PairSettings {
        address: address.into(),
        source: None,
        secret: None,
        host_id: "host".into(),
        silence_timeout: Duration::from_secs(15),
        interrupt: None,
        tls: Default::default(),
    });
    config.providers = vec![provider];
    config.devices = CopyBackend::Twin { seed: 7 };
    config
}

pub fn listen(provider: ProviderKind) -> Listener {
    Listener::bind(config("127.0.0.1:0", provider)).unwrap()
}

pub fn accept(listener: &Listener) -> Communicator {
    listener.accept(by(PATIENCE), &mut || false).unwrap()
}

/// Connects on another thread and accepts here; the listener's end comes first.
pub fn pair_on(listener: &Listener, provider: ProviderKind) -> (Communicator, Communicator) {
    let address = listener.address().to_string();
    let dialer =
        std::thread::spawn(move || connect(&config(&address, provider), by(PATIENCE)).unwrap());
    let accepted = accept(listener);
    (accepted, dialer.join().unwrap())
}

pub fn pair(provider: ProviderKind) -> (Communicator, Communicator) {
    pair_on(&listen(provider), provider)
}

/// One end's memory and counter for 64-byte messages; over copy the memory is on devices of the twin.
pub struct End {
    pub communicator: Communicator,
    source: Region,
    inbox: Region,
    remote: RemoteRegion,
    pub counter: CounterId,
}

pub const BYTES: usize = 64;

impl End {
    /// Creates and shares them; called by both ends.
    pub fn new(communicator: Communicator) -> End {
        let (source, inbox, counter) = {
            let mut engine = communicator.engine();
            let of_copy = engine.route(End::peer_of(&communicator)).unwrap().provider;
            let mut alloc = |device| match of_copy {
                ProviderKind::Copy => engine.alloc_device(device, BYTES).unwrap(),
                _ => engine.alloc(BYTES).unwrap(),
            };
            let (source, inbox) = (alloc(2), alloc(5));
            (source, inbox, engine.counter().unwrap())
        };
        let whole = 0..BYTES as u64;
        let remotes = communicator.share(&[(&inbox, whole)], &[counter], by(PATIENCE)).unwrap();
        let remote = remotes[End::peer_of(&communicator).index()][0];
        End { communicator, source, inbox, remote, counter }
    }

    fn peer_of(communicator: &Communicator) -> Rank {
        Rank(1 - communicator.rank().0)
    }

    pub fn peer(&self) -> Rank {
        End::peer_of(&self.communicator)
    }

    /// Writes one message with this value in the next round.
    pub fn send(&self, value: u8) -> weft_fabric::Result<()> {
        let mut never = || false;
        let mut waiter = self.communicator.wait_options(by(PATIENCE), &mut never);
        let round = self.communicator.engine().next_round(self.counter, self.peer())?;
        self.communicator.wait_for_credit(self.counter, self.peer(), round, &mut waiter)?;
        // SAFETY: no request reads the source now, and the twin's devices are host memory.
        unsafe { (self.source.memory().address() as *mut u8).write_bytes(value, BYTES) };
        let page = Page {
            source: self.source.key(),
            source_offset: 0,
            destination: self.remote.key,
            destination_offset: 0,
            length: BYTES as u64,
        };
        let request =
            self.communicator.engine().write(self.peer(), self.counter, round, &[page])?;
        self.communicator.wait_for_request(request, &mut waiter)
    }

    pub fn receive(&self) -> weft_fabric::Result<u8> {
        self.wait(PATIENCE)?;
        // SAFETY: the write has arrived and was not credited, and the twin's devices are host memory.
        let bytes = unsafe { (self.inbox.memory().address() as *const [u8; BYTES]).read() };
        assert_eq!(bytes, [bytes[0]; BYTES]);
        self.communicator.engine().credit(self.peer(), self.counter)?;
        Ok(bytes[0])
    }

    pub fn wait(&self, patience: Duration) -> weft_fabric::Result<()> {
        let mut never = || false;
        let mut waiter = self.communicator.wait_options(by(patience), &mut never);
        self.communicator.wait(self.counter, &[(self.peer(), 1)], &mut waiter)
    }

    pub fn barrier(&self) -> weft_fabric::Result<()> {
        let mut never = || false;
        self.communicator.barrier(&mut self.communicator.wait_options(by(PATIENCE), &mut never))
    }

    pub fn echo(&self, rounds: u8) -> weft_fabric::Result<()> {
        (0..rounds).try_for_each(|_| self.send(self.receive()?))
    }

    pub fn ask(&self, rounds: u8) -> weft_fabric::Result<()> {
        for value in 0..rounds {
            self.send(value)?;
            assert_eq!(self.receive()?, value);
        }
        Ok(())
    }
}

/// Both ends of a pair, with memory.
pub fn ends((one, other): (Communicator, Communicator)) -> (End, End) {
    let other = std::thread::spawn(move || End::new(other));
    (End::new(one), other.join().unwrap())
}

/// Runs `work` and checks that it takes less than [`LOSS`].
pub fn in_time<T>(work: impl FnOnce() -> T) -> T {
    let since = Instant::now();
    let result = work();
    assert!(since.elapsed() < LOSS, "{:?}", since.elapsed());
    result
}
