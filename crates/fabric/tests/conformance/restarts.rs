//! Ranks that restart, and introductions from earlier processes.

use crate::common::{Introduced, soon, until};
use crate::is_long;
use crate::provider::{Provider, Shape, waited};
use std::time::Duration;
use weft_fabric::{Engine, EngineConfig, Generation, Page, Rank, clock};

/// Time limit for expected failures, and for a broken connection before it counts as a loss.
const TIME: Duration = Duration::from_millis(60);

/// Two ranks restart repeatedly. Usually they connect and write to each other; sometimes one has an
/// introduction from an earlier process at the other. The other one rejects it. The first fails too, at
/// the latest when it finds that connections are rejected. Where a connection depends only on the
/// address, an old introduction with the present address changes no write.
pub fn an_old_introduction_connects_to_nobody(provider: &Provider) {
    if !provider.has(Shape::Default) {
        return;
    }
    if !provider.threads {
        return println!("skipped: {}: this case has all ranks in one process", provider.name);
    }
    if !provider.answers {
        println!("skipped: {}: old introductions, as no peer answers", provider.name);
    }
    let restarts: usize = if is_long() { 1000 } else { 25 };
    let mut before: Vec<Introduced> = Vec::new();
    for restart in 0..restarts {
        let mut engines = [0, 1].map(|rank| {
            let devices = [(provider.device)(Rank(rank), Shape::Default).unwrap()];
            let config = EngineConfig { lanes: 16, loss_grace: TIME, ..EngineConfig::default() };
            Engine::new(config, Rank(rank), 2, Generation(restart as u8), &devices).unwrap()
        });
        let introduced = Introduced::of(&mut engines);
        // A generation has 8 bits: it equals the one 256 restarts ago.
        let old = before.get(restart.checked_sub(256).unwrap_or(restart.saturating_sub(1)));
        let old = old.filter(|_| provider.answers);
        match (restart % 5, old) {
            (3, Some(old)) => connects_to_no_rank(&mut engines, &introduced, old, true),
            (4, Some(old)) if !provider.introductions_identify => {
                let mut mixed = introduced.clone();
                mixed.messages[1][0].clone_from(&old.messages[1][0]);
                connect_all_of(&mut engines, &mixed);
                writes_cross(&mut engines, restart as u8);
            }
            (4, Some(old)) if old.messages[1][0] != introduced.messages[1][0] => {
                connects_to_no_rank(&mut engines, &introduced, old, false);
            }
            _ => {
                connect_all_of(&mut engines, &introduced);
                writes_cross(&mut engines, restart as u8);
            }
        }
        before.push(introduced);
    }
}

/// Rank 0 connects with an old introduction from rank 1, and with rank 1's old address if `moved`.
fn connects_to_no_rank(engines: &mut [Engine; 2], now: &Introduced, old: &Introduced, moved: bool) {
    let mut addresses = now.addresses.clone();
    if moved {
        addresses[1] = old.addresses[1].clone();
    }
    let messages = [Vec::new(), old.messages[1][0].clone()];
    let [zero, one] = engines;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| now.connect(one, clock::now().after(TIME)));
        let connected =
            until(clock::now().after(TIME), |limit| zero.connect(&addresses, &messages, limit));
        assert!(
            other.join().unwrap().is_err(),
            "rank 1 connected to a rank without its introduction"
        );
        if connected.is_err() {
            return;
        }
        let until = soon(10);
        while zero.check().is_ok() {
            assert!(clock::now() < until, "rank 0 connected to an earlier process");
            zero.poll(clock::now(), &mut Vec::new());
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

fn connect_all_of(engines: &mut [Engine; 2], introduced: &Introduced) {
    std::thread::scope(|scope| {
        for engine in engines {
            scope.spawn(|| introduced.connect(engine, soon(20)).unwrap());
        }
    });
}

/// Writes in both directions.
fn writes_cross(engines: &mut [Engine; 2], value: u8) {
    const LENGTH: u64 = 3000;
    let parts: Vec<_> = engines
        .iter_mut()
        .map(|engine| {
            let counter = engine.counter().unwrap();
            let [source, inbox] = [(); 2].map(|()| engine.alloc(LENGTH as usize).unwrap());
            source.memory().fill(0, LENGTH as usize, value);
            let peer = Rank(1 - engine.rank().0);
            let grant = engine.grant(peer, &[(&inbox, 0..LENGTH)], &[counter]).unwrap();
            (counter, source, inbox, grant)
        })
        .collect();
    std::thread::scope(|scope| {
        for (me, engine) in engines.iter_mut().enumerate() {
            let ((counter, source, inbox, _), grant) = (&parts[me], &parts[1 - me].3);
            scope.spawn(move || {
                let peer = Rank(1 - me as u32);
                let remote = engine.import(peer, grant, &[*counter], soon(20)).unwrap()[0];
                let page = Page {
                    source: source.key(),
                    source_offset: 0,
                    destination: remote.key,
                    destination_offset: 0,
                    length: LENGTH,
                };
                let raises = engine.route(peer).unwrap().parts.count_contiguous(LENGTH);
                waited(|w| {
                    let request = engine.write(peer, *counter, 0, &[page])?;
                    engine.wait(*counter, &[(peer, raises)], w)?;
                    let mut seen = vec![0; LENGTH as usize];
                    inbox.memory().copy_out(0, &mut seen);
                    assert!(seen.iter().all(|seen| *seen == value));
                    let credit = engine.credit_now(peer, *counter)?;
                    engine.wait_for_request(request, w)?;
                    engine.wait_for_request(credit, w)?;
                    engine.wait_for_credit(*counter, peer, 1, w)
                })
                .unwrap();
            });
        }
    });
}
