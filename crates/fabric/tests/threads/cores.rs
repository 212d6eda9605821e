//! Ranks that are pinned to cores before the group forms.

use super::{KINDS, PATIENCE, soon, waiting};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::time::Duration;
use weft_control::{Config, local_world};
use weft_fabric::{Communicator, CommunicatorConfig, ProviderKind, Rank};

/// Runs `rank` on two ranks, each on a thread that is pinned to one core.
fn pinned(kind: ProviderKind, cores: [usize; 2], rank: impl Fn(&Communicator, Rank) + Send + Sync) {
    let world = local_world(2, |config| config.host_id = "of pinned ranks".into()).unwrap();
    std::thread::scope(|scope| {
        for (control, core) in world.into_iter().zip(cores) {
            let rank = &rank;
            scope.spawn(move || {
                let mut set = CpuSet::new();
                set.set(core);
                sched_setaffinity(None, &set).unwrap();
                let mut config = CommunicatorConfig::new(Config::new(control.rank().0, 2));
                config.providers = vec![kind];
                let communicator = Communicator::over(control, config).unwrap();
                let peer = Rank(1 - communicator.rank().0);
                rank(&communicator, peer);
                communicator.control().all_gather(&[], PATIENCE).unwrap();
                communicator.leave();
            });
        }
    });
}

fn allowed() -> Vec<usize> {
    let allowed = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect()
}

#[test]
fn ranks_pinned_to_a_core_each_do_not_share_cores() {
    let [first, second, ..] = allowed()[..] else { return };
    for kind in KINDS {
        pinned(kind, [first, second], |communicator, _| {
            assert!(!communicator.engine().shares_cores());
        });
    }
}

#[test]
fn waits_of_ranks_on_one_core_leave_it_to_each_other() {
    let core = allowed()[0];
    for kind in KINDS {
        pinned(kind, [core, core], |communicator, _| {
            assert!(communicator.engine().shares_cores());
            let mut never = || false;
            let spin = communicator.wait_options(soon(), &mut never).spin;
            assert_eq!(spin, Duration::from_micros(200));
            for _ in 0..1000 {
                waiting(communicator, |waiter| communicator.barrier(waiter)).unwrap();
            }
        });
    }
}
