//! Small schedules, pinned by hand.

use weft_collectives::{
    Algorithm, AnySchedule, Collective, Listing, Op, Options, Program, Rank, Schedule, Span, build,
    verify,
};

fn all_reduce(algorithm: Algorithm, ranks: u32) -> AnySchedule {
    build(Collective::AllReduce, algorithm, ranks, &Options::default()).unwrap()
}

fn printed(schedule: &impl Schedule, rank: u32) -> String {
    let text = Listing(schedule).to_string();
    let from = text.find(&format!("\nrank {rank}")).unwrap() + 1;
    let end = text[from..].find("\nrank ").map_or(text.len(), |end| from + end + 1);
    text[from..end].to_owned()
}

#[test]
fn a_ring_of_three() {
    let ring = all_reduce(Algorithm::Ring, 3);
    assert_eq!(
        Listing(&ring).to_string(),
        "\
all-reduce by ring: 3 ranks, 3 blocks, 4 steps
rank 0
  step  0 | in[0] -> 1:out[0]; wait 2; out[2] += in[2]
  step  1 | out[2] -> 1:out[2]; wait 2; out[1] += in[1]
  step  2 | out[1] -> 1:out[1]; wait 2
  step  3 | out[0] -> 1:out[0]; wait 2
rank 1
  step  0 | in[1] -> 2:out[1]; wait 0; out[0] += in[0]
  step  1 | out[0] -> 2:out[0]; wait 0; out[2] += in[2]
  step  2 | out[2] -> 2:out[2]; wait 0
  step  3 | out[1] -> 2:out[1]; wait 0
rank 2
  step  0 | in[2] -> 0:out[2]; wait 1; out[1] += in[1]
  step  1 | out[1] -> 0:out[1]; wait 1; out[0] += in[0]
  step  2 | out[0] -> 0:out[0]; wait 1
  step  3 | out[2] -> 0:out[2]; wait 1
"
    );
}

#[test]
fn halving_doubling_of_two_and_three() {
    let two = all_reduce(Algorithm::HalvingDoubling, 2);
    assert_eq!(
        printed(&two, 0),
        "\
rank 0
  step  0 | in[1] -> 1:out[1]; wait 1; out[0] += in[0]
  step  1 | out[0] -> 1:out[0]; wait 1
"
    );
    // A base-3 level.
    let three = all_reduce(Algorithm::Hdrm, 3);
    assert_eq!(
        Listing(&three).to_string(),
        "\
all-reduce by hdrm: 3 ranks, 3 blocks, 2 steps
rank 0, 1 block of scratch
  step  0 | in[1] -> 1:scratch[0]; in[2] -> 2:out[2]; wait 1; out[0] += in[0]; wait 2; out[0] += scratch[0]
  step  1 | out[0] -> 1:out[0]; out[0] -> 2:out[0]; wait 1; wait 2
rank 1, 1 block of scratch
  step  0 | in[2] -> 2:scratch[0]; in[0] -> 0:out[0]; wait 2; out[1] += in[1]; wait 0; out[1] += scratch[0]
  step  1 | out[1] -> 2:out[1]; out[1] -> 0:out[1]; wait 2; wait 0
rank 2, 1 block of scratch
  step  0 | in[0] -> 0:scratch[0]; in[1] -> 1:out[1]; wait 0; out[2] += in[2]; wait 1; out[2] += scratch[0]
  step  1 | out[2] -> 0:out[2]; out[2] -> 1:out[2]; wait 0; wait 1
"
    );
}

#[test]
fn hdrm_of_four_and_eight() {
    let four = all_reduce(Algorithm::Hdrm, 4);
    assert_eq!(
        printed(&four, 3),
        "\
rank 3, 1 block of scratch
  step  0 | in[0..2] -> 2:out[0..2]; wait 2; out[2..4] += in[2..4]
  step  1 | out[2] -> 1:scratch[0]; wait 1; out[3] += scratch[0]
  step  2 | out[3] -> 1:out[3]; wait 1
  step  3 | out[2..4] -> 2:out[2..4]; wait 2
"
    );
    let eight = all_reduce(Algorithm::Hdrm, 8);
    assert_eq!(
        printed(&eight, 5),
        "\
rank 5, 3 blocks of scratch
  step  0 | in[0..4] -> 4:out[0..4]; wait 4; out[4..8] += in[4..8]
  step  1 | out[6..8] -> 7:scratch[0..2]; wait 7; out[4..6] += scratch[0..2]
  step  2 | out[4] -> 1:scratch[2]; wait 1; out[5] += scratch[2]
  step  3 | out[5] -> 1:out[5]; wait 1
  step  4 | out[4..6] -> 7:out[4..6]; wait 7
  step  5 | out[4..8] -> 4:out[4..8]; wait 4
"
    );
}

