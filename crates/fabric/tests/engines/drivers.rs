//! Drivers that keep what each event says.

use crate::common::PATIENCE;
use crate::{KINDS, peer_of, shared, two};
use std::collections::BTreeMap;
use weft_fabric::{
    CounterId, Driver, Engine, EngineConfig, Error, Event, Rank, Requests, Result, Time, clock,
};

/// Driver that keeps the last count from each peer, and how many events it had.
struct Keeper {
    namespace: u16,
    counters: [CounterId; 1],
    counts: BTreeMap<Rank, u64>,
    events: usize,
    last_poll: u64,
    /// Fails the next poll.
    fails: bool,
}

impl Keeper {
    fn new(engine: &mut Engine, counter: CounterId) -> Keeper {
        let namespace = engine.namespace();
        let (counts, events) = (BTreeMap::new(), 0);
        Keeper { namespace, counters: [counter], counts, events, last_poll: 0, fails: false }
    }

    fn drive(&mut self, engine: &mut Engine) -> Result<()> {
        let mut last_poll = self.last_poll;
        let result = engine.drive_onward(self, &mut Requests::default(), &mut last_poll);
        self.last_poll = last_poll;
        result
    }
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
        if std::mem::take(&mut self.fails) {
            return Err(Error::Interrupted);
        }
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
            let mut drivers = counters.map(|counter| Keeper::new(&mut engine, counter));
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
                            driver.drive(&mut engine).unwrap();
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
        let mut driver = Keeper::new(&mut engine, counter);
        driver.drive(&mut engine).unwrap();
        gather(Vec::new());
        engine.signal(peer, counter, 0).unwrap();
        engine.flush();
        gather(Vec::new());
        for _ in 0..9 {
            driver.drive(&mut engine).unwrap();
        }
        assert_eq!((driver.counts[&peer], driver.events), (1, 1));
        engine.progress();
        driver.drive(&mut engine).unwrap();
        assert_eq!(driver.events, 2);
        driver.fails = true;
        driver.drive(&mut engine).unwrap_err();
        driver.drive(&mut engine).unwrap();
        assert_eq!(driver.events, 3, "events are repeated after a poll that failed");
        gather(Vec::new());
    });
}
