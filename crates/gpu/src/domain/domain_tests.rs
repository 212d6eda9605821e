use super::*;
use crate::watch::{Code, Record, Severity};

fn group(ranks: usize) -> Vec<Arc<Domain>> {
    Domain::local_group(&vec![MemoryLocation::Twin; ranks]).unwrap()
}

fn positions(blocks: &[Block]) -> Vec<(u32, u64)> {
    blocks.iter().map(|block| (block.segment(), block.offset())).collect()
}

fn word(address: u64) -> u32 {
    // SAFETY: within a live twin heap part that no thread writes now.
    unsafe { std::ptr::with_exposed_provenance::<u32>(address as usize).read() }
}

fn set(address: u64, value: u32) {
    // SAFETY: as above.
    unsafe { std::ptr::with_exposed_provenance_mut::<u32>(address as usize).write(value) }
}

#[test]
fn each_rank_reaches_its_peers_through_the_table() {
    let domains = group(3);
    let field = |name: &str| Table::FIELDS.iter().find(|field| field.name == name).unwrap().offset;
    for (rank, domain) in (0..).zip(&domains) {
        assert_eq!(word(domain.table() + field("version")), VERSION);
        assert_eq!(
            (word(domain.table() + field("rank")), word(domain.table() + field("ranks"))),
            (rank, 3)
        );
        let flags = domain.table() + u64::from(word(domain.table() + field("flags")));
        set(flags + 4 * u64::from(FLAGS_EACH * rank), 70 + rank);
        assert_eq!(word(domain.table() + field("limit_ns")), 0);
        domain.raise_wait_limit(Duration::from_nanos(7)).unwrap();
        domain.raise_wait_limit(Duration::from_nanos(5)).unwrap();
        assert_eq!(word(domain.table() + field("limit_ns")), 7);
        for (peer, other) in domains.iter().enumerate() {
            let at = domain.table() + field("peers") + 8 * peer as u64;
            let mapped = u64::from(word(at)) | u64::from(word(at + 4)) << 32;
            assert_eq!(mapped, other.table(), "twins of one process share mappings");
        }
    }
}

#[test]
fn blocks_have_equal_offsets_on_all_ranks_and_reach_each_other() {
    let domains = group(2);
    for (bytes, alignment) in [(1000, 1), (5 << 20, 4096), (64, 1), (3 << 20, 2 << 20)] {
        let blocks = Domain::allocate_local(&domains, bytes, alignment).unwrap();
        let at = positions(&blocks);
        assert_eq!(at[0], at[1]);
        assert!(at[0].1.is_multiple_of(alignment) && blocks[0].bytes() >= bytes);
        let (own, peers) = (blocks[1].own(), blocks[0].addresses());
        set(peers[1] + 12, 99);
        assert_eq!((word(own + 12), blocks[1].addresses()[1]), (99, own));
        blocks.into_iter().for_each(Block::keep);
    }
}

#[test]
fn bytes_are_reused_zeroed_once_all_ranks_have_dropped_them() {
    let domains = group(2);
    let mut first = Domain::allocate_local(&domains, 4096, 1).unwrap();
    let at = positions(&first)[0];
    set(first[0].own(), 5);
    let late = first.pop();
    drop(first);
    // One rank still has it.
    let second = Domain::allocate_local(&domains, 4096, 1).unwrap();
    assert_ne!(positions(&second)[0], at);
    drop(late);
    let third = Domain::allocate_local(&domains, 4096, 1).unwrap();
    assert_eq!(positions(&third), [at, at]);
    assert_eq!(word(third[0].own()), 0);
}

#[test]
fn kept_blocks_are_never_reused() {
    let domains = group(2);
    let mut first = Domain::allocate_local(&domains, 4096, 1).unwrap();
    let at = positions(&first)[0];
    // Captured only on one rank.
    first.pop().unwrap().keep();
    drop(first);
    assert_ne!(positions(&Domain::allocate_local(&domains, 4096, 1).unwrap())[0], at);
}

