//! Group over simulated NICs; one NIC fails with its first write after each re-formation.

use crate::common::PATIENCE;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weft_control::{Cause, Config, Control, local_world};
use weft_fabric::providers::verbs::{TwinConfig, TwinFault, TwinNic};
use weft_fabric::providers::{VerbsConfig, VerbsDevice};
use weft_fabric::{
    Communicator, CommunicatorConfig, CounterId, Device, Error, Rank, Result, clock,
};

/// Groups whose first write fails.
const FAILURES: u32 = 3;

fn join(control: Control, nic: &Arc<TwinNic>) -> Communicator {
    let mut config = CommunicatorConfig::new(Config::new(control.rank().0, 2));
    config.engine.loss_grace = Duration::from_millis(10);
    let device = VerbsDevice::over(VerbsConfig::default(), std::slice::from_ref(nic)).unwrap();
    let devices: Vec<Arc<dyn Device>> = vec![Arc::new(device)];
    Communicator::over_devices(control, config, devices).unwrap()
}

/// Signals the peer, and waits for the peer's signal and for its own to complete.
fn exchange(communicator: &Communicator, counter: CounterId) -> Result<()> {
    let (peer, mut never) = (Rank(1 - communicator.rank().0), || false);
    let mut options = communicator.wait_options(clock::now().after(PATIENCE), &mut never);
    let request = communicator.engine().signal(peer, counter, 0)?;
    communicator.wait_for_request(request, &mut options)?;
    communicator.wait(counter, &[(peer, 1)], &mut options)
}

/// No rank is lost, so both are members in every group. Each pauses longer than the one before it until
/// it connects, and the first whose queue pair works carries writes.
#[test]
fn a_queue_pair_that_fails_after_each_re_formation_is_connected_after_growing_pauses() {
    let nics = [(); 2].map(|()| TwinNic::new(TwinConfig::default()));
    let world = local_world(2, |config| config.host_id = "this".into()).unwrap();
    std::thread::scope(|scope| {
        for (control, nic) in world.into_iter().zip(&nics) {
            scope.spawn(move || {
                let mut communicator = join(control, nic);
                for failure in 0..=FAILURES {
                    let counter = communicator.engine().counter().unwrap();
                    let rank = communicator.rank();
                    if failure < FAILURES && rank == Rank(0) {
                        nic.fault_after(0, TwinFault::Fail { status: 12, vendor: 0x81 });
                    }
                    communicator.share(&[], &[counter], clock::now().after(PATIENCE)).unwrap();
                    let exchanged = exchange(&communicator, counter);
                    if failure == FAILURES {
                        exchanged.unwrap();
                        break;
                    }
                    let error = exchanged.unwrap_err();
                    let Error::Poisoned(cause) = &error else { panic!("{error}") };
                    assert_eq!((cause.kind, cause.rank), (Cause::Lost, Some(Rank(1))), "{error}");
                    let begin = Instant::now();
                    communicator = communicator.reform(PATIENCE).unwrap();
                    let pause = Duration::from_millis(250 << failure);
                    assert!(begin.elapsed() >= pause, "{rank} connected again before {pause:?}");
                    assert_eq!(communicator.world_size(), 2);
                }
                // The peer may still wait until its own signal ends.
                communicator.control().all_gather(&[], PATIENCE).unwrap();
                communicator.leave();
            });
        }
    });
}
