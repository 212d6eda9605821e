//! Command tests: every field out of range, and random bytes.

use super::*;
use crate::proxy::limits::{Limits, Template, TemplateMember};
use proptest::prelude::*;

fn member(peer: u32, source_offset: u64, destination_offset: u64) -> TemplateMember {
    TemplateMember { peer: Rank(peer), source_offset, destination_offset }
}

/// Rank 1 of 4 with two windows, three words, of which word 1 is held, and two templates.
fn limits() -> Limits {
    Limits {
        rank: Rank(1),
        ranks: 4,
        windows: vec![vec![4096, 1000, 4096, 100], vec![64, 1 << 40, 0, 64]],
        holds: vec![false, true, false],
        max_put_bytes: 2048,
        templates: vec![
            Template { members: vec![member(0, 0, 0), member(2, 8, 16), member(3, 16, 32)] },
            Template { members: vec![member(3, 0, 60)] },
        ],
        list_lengths: 8,
    }
}

fn place(window: u16, offset: u64) -> Place {
    Place { window, offset }
}

/// One right command of each kind.
fn examples() -> [Command; 6] {
    let (free, held) = (Target { word: 2, hold: false }, Target { word: 1, hold: true });
    [
        Command::Put {
            peer: Rank(2),
            target: held,
            source: place(0, 200),
            destination: place(0, 3296),
            length: 800,
        },
        Command::Put {
            peer: Rank(0),
            target: free,
            source: place(1, 1 << 39),
            destination: place(1, 0),
            length: 64,
        },
        Command::Signal { peer: Rank(3), target: free },
        Command::Scatter {
            template: 0,
            target: held,
            source: place(0, 0),
            destination: place(0, 68),
            count: 3,
            list: 5,
        },
        Command::Release { peer: Rank(0), word: 1, count: 7 },
        Command::Drained { word: 0 },
    ]
}

fn parse(fields: &CommandFields) -> Result<Command, CommandError> {
    limits().check(17, fields)
}

#[test]
fn the_header_is_the_one_that_kernels_include() {
    let listed = crate::kernels::HEADERS.iter().find(|(path, _)| *path == "weft/command.cuh");
    let expected = c_header();
    assert_eq!(
        listed.map(|(_, text)| *text),
        Some(expected.as_str()),
        "write this to crates/gpu/kernels/weft/command.cuh:\n{expected}"
    );
}

#[test]
fn each_kind_is_read_as_it_was_written() {
    for command in examples() {
        let fields = command.fields();
        assert_eq!(CommandFields::from_payloads(&fields.payloads()), fields);
        assert_eq!(parse(&fields), Ok(command));
    }
}

