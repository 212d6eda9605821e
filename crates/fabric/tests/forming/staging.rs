//! Ranks over tcp that choose differently which links stage GPU memory.

use crate::{PATIENCE, two};
use weft_control::{Config, Control};
use weft_fabric::providers::{CopyBackend, Staging};
use weft_fabric::{
    Communicator, CommunicatorConfig, CounterId, Error, Page, ProviderKind, Rank, Region,
    RemoteRegion, clock,
};

const TWIN: CopyBackend = CopyBackend::Twin { seed: 0 };
const CHOICES: [Staging; 3] = [Staging::Never, Staging::Automatic(TWIN), Staging::Always(TWIN)];
const BYTES: usize = 5000;

fn join(control: Control, staged: Staging) -> Communicator {
    let config = Config::new(control.rank().0, control.world_size());
    let mut config = CommunicatorConfig::new(config);
    (config.providers, config.staged) = (vec![ProviderKind::Tcp], staged);
    Communicator::over(control, config).unwrap()
}

fn shared(
    communicator: &Communicator,
    inbox: &Region,
    counter: CounterId,
) -> Result<RemoteRegion, Error> {
    let deadline = clock::now().after(PATIENCE);
    let granted = communicator.share(&[(inbox, 0..BYTES as u64)], &[counter], deadline)?;
    Ok(granted[1 - communicator.rank().index()][0])
}

/// Writes from `source` to the other rank, and the bytes that come from there.
fn exchanged(
    communicator: &Communicator,
    source: &Region,
    inbox: &Region,
) -> Result<Vec<u8>, Error> {
    let (me, peer) = (communicator.rank(), Rank(1 - communicator.rank().0));
    let counter = communicator.engine().counter().unwrap();
    let remote = shared(communicator, inbox, counter)?;
    // SAFETY: no request names the source now, and the twin's devices are host memory.
    unsafe { (source.memory().address() as *mut u8).write_bytes(1 + me.0 as u8, BYTES) };
    let page = Page {
        source: source.key(),
        source_offset: 0,
        destination: remote.key,
        destination_offset: 0,
        length: BYTES as u64,
    };
    let mut never = || false;
    let mut waiter = communicator.wait_options(clock::now().after(PATIENCE), &mut never);
    let request = communicator.engine().write(peer, counter, 0, &[page])?;
    communicator.wait_for_request(request, &mut waiter)?;
    communicator.wait(counter, &[(peer, 1)], &mut waiter)?;
    communicator.barrier(&mut waiter)?;
    // SAFETY: the peer writes nothing more, and the twin's devices are host memory.
    Ok(unsafe { std::slice::from_raw_parts(inbox.memory().address() as *const u8, BYTES) }.to_vec())
}

#[test]
fn ranks_that_choose_differently_agree_on_their_routes_or_name_the_setting() {
    let pairs = CHOICES.into_iter().flat_map(|one| CHOICES.map(|two| (one, two)));
    for (one, other) in pairs {
        let stages = |staged: &&Staging| **staged != Staging::Never;
        let staging = [one, other].iter().filter(stages).count();
        let what = format!("{one:?} {other:?}");
        let ends = two(1, |_| {}).into_iter().zip([one, other]);
        std::thread::scope(|scope| {
            for (control, staged) in ends {
                let what = &what;
                scope.spawn(move || {
                    let communicator = join(control, staged);
                    let host = || communicator.engine().alloc(BYTES).unwrap();
                    let arrived = exchanged(&communicator, &host(), &host()).unwrap();
                    assert_eq!(arrived, vec![2 - communicator.rank().0 as u8; BYTES], "{what}");
                    let gpu = || communicator.engine().alloc_device(0, BYTES);
                    if staged == Staging::Never {
                        let error = gpu().unwrap_err();
                        assert!(error.to_string().contains("WEFT_STAGED"), "{what}: {error}");
                        // A peer that shares its GPU memory with this rank does not.
                        let others = exchanged(&communicator, &host(), &host());
                        assert_eq!(others.is_err(), staging == 1, "{what}");
                        return;
                    }
                    let arrived = exchanged(&communicator, &gpu().unwrap(), &gpu().unwrap());
                    if staging == 2 {
                        let expected = vec![2 - communicator.rank().0 as u8; BYTES];
                        assert_eq!(arrived.unwrap(), expected, "{what}");
                    } else {
                        let error = arrived.unwrap_err().to_string();
                        assert!(error.contains("leave WEFT_STAGED unset there"), "{what}: {error}");
                    }
                });
            }
        });
    }
}