#[test]
fn an_empty_segment_is_freed_before_another_is_made() {
    let domains = group(2);
    let large = Domain::allocate_local(&domains, 8 << 20, 1).unwrap();
    assert_eq!(positions(&large)[0].0, 1);
    drop(large);
    let larger = Domain::allocate_local(&domains, 16 << 20, 1).unwrap();
    assert_eq!(positions(&larger)[0].0, 2);
    let (_, bytes) = domains[0].usage();
    assert_eq!(bytes, (16 << 20) + SEGMENT_BYTES);
}

#[test]
fn requests_of_different_blocks_are_errors() {
    let request = |bytes: u64| [bytes, 256].into_iter().flat_map(u64::to_le_bytes).collect();
    let domains = group(2);
    let mut segments = lock(&domains[0].segments);
    let error =
        segments.apply_requests(512, 256, &[request(512), request(1024)]).unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("1024 bytes"), "{error}");
    let error =
        segments.apply_requests(512, 256, &[request(512), vec![1, 2]]).unwrap_err().to_string();
    assert!(error.contains("malformed offer of memory from rank 1"), "{error}");
}

#[test]
fn a_failure_at_one_rank_fails_all_operators_of_all_ranks() {
    let domains = group(2);
    let (code, rank, phase, peer) = (Code::Timeout, 0, 40, Some(1));
    let record = Record { code, rank, phase, peer, channel: 0, slot: 0, expected: 2, seen: 1 };
    domains[0].failures().watch().report(Severity::Fatal, &record);
    let error = domains[0].check_fatal().unwrap_err().to_string();
    assert!(error.starts_with("rank 0 waited for rank 1 in phase 40"), "{error}");
    assert!(domains[1].check_fatal().is_err() && domains[1].failures().watch().is_aborted());
}

#[test]
fn dropping_a_reservation_releases_its_launch() {
    let domains = group(1);
    let (grid, per_sm, concurrent) = (u32::MAX, 1, true);
    let (threads, registers, shared) = (32, 32, 0);
    let name = "all".to_owned();
    let all = OperatorLaunch { name, grid, per_sm, threads, registers, shared, concurrent };
    let reserved = domains[0].reserve(all.clone()).unwrap();
    assert!(matches!(domains[0].reserve(all.clone()), Err(Error::NotResident { .. })));
    drop(reserved);
    domains[0].reserve(all).unwrap();
}

#[test]
fn more_ranks_than_the_table_holds_are_rejected() {
    let refused =
        Domain::local_group(&[MemoryLocation::Twin; MAX_RANKS + 1]).unwrap_err().to_string();
    assert!(refused.contains("65 ranks") && refused.contains("64"), "{refused}");
}

#[test]
fn places_are_equal_on_all_ranks_and_end_with_their_segment() {
    let domains = group(2);
    let blocks = Domain::allocate_local(&domains, 3 << 20, 1).unwrap();
    let (segment, offset) = positions(&blocks)[0];
    for (domain, block) in domains.iter().zip(&blocks) {
        let place = domain.place(block.own() + 100, 8).unwrap();
        assert_eq!((place.memory, place.offset), (MemoryNumber::Segment(segment), offset + 100));
        let expected: Vec<u64> = block.addresses().iter().map(|address| address + 100).collect();
        assert_eq!(place.addresses, expected);
        assert_eq!(domain.place(block.own(), u64::MAX), None);
        assert_eq!(domain.place(8, 1), None);
    }
    let own = blocks[0].own();
    drop(blocks);
    // No room for it: the empty segment is returned, and another one is mapped, possibly at the same
    // address.
    let _larger = Domain::allocate_local(&domains, 40 << 20, 1).unwrap();
    let old = MemoryNumber::Segment(segment);
    assert!(domains[0].place(own, 8).is_none_or(|place| place.memory != old));
}
