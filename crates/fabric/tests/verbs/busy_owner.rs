//! Owner that computes without a poll while peers write, over simulated NICs.

use crate::common::{Member, MemberConfig, SLOT, fill, on_threads, soon, take};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weft_fabric::providers::verbs::{TwinConfig, TwinNic};
use weft_fabric::providers::{VerbsConfig, VerbsDevice};
use weft_fabric::{Device, Rank, RequestId, clock};

const WRITERS: u32 = 8;
/// Writes from each writer, all in one round: more than twice the unconsumed arrival bound.
const WRITES: usize = 600;
/// Bytes in each.
const CELL: usize = 48;
/// Control requests and control arrivals for a peer.
const CONTROL: usize = 6;

/// Ranks over one NIC each, by rank.
fn members(nics: &[Arc<TwinNic>]) -> Vec<Member> {
    let joined = Mutex::new(Vec::new());
    on_threads(nics.len() as u32, |rank, gather| {
        let nic = std::slice::from_ref(&nics[rank.index()]);
        let device = VerbsDevice::over(VerbsConfig::default(), nic).unwrap();
        let devices: [Arc<dyn Device>; 1] = [Arc::new(device)];
        let config = MemberConfig::default();
        let member = Member::join_as(config, rank, nics.len() as u32, &devices, gather);
        joined.lock().unwrap().push(member);
    });
    let mut members = joined.into_inner().unwrap();
    members.sort_by_key(|member| member.engine.rank());
    members
}

fn value(writer: usize, write: usize) -> u8 {
    (1 + 31 * writer + write) as u8
}

/// Starts all writes from a rank to rank 0, each to a separate cell.
fn start_writes(member: &mut Member) -> Vec<RequestId> {
    let writer = member.engine.rank().index();
    let start = |write: usize| {
        fill(&member.source, write * CELL, CELL, value(writer, write));
        let page = member.page(Rank(0), write * CELL, write * CELL, CELL);
        member.engine.write(Rank(0), member.counter, 0, &[page]).unwrap()
    };
    (0..WRITES).map(start).collect()
}

/// Eight ranks write without pause to one that does not poll for 20 s in virtual time. They stop at the
/// unconsumed arrival bound, no queue overflows and no rank is lost; once it polls, every byte arrives.
#[test]
fn writers_stop_at_the_bound_while_an_owner_computes_and_all_arrives_afterwards() {
    let nics: Vec<_> = (0..=WRITERS).map(|_| TwinNic::new(TwinConfig::default())).collect();
    let mut members = members(&nics);
    let bound = VerbsConfig::default().max_unconsumed as usize;
    let sent = |writer: usize| nics[writer].chains_toward(&nics[0]).data as usize;
    // A greeting to a rank that is not connected yet may be lost; no packet is from here on.
    let lost = || nics.iter().map(|nic| nic.statistics().lost_packets).sum::<u64>();
    let (lost_greetings, (depth, _)) = (lost(), nics[0].statistics().queues[0]);
    let requests = VerbsConfig::default().queue_requests as usize;
    assert_eq!(depth, WRITERS as usize * (requests + CONTROL + bound + CONTROL));

    let mut pending: Vec<Vec<RequestId>> = members[1..].iter_mut().map(start_writes).collect();
    let begin = clock::now();
    for step in 1..=200 {
        let now = begin.after(step * Duration::from_millis(100));
        for member in &mut members[1..] {
            member.engine.poll(now, &mut Vec::new());
            member.engine.check().unwrap();
        }
        if step > 100 {
            let sent: Vec<usize> = (1..=WRITERS as usize).map(sent).collect();
            assert_eq!(sent, [bound; WRITERS as usize], "after {step} steps");
        }
    }
    assert_eq!(nics[0].statistics().queues, [(depth, WRITERS as usize * bound)]);

    let deadline = soon(20);
    while pending.iter().any(|requests| !requests.is_empty()) {
        assert!(clock::now() < deadline, "{:?}", pending.iter().map(Vec::len).collect::<Vec<_>>());
        members.iter_mut().for_each(|member| member.engine.poll(clock::now(), &mut Vec::new()));
        for (member, requests) in members[1..].iter_mut().zip(&mut pending) {
            requests.retain(|request| !member.engine.is_drained(*request));
        }
    }
    let owner = &mut members[0];
    (0..100).for_each(|_| owner.engine.poll(clock::now(), &mut Vec::new()));
    for writer in 1..=WRITERS as usize {
        let raised = owner.engine.count(owner.counter, Rank(writer as u32)).unwrap();
        assert_eq!((raised, sent(writer)), (WRITES as u64, WRITES), "writer {writer}");
        for write in 0..WRITES {
            let cell = take(&owner.inbox, writer * SLOT + write * CELL, CELL);
            assert_eq!(cell, [value(writer, write); CELL], "write {write} of rank {writer}");
        }
    }
    assert!(members.iter().all(|member| member.engine.check().is_ok()));
    assert!(nics.iter().all(|nic| nic.statistics().overflows == 0));
    assert_eq!(lost(), lost_greetings);
    // Ranks leave together, each on a thread.
    std::thread::scope(|scope| {
        members.into_iter().for_each(|member| drop(scope.spawn(move || drop(member))));
    });
}
