//! Drivers that keep what each event says.

use crate::common::PATIENCE;
use crate::{KINDS, peer_of, shared, two};
use std::collections::BTreeMap;
use weft_fabric::{
    CounterId, Driver, EngineConfig, Error, Event, Rank, Requests, Result, Time, clock,
};

/// Driver that keeps the last count from each peer, and how many events it had.
struct Keeper {
    namespace: u16,
    counters: [CounterId; 1],
    counts: BTreeMap<Rank, u64>,
    events: usize,
}

impl Driver for Keeper {
    type Error = Error;

    fn namespace(&self) -> u16 {
        self.namespace
    }

    fn counters(&self) -> &[CounterId] {
        &self.counters
    }

    fn poll(&mut self, _: Time, events: &[Event], _: &mut Requests) -> Result<()> {
        for event in events {
            self.events += 1;
            if let Event::Raised { peer, count, counter, .. } = event
                && *counter == self.counters[0]
            {
                self.counts.insert(*peer, *count);
            }
        }
        Ok(())
    }
}

/// Two drivers whose polls take each other's events, polls without a driver, and calls in between: each count comes.
#[test]
fn events_that_other_polls_took_are_not_lost() {
    for kind in KINDS {
        two(kind, &EngineConfig::default(), |mut engine, gather| {
            let peer = peer_of(&engine);
            let counters = [shared(&mut engine, gather), shared(&mut engine, gather)];
            let mut drivers = counters.map(|counter| Keeper {
                namespace: engine.namespace(),
                counters: [counter],
                counts: BTreeMap::new(),
                events: 0,
            });
            let mut requests = Requests::default();
            for round in 1..=60u64 {
                for counter in counters {
                    engine.signal(peer, counter, 0).unwrap();
                }
                engine.flush();
                let begin = clock::now();
                let mut turn = round;
                while drivers.iter().any(|driver| driver.counts.get(&peer) != Some(&round)) {
                    assert!(clock::now().since(begin) < PATIENCE, "a count did not come");
                    match turn % 5 {
                        0 => engine.progress(),
                        1 => engine.drive(&mut drivers[0], &mut requests).unwrap(),
                        turn => {
                            let driver = &mut drivers[turn as usize % 2];
                            engine.drive_onward(driver, &mut requests).unwrap();
                        }
                    }
                    turn += 1;
                }
                gather(Vec::new());
            }
        });
    }
}

#[test]
fn a_driver_that_nobody_else_polls_gets_no_event_twice() {
    two(KINDS[0], &EngineConfig::default(), |mut engine, gather| {
        let peer = peer_of(&engine);
        let counter = shared(&mut engine, gather);
        let namespace = engine.namespace();
        let (counts, events) = (BTreeMap::new(), 0);
        let mut driver = Keeper { namespace, counters: [counter], counts, events };
        let mut requests = Requests::default();
        engine.drive_onward(&mut driver, &mut requests).unwrap();
        gather(Vec::new());
        engine.signal(peer, counter, 0).unwrap();
        engine.flush();
        gather(Vec::new());
        for _ in 0..9 {
            engine.drive_onward(&mut driver, &mut requests).unwrap();
        }
        assert_eq!((driver.counts[&peer], driver.events), (1, 1));
        engine.progress();
        engine.drive_onward(&mut driver, &mut requests).unwrap();
        assert_eq!(driver.events, 2);
        gather(Vec::new());
    });
}