/// Each entry: an example's index, a change, and the problem.
#[test]
fn each_field_out_of_range_is_named() {
    type Change = fn(&mut CommandFields);
    let cases: &[(usize, Change, &str)] = &[
        (0, |c| c.kind = 0, "kind 0: expected 1 to 5"),
        (0, |c| c.kind = 6, "kind 6: expected 1 to 5"),
        (0, |c| c.kind = 255, "kind 255: expected 1 to 5"),
        (0, |c| c.flags = 0, "flags 0: expected 1"),
        (0, |c| c.flags = 3, "flags 3: expected 1"),
        (1, |c| c.flags = 1, "flags 1: expected 0"),
        (3, |c| c.flags = 0, "flags 0: expected 1"),
        (4, |c| c.flags = 1, "flags 1: expected 0"),
        (5, |c| c.flags = 1, "flags 1: expected 0"),
        (0, |c| c.peer = 4, "peer 4: expected 0 to 3"),
        (0, |c| c.peer = u16::MAX, "peer 65535: expected 0 to 3"),
        (0, |c| c.peer = 1, "peer, this rank, 1: expected none"),
        (2, |c| c.peer = 1, "peer, this rank, 1: expected none"),
        (4, |c| c.peer = 1, "peer, this rank, 1: expected none"),
        (5, |c| c.peer = 1, "peer 1: expected 0"),
        (0, |c| c.length = 0, "length 0: expected 1 to 2048"),
        (0, |c| c.length = 2049, "length 2049: expected 1 to 2048"),
        (0, |c| c.length = u64::MAX, "length 18446744073709551615: expected 1 to 2048"),
        (1, |c| c.length = 65, "destination offset 0: expected none"),
        (2, |c| c.length = 1, "length 1: expected 0"),
        (3, |c| c.length = 1, "length 1: expected 0"),
        (0, |c| c.source_window = 2, "source window 2: expected 0 to 1"),
        (0, |c| c.destination_window = 9, "destination window 9: expected 0 to 1"),
        (0, |c| c.destination_window = 1, "destination offset 3296: expected none"),
        (2, |c| c.source_window = 1, "source window 1: expected 0"),
        (4, |c| c.destination_window = 1, "destination window 1: expected 0"),
        (0, |c| c.source_offset = 201, "source offset 201: expected 0 to 200"),
        (
            0,
            |c| c.source_offset = u64::MAX,
            "source offset 18446744073709551615: expected 0 to 200",
        ),
        (0, |c| c.destination_offset = 3297, "destination offset 3297: expected 0 to 3296"),
        (2, |c| c.source_offset = 1, "source offset 1: expected 0"),
        (5, |c| c.destination_offset = 1, "destination offset 1: expected 0"),
        (0, |c| c.word = 3, "word 3: expected 0 to 2"),
        (4, |c| c.word = 0, "hold, as the word has it, 0: expected 1"),
        (5, |c| c.word = u32::MAX, "word 4294967295: expected 0 to 2"),
        (0, |c| c.reserved = 1, "reserved 1: expected 0"),
        (5, |c| c.reserved = 1 << 31, "reserved 2147483648: expected 0"),
        (0, |c| c.count = 1, "count 1: expected 0"),
        (3, |c| c.count = 0, "count 0: expected 1 to 3"),
        (3, |c| c.count = 4, "count 4: expected 1 to 3"),
        (4, |c| c.count = 0, "count 0: expected 1 to 4294967295"),
        (3, |c| c.peer = 2, "template 2: expected 0 to 1"),
        (3, |c| c.list = 6, "list 6: expected 0 to 5"),
        (3, |c| c.list = u32::MAX, "list 4294967295: expected 0 to 5"),
        (0, |c| c.list = 1, "list 1: expected 0"),
        (3, |c| c.destination_offset = 69, "destination offset 101: expected 0 to 100"),
        (
            3,
            |c| c.destination_offset = u64::MAX,
            "destination offset 18446744073709551615: expected",
        ),
        (3, |c| c.source_offset = 985, "source offset 1001: expected 0 to 1000"),
    ];
    for (example, change, problem) in cases {
        let mut fields = examples()[*example].fields();
        change(&mut fields);
        let error = parse(&fields).expect_err(problem);
        assert_eq!((error.ticket, error.fields), (17, fields), "{problem}");
        assert!(error.problem.to_string().starts_with(problem), "{} for {problem}", error.problem);
    }
}

#[test]
fn a_refusal_names_the_command() {
    let fields = CommandFields { count: 4, ..examples()[3].fields() };
    assert_eq!(
        parse(&fields).unwrap_err().to_string(),
        "command 17 (SCATTER with flags 1, peer 0, 0 bytes from window 0 at 0 to window 0 at 68, word 1, count 4, list \
         5, reserved 0): count 4: expected 1 to 3; correct the kernel that pushed it"
    );
    let fields = CommandFields { kind: 77, ..CommandFields::default() };
    let text = parse(&fields).unwrap_err().to_string();
    assert!(text.starts_with("command 17 (kind 77 with flags 0"), "{text}");
}

#[test]
fn lengths_in_a_list_are_checked_for_each_peer() {
    let limits = limits();
    let fields = CommandFields { destination_offset: 20, ..examples()[3].fields() };
    let last = &limits.templates[0].members[2];
    let windows = limits.scatter_windows(&fields).unwrap();
    assert_eq!(windows.check(last, 48), Ok((16, 52)));
    for (length, problem) in [
        (49, "destination offset 52: expected 0 to 51"),
        (101, "destination offset 52: expected none"),
        (2049, "length in the list 2049: expected 0 to 2048"),
        (u32::MAX, "length in the list 4294967295: expected 0 to 2048"),
    ] {
        let refused = windows.check(last, length).unwrap_err();
        assert_eq!(refused.to_string(), problem);
    }
}

