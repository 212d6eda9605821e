//! Communicators used by several threads at once: two ranks in one process, over shm and over tcp.

#[path = "threads/cores.rs"]
mod cores;
#[path = "threads/ends.rs"]
mod ends;
#[path = "threads/interrupts.rs"]
mod interrupts;
#[path = "threads/leaving.rs"]
mod leaving;
#[path = "threads/rounds.rs"]
mod rounds;
#[path = "threads/submitters.rs"]
mod submitters;
#[path = "threads/watches.rs"]
mod watches;

use std::sync::mpsc;
use std::time::Duration;
use weft_control::{Config, local_world};
use weft_fabric::{
    Communicator, CommunicatorConfig, CounterId, Progress, ProviderKind, Rank, Time, WaitOptions,
    clock,
};

const KINDS: [ProviderKind; 2] = [ProviderKind::Shm, ProviderKind::Tcp];
/// Spin times: park at once, or spin first.
const SPINS: [Duration; 2] = [Duration::ZERO, Duration::from_micros(50)];
/// Time limit above any step's time on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `rank` on two ranks, each on a separate thread, with the peer's rank. All leave together.
fn two(
    kind: ProviderKind,
    progress: Progress,
    spin: Duration,
    rank: impl Fn(&Communicator, Rank) + Send + Sync,
) {
    two_that_leave(kind, progress, spin, |communicator, peer| {
        rank(&communicator, peer);
        // The peer may have closed or poisoned the group, which ends this too.
        let _ = communicator.control().all_gather(&[], PATIENCE);
        communicator.leave();
    });
}

/// Runs `rank` on two ranks, each on a separate thread, with the peer's rank. Each leaves on its own.
fn two_that_leave(
    kind: ProviderKind,
    progress: Progress,
    spin: Duration,
    rank: impl Fn(Communicator, Rank) + Send + Sync,
) {
    let adjust = |config: &mut Config| config.host_id = "this".into();
    let world = local_world(2, adjust).unwrap();
    std::thread::scope(|scope| {
        for control in world {
            let rank = &rank;
            scope.spawn(move || {
                let mut own = Config::new(control.rank().0, 2);
                adjust(&mut own);
                let mut config = CommunicatorConfig::new(own);
                config.providers = vec![kind];
                config.progress = progress;
                config.spin = Some(spin);
                let communicator = Communicator::over(control, config).unwrap();
                let peer = Rank(1 - communicator.rank().0);
                rank(communicator, peer);
            });
        }
    });
}

/// Counters that both ranks link.
fn counters<const COUNT: usize>(communicator: &Communicator) -> [CounterId; COUNT] {
    let counters = [(); COUNT].map(|()| communicator.engine().counter().unwrap());
    communicator.share(&[], &counters, soon()).unwrap();
    counters
}

fn soon() -> Time {
    clock::now().after(PATIENCE)
}

/// Waits for at most [`PATIENCE`] with the communicator's options.
fn waiting<T>(communicator: &Communicator, f: impl FnOnce(&mut WaitOptions<'_>) -> T) -> T {
    let mut never = || false;
    f(&mut communicator.wait_options(soon(), &mut never))
}

fn wait(communicator: &Communicator, counter: CounterId, peer: Rank) {
    waiting(communicator, |waiter| communicator.wait(counter, &[(peer, 1)], waiter)).unwrap();
}

fn signal(communicator: &Communicator, peer: Rank, counter: CounterId) {
    communicator.engine().signal(peer, counter, 0).unwrap();
}

/// Next message, which must arrive while another thread's wait continues.
fn promptly<T>(from: &mpsc::Receiver<T>, what: &str) -> T {
    from.recv_timeout(PATIENCE / 3).unwrap_or_else(|_| panic!("{what} does not come"))
}