#[test]
fn one_shot_adds_in_the_order_of_ranks() {
    let schedule = all_reduce(Algorithm::OneShot, 4);
    assert_eq!(
        printed(&schedule, 2),
        "\
rank 2, 2 blocks of scratch
  step  0 | in[0] -> 3:scratch[1]; in[0] -> 0:scratch[1]; in[0] -> 1:scratch[0]; wait 0; wait 1; \
out[0] += scratch[0]; out[0] += in[0]; wait 3; out[0] += scratch[1]
"
    );
}

#[test]
fn a_double_tree_of_four_in_one_chunk() {
    let options = Options { chunks: 1, local: 1 };
    let tree = build(Collective::AllReduce, Algorithm::Tree, 4, &options).unwrap();
    // First tree: 0 over 2 over 1 and 3. Second, mirrored: 3 over 1 over 2 and 0.
    assert_eq!(
        printed(&tree, 1),
        "\
rank 1, 1 block of scratch
          | drain 2
  step  0 | in[0] -> 2:out[0]; wait 2 lane 2; out[1] += in[1]; wait 0 lane 2; out[1] += scratch[0]; \
drain 3
  step  1 | out[1] -> 3:out[1] lane 2; wait 3 lane 3; drain 2
  step  3 | out[1] -> 2:out[1]; drain 0; out[1] -> 0:out[1]; wait 2 lane 1
"
    );
}

#[test]
fn broadcast_all_to_all_and_shares() {
    let root = Collective::Broadcast { root: Rank(1) };
    let binomial = build(root, Algorithm::Binomial, 5, &Options::default()).unwrap();
    assert_eq!(
        Listing(&binomial).to_string(),
        "\
broadcast from rank 1 by binomial: 5 ranks, 1 block, 3 steps
rank 0
          | wait 1
rank 1
  step  0 | in[0] -> 2:out[0]
  step  1 | in[0] -> 3:out[0]
  step  2 | in[0] -> 0:out[0]; out[0] = in[0]
rank 2
          | wait 1
  step  1 | out[0] -> 4:out[0]
rank 3
          | wait 1
rank 4
          | wait 2
"
    );
    let pairwise =
        build(Collective::AllToAll, Algorithm::Pairwise, 4, &Options::default()).unwrap();
    assert_eq!(
        printed(&pairwise, 1),
        "\
rank 1
  step  0 | in[0] -> 0:out[1]; out[1] = in[1]; wait 0
  step  1 | in[3] -> 3:out[1]; wait 3
  step  2 | in[2] -> 2:out[1]; wait 2
"
    );
    let halving =
        build(Collective::ReduceScatter, Algorithm::HalvingDoubling, 4, &Options::default())
            .unwrap();
    assert_eq!(
        printed(&halving, 2),
        "\
rank 2, 2 blocks of scratch
  step  0 | in[0..2] -> 0:scratch[0..2]; wait 0; scratch[0..2] += in[2..4]
  step  1 | scratch[1] -> 3:out[0]; wait 3; out[0] += scratch[0]
"
    );
}

#[test]
fn numbers_of_steps() {
    let steps = |algorithm, ranks| all_reduce(algorithm, ranks).steps();
    assert_eq!(steps(Algorithm::Ring, 64), 126);
    assert_eq!(steps(Algorithm::Hdrm, 64), 12);
    // 96 is 3 times 32; 100 is 96 and 4 folded ranks, 7 times 16 is 112.
    assert_eq!(steps(Algorithm::Hdrm, 96), 12);
    assert_eq!(steps(Algorithm::Hdrm, 100), 12);
    assert_eq!(steps(Algorithm::Hdrm, 112), 10);
    assert_eq!(steps(Algorithm::Hdrm, 65536), 32);
    assert_eq!(steps(Algorithm::TwoShot, 64), 2);
}

