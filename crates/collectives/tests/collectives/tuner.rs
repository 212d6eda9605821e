//! Selection by measured times: all ranks agree on it, and it never picks an algorithm that is predicted to be slower.

use crate::communicators::communicators;
use crate::{KINDS, Member, soon, sum_of};
use weft_collectives::tuning::{TuningSource, candidates, collective_name};
use weft_collectives::{
    Algorithm, Call, Collective, Collectives, CollectivesConfig, Options, Rank, RunError,
};
use weft_fabric::ProviderKind;
use weft_fabric::random::SplitMix64;

const COLLECTIVES: [Collective; 5] = [
    Collective::AllReduce,
    Collective::ReduceScatter,
    Collective::AllGather,
    Collective::Broadcast { root: Rank(1) },
    Collective::AllToAll,
];
const SIZES: [u64; 4] = [96, 6144, 393_216, 25_165_824];
/// Constants for a 1 GB/s link.
const CONSTANTS: &str = r#"{"step_s": 5e-6, "post_s": 1e-6, "byte_s": 1e-9, "add_byte_s": 1e-10,
    "copy_byte_s": 1e-10}"#;

/// Random times for one algorithm at all sizes.
struct Measured {
    collective: Collective,
    choice: (Algorithm, Options),
    seconds: [f64; 4],
}

fn measured(seed: u64, kind: ProviderKind) -> Vec<Measured> {
    let mut random = SplitMix64::new(seed);
    let mut all = Vec::new();
    for collective in COLLECTIVES {
        // Only shm reads memory in place.
        let reads = kind == ProviderKind::Shm;
        for choice in
            candidates(collective).filter(|(one, _)| reads || *one != Algorithm::DirectRead)
        {
            let seconds = SIZES.map(|size| {
                let noise = 1.0 + random.below(1000) as f64 / 500.0;
                noise * (1e-5 + size as f64 * 1e-9)
            });
            all.push(Measured { collective, choice, seconds });
        }
    }
    all
}

fn entry(provider: &str, ranks: u32, times: &[String]) -> String {
    format!(
        r#"{{"provider": "{provider}", "ranks": {ranks}, "machine": "this", "at": "today",
            "constants": {CONSTANTS}, "times": [{}]}}"#,
        times.join(",")
    )
}