#[test]
fn without_templates_words_or_windows_nothing_is_admitted() {
    let none = Limits {
        windows: Vec::new(),
        holds: Vec::new(),
        templates: Vec::new(),
        list_lengths: 0,
        ..limits()
    };
    for command in examples() {
        assert!(none.check(0, &command.fields()).is_err());
    }
    let none = Limits { holds: vec![false, true, false], ..none };
    let problem = none.check(0, &examples()[0].fields()).unwrap_err().problem;
    assert_eq!(problem.to_string(), "source window 0: expected none");
}

/// Fields near the limits, changed from any example.
fn near() -> impl Strategy<Value = CommandFields> {
    let small = || prop_oneof![4 => 0..5u64, 1 => any::<u64>()];
    let wide = || prop_oneof![4 => 0..5000u64, 1 => any::<u64>()];
    let changes = proptest::collection::vec((0..12u8, small(), wide()), 0..4);
    (0..6usize, changes).prop_map(|(example, changes)| {
        let mut fields = examples()[example].fields();
        for (field, small, wide) in changes {
            match field {
                0 => fields.kind = small as u8,
                1 => fields.flags = small as u8,
                2 => fields.peer = small as u16,
                3 => fields.length = wide,
                4 => fields.source_window = small as u16,
                5 => fields.destination_window = small as u16,
                6 => fields.word = small as u32,
                7 => fields.reserved = small as u32,
                8 => fields.source_offset = wide,
                9 => fields.count = small as u32,
                10 => fields.destination_offset = wide,
                _ => fields.list = small as u32,
            }
        }
        fields
    })
}

fn is_inside(limits: &Limits, rank: u32, place: Place, added: u64, length: u64) -> bool {
    let bytes = limits.windows[usize::from(place.window)][rank as usize];
    u128::from(place.offset) + u128::from(added) + u128::from(length) <= bytes.into()
}

/// True if a command may be carried out, by rules that are written down a second time here.
fn is_right(command: &Command, limits: &Limits) -> bool {
    let is_peer = |peer: &Rank| peer.0 < limits.ranks && *peer != limits.rank;
    let holds = |target: &Target| limits.holds.get(target.word as usize) == Some(&target.hold);
    match command {
        Command::Put { peer, target, source, destination, length } => {
            is_peer(peer)
                && holds(target)
                && (1..=limits.max_put_bytes).contains(length)
                && is_inside(limits, limits.rank.0, *source, 0, *length)
                && is_inside(limits, peer.0, *destination, 0, *length)
        }
        Command::Signal { peer, target } => is_peer(peer) && holds(target),
        Command::Scatter { template, target, source, destination, count, list } => {
            let members = &limits.templates[usize::from(*template)].members;
            let inside = |each: &TemplateMember| {
                is_inside(limits, limits.rank.0, *source, each.source_offset, 0)
                    && is_inside(limits, each.peer.0, *destination, each.destination_offset, 0)
            };
            holds(target)
                && *count > 0
                && members[..*count as usize].iter().all(inside)
                && u64::from(*list) + u64::from(*count) <= limits.list_lengths.into()
        }
        Command::Release { peer, word, count } => {
            is_peer(peer) && limits.holds[*word as usize] && *count > 0
        }
        Command::Drained { word } => (*word as usize) < limits.holds.len(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 4096 }, ..ProptestConfig::default() })]

    /// A random slot that is admitted has not lost a bit and is within all limits.
    #[test]
    fn random_bytes_are_refused_or_right(payloads in any::<Payloads>()) {
        let fields = CommandFields::from_payloads(&payloads);
        prop_assert_eq!(fields.payloads(), payloads);
        if let Ok(command) = parse(&fields) {
            prop_assert!(command.fields() == fields && is_right(&command, &limits()));
        }
    }

    #[test]
    fn fields_near_their_limits_are_refused_or_right(fields in near()) {
        match parse(&fields) {
            Ok(command) => prop_assert!(command.fields() == fields && is_right(&command, &limits())),
            Err(error) => {
                let Problem { value, least, most, .. } = error.problem;
                prop_assert!(!(least..=most).contains(&value));
            }
        }
    }
}