#[test]
fn a_program_survives_json_and_errors_name_their_location() {
    let program = Program::new(&all_reduce(Algorithm::Hdrm, 3));
    let text = program.to_json();
    let read = Program::from_json(&text).unwrap();
    assert_eq!(read, program);
    verify(&read).unwrap();

    let error_of = |text: &str| Program::from_json(text).unwrap_err().to_string();
    assert!(error_of("{").starts_with("not a program: EOF"));
    assert!(error_of(&text.replace("schedule-1", "schedule-9")).contains("weft-schedule-9"));
    let error = error_of(&text.replacen("\"lane\": 1,", "", 1));
    assert!(error.contains("missing field `lane` at line"), "{error}");
    let error = error_of(&text.replacen("\"lane\": 1,", "\"lane\": 1, \"line\": 1,", 1));
    assert!(error.contains("unknown field `line`"), "{error}");
    let error = error_of(&text.replacen("\"to\": 1", "\"to\": 9", 1));
    assert_eq!(
        error,
        "rank 0, operation 0 (write in[1] -> rank 9 scratch[0], lane 0, step 0): there is no rank 9"
    );
    let error = error_of(&text.replacen("\"first\": 1,", "\"first\": 4294967295,", 1));
    assert_eq!(
        error,
        "rank 0, operation 0 (write in[4294967295] -> rank 1 scratch[0], lane 0, step 0): in[4294967295] \
         does not fit: rank 0 has 3 blocks there"
    );
    let mut short = program.clone();
    short.scratch_blocks.pop();
    assert!(error_of(&short.to_json()).contains("scratch_blocks has 2 entries for 3 ranks"));
    let huge = Program { blocks: u32::MAX, ..program };
    assert!(verify(&huge).unwrap_err().to_string().contains("at most 16777216 allowed"));
}

#[test]
fn an_impossible_schedule_is_an_error_with_its_reason() {
    let error_of = |collective, algorithm, ranks, local| {
        let options = Options { local, ..Options::default() };
        build(collective, algorithm, ranks, &options).unwrap_err().to_string()
    };
    assert_eq!(
        error_of(Collective::AllToAll, Algorithm::Ring, 4, 1),
        "ring does not compute all-to-all: use one of direct, pairwise, direct-read"
    );
    assert_eq!(
        error_of(Collective::AllReduce, Algorithm::Hierarchical, 6, 4),
        "6 ranks: expected a multiple of 4"
    );
    assert_eq!(
        error_of(Collective::Broadcast { root: Rank(4) }, Algorithm::Chain, 4, 1),
        "the root is 4: expected 0 to 3"
    );
    assert!(
        error_of(Collective::AllReduce, Algorithm::Ring, 0, 1)
            .starts_with("the number of ranks is 0")
    );
    assert_eq!("hdrm".parse::<Algorithm>().unwrap(), Algorithm::Hdrm);
    assert!("nccl".parse::<Algorithm>().unwrap_err().to_string().contains("ring, tree, hd"));
}

#[test]
fn blocks_of_uneven_vectors() {
    let ring = all_reduce(Algorithm::Ring, 3);
    let bytes = |first| ring.span_bytes(Rank(0), Span::output(first, 1), 10);
    assert_eq!([bytes(0), bytes(1), bytes(2)], [3, 3, 4]);
    assert_eq!(ring.span_bytes(Rank(0), Span::input(0, 3), 10), 10);
    assert_eq!(ring.span_bytes(Rank(0), Span::scratch(0, 2), 10), 8);
    let gather = build(Collective::AllGather, Algorithm::Ring, 3, &Options::default()).unwrap();
    assert_eq!(gather.span_bytes(Rank(2), Span::input(0, 1), 10), 4);
    let Op::Write { to, source, target, .. } = gather.op(Rank(2), 0) else { panic!() };
    assert_eq!(gather.write_bytes(Rank(2), source, to, target, 10), 4);
}