fn file(entries: &[String]) -> String {
    format!(r#"{{"format": "weft-tuning-1", "entries": [{}]}}"#, entries.join(","))
}

fn times(one: &Measured) -> String {
    let points = SIZES.iter().zip(one.seconds).map(|(size, time)| format!("[{size}, {time:e}]"));
    let (algorithm, Options { chunks, .. }) = one.choice;
    format!(
        r#"{{"collective": "{}", "algorithm": "{algorithm}", "chunks": {chunks}, "points": [{}]}}"#,
        collective_name(one.collective),
        points.collect::<Vec<_>>().join(",")
    )
}

/// A member's collectives, by the text at rank 0; other ranks have no file.
fn connect(
    member: &Member,
    text: &str,
    config: CollectivesConfig,
) -> Result<Collectives, RunError> {
    let source = TuningSource { name: "times.json", text, machine: "this" };
    let source = (member.rank() == 0).then_some(source);
    Collectives::connect_tuned(&member.communicator, config, source, soon())
}

/// Algorithm for a call of `bytes` bytes, which is not run.
fn selected(member: &Member, made: &Collectives, collective: Collective, bytes: u64) -> Choice {
    let elements = bytes / 8;
    let memory = std::ptr::without_provenance_mut(1 << 40);
    let other = std::ptr::without_provenance_mut(1 << 44);
    let call = Call { collective, elements, input: memory, output: other, ..sum_of(&mut []) };
    made.selected(&mut member.communicator.access(), &call).unwrap()
}

type Choice = (Algorithm, Options);

fn on_members(ranks: u32, kind: ProviderKind, work: impl Fn(&Member) + Send + Sync) {
    communicators(ranks, kind, None, |communicator| {
        let member = Member::new(communicator, CollectivesConfig::default());
        work(&member);
        member.close().unwrap();
    });
}

fn close(member: &Member, made: &Collectives) {
    let mut never = || false;
    let mut options = member.communicator.wait_options(soon(), &mut never);
    made.close(&member.communicator, &mut options).unwrap();
}

#[test]
fn the_fastest_of_the_measured_times_is_selected_on_all_ranks() {
    for seed in 0..6 {
        let kind = KINDS[seed as usize % 2];
        let all = measured(seed, kind);
        let lines: Vec<_> = all.iter().map(times).collect();
        let text = file(&[entry(kind.name(), 3, &lines)]);
        on_members(3, kind, |member| {
            let made = connect(member, &text, CollectivesConfig::default()).unwrap();
            for collective in COLLECTIVES {
                for (index, size) in SIZES.into_iter().enumerate() {
                    let of = all.iter().filter(|one| one.collective == collective);
                    let best = of.min_by(|a, b| a.seconds[index].total_cmp(&b.seconds[index]));
                    let found = selected(member, &made, collective, size);
                    assert_eq!(found, best.unwrap().choice, "{collective} of {size}, seed {seed}");
                }
                // Half-way between two sizes.
                let size = (SIZES[1] + SIZES[2]) / 2;
                let middle = |one: &Measured| (one.seconds[1] + one.seconds[2]) / 2.0;
                let of = || all.iter().filter(|one| one.collective == collective);
                let found = selected(member, &made, collective, size);
                let time = middle(of().find(|one| one.choice == found).unwrap());
                let least = of().map(middle).fold(f64::INFINITY, f64::min);
                assert!(time <= least * (1.0 + 1e-9), "{collective} of {size}, seed {seed}");
            }
            close(member, &made);
        });
    }
}

#[test]
fn reproducible_sums_restrict_the_selection() {
    let all = measured(3, ProviderKind::Shm);
    let lines: Vec<_> = all.iter().map(times).collect();
    let text = file(&[entry("shm", 3, &lines)]);
    on_members(3, ProviderKind::Shm, |member| {
        let config = CollectivesConfig { reproducible: true, ..CollectivesConfig::default() };
        let made = connect(member, &text, config).unwrap();
        for collective in COLLECTIVES {
            for (index, size) in SIZES.into_iter().enumerate() {
                let of = all.iter().filter(|one| {
                    one.collective == collective && one.choice.0.sums_in_rank_order(collective)
                });
                let best = of.min_by(|a, b| a.seconds[index].total_cmp(&b.seconds[index]));
                let found = selected(member, &made, collective, size);
                assert_eq!(found, best.unwrap().choice, "{collective} of {size}");
            }
        }
        close(member, &made);
    });
}

#[test]
fn other_numbers_of_ranks_are_estimated_from_the_constants() {
    let text = file(&[entry("shm", 2, &[]), entry("shm", 64, &[]), entry("tcp", 4, &[])]);
    on_members(4, ProviderKind::Shm, |member| {
        let made = connect(member, &text, CollectivesConfig::default()).unwrap();
        // One step with three writes costs 8 us, every other algorithm at least two 6 us steps.
        let found = selected(member, &made, Collective::AllReduce, 96);
        assert_eq!(found.0, Algorithm::OneShot);
        let found = selected(member, &made, Collective::Broadcast { root: Rank(0) }, 1 << 25);
        // Readers share no link at the root.
        assert_eq!(found.0, Algorithm::DirectRead);
        let found = selected(member, &made, Collective::ReduceScatter, 96);
        // The answers are one more step.
        assert_eq!(found.0, Algorithm::Direct);
        let found = selected(member, &made, Collective::AllReduce, 1 << 25);
        assert_ne!(found.0, Algorithm::OneShot);
        close(member, &made);
    });
}

#[test]
fn an_algorithm_that_was_not_measured_up_to_a_size_is_not_selected_there() {
    let mut all = measured(5, ProviderKind::Tcp);
    all.retain(|one| one.collective == Collective::AllToAll);
    let mut lines: Vec<_> = all.iter().map(times).collect();
    // Far faster than the other, but only for 96 bytes.
    lines[0] = r#"{"collective": "all-to-all", "algorithm": "direct", "chunks": 8,
        "points": [[96, 1e-9]]}"#
        .to_owned();
    let text = file(&[entry("shm", 2, &lines)]);
    on_members(2, ProviderKind::Shm, |member| {
        let made = connect(member, &text, CollectivesConfig::default()).unwrap();
        let found = |size| selected(member, &made, Collective::AllToAll, size).0;
        assert_eq!(found(96), Algorithm::Direct);
        assert_eq!([6144, 1 << 26].map(found), [Algorithm::Pairwise; 2]);
        close(member, &made);
    });
}

#[test]
fn a_damaged_file_is_reported_with_its_position_on_all_ranks() {
    let good = file(&[entry("shm", 2, &[times(&measured(1, ProviderKind::Shm)[0])])]);
    let cases = [
        ("{".to_owned(), "not valid: EOF while parsing"),
        ("[]".to_owned(), "not valid: invalid"),
        (good.replace("weft-tuning-1", "weft-tuning-9"), "format \"weft-tuning-9\": expected"),
        (good.replace("5e-6", "-5e-6"), "entry 0: step_s -0.000005: expected seconds"),
        (good.replace("1e-9", "0"), "entry 0: byte_s 0: expected seconds"),
        (good.replace("\"ring\"", "\"rung\""), "entry 0: algorithm \"rung\" is unknown"),
        (good.replace("\"ring\"", "\"direct\""), "entry 0: direct with 8 chunks: no candidate"),
        (good.replace("all-reduce", "all-induce"), "collective \"all-induce\": expected one of"),
        (good.replace("[96", "[7000"), "all-reduce by ring: point 6144, "),
        (good.replace("\"at\"", "\"on\""), "not valid: unknown field `on`"),
    ];
    on_members(2, ProviderKind::Shm, |member| {
        for (text, expected) in &cases {
            let error = connect(member, text, CollectivesConfig::default()).err().unwrap();
            let (text, start) = (error.to_string(), "tuning file: times.json: ");
            assert!(text.contains(start) && text.contains(expected), "{text}");
            match error {
                RunError::Invalid { .. } => assert_eq!(member.rank(), 0),
                RunError::PeerFailed { peer, .. } => assert_eq!((peer.0, member.rank()), (0, 1)),
                other => panic!("{other}"),
            }
        }
        // An entry for another machine has no effect.
        let other = good.replace("\"this\"", "\"that\"");
        let made = connect(member, &other, CollectivesConfig::default()).unwrap();
        let found = selected(member, &made, Collective::AllReduce, 96);
        assert_eq!(found.0, Algorithm::OneShot);
        close(member, &made);
    });
}
