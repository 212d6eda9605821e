//! Reproducible sums: the same bits as the sum in rank order, for every configuration.

use crate::{KINDS, Member, on_threads};
use weft_collectives::{
    Algorithm, Call, Collective, CollectivesConfig, Element, Options, Reduction, RunError, Scale,
};
use weft_fabric::random::SplitMix64;

/// Random values from 2^-20 to 2^20 with both signs: the sum's bits show the order.
fn addends(length: usize, seed: u64, rank: usize) -> Vec<f32> {
    let mut random = SplitMix64::new(seed ^ (rank as u64 + 1) << 40);
    let one = |bits: u64| {
        let (sign, exponent) = ((bits & 1) << 31, (107 + (bits >> 8) % 41) << 23);
        f32::from_bits((sign | exponent | (bits >> 32 & 0x7f_ffff)) as u32)
    };
    (0..length).map(|_| one(random.bits())).collect()
}

/// Bits for the sums in rank order.
fn sums_in_rank_order(length: usize, seed: u64, ranks: usize) -> Vec<u32> {
    let mut sums = addends(length, seed, 0);
    for rank in 1..ranks {
        sums.iter_mut().zip(addends(length, seed, rank)).for_each(|(sum, one)| *sum += one);
    }
    sums.into_iter().map(f32::to_bits).collect()
}

/// This rank's result bits, or the error.
fn reduced(
    member: &Member,
    collective: Collective,
    algorithm: Option<Algorithm>,
    input: &[f32],
    ranks: usize,
) -> Result<Vec<u32>, RunError> {
    let shares = if collective.shares() { ranks } else { 1 };
    let mut output = vec![0f32; input.len() / shares];
    member.run(&Call {
        collective,
        element: Element::F32,
        reduction: Reduction::Sum,
        scale: Scale::None,
        elements: input.len() as u64,
        input: input.as_ptr().cast(),
        output: output.as_mut_ptr().cast(),
        algorithm: algorithm.map(|algorithm| (algorithm, Options::default())),
    })?;
    Ok(output.into_iter().map(f32::to_bits).collect())
}

/// Every channel count, chunk length, and way to read inputs.
fn configurations() -> impl Iterator<Item = CollectivesConfig> {
    let channels = [(1, 1 << 20), (4, 1 << 20), (3, 8192), (2, 2048)];
    channels.into_iter().flat_map(|(channels, channel_bytes)| {
        [None, Some(0), Some(4096), Some(u64::MAX)].map(|in_place_bytes| CollectivesConfig {
            channels,
            channel_bytes,
            in_place_bytes,
            reproducible: true,
            reduction_threads: 1,
        })
    })
}

#[test]
fn reproducible_sums_have_the_same_bits_for_every_configuration_and_algorithm() {
    for ranks in [2usize, 3, 5] {
        // Lengths are divisible by the rank count.
        let lengths = [30, 990, 60 * 1237];
        let sums = [0, 1, 2].map(|seed| sums_in_rank_order(lengths[seed], seed as u64, ranks));
        for (number, config) in configurations().enumerate() {
            let kind = KINDS[number % KINDS.len()];
            on_threads(ranks as u32, kind, config, |member| {
                for (seed, length) in lengths.into_iter().enumerate() {
                    let input = addends(length, seed as u64, member.rank());
                    let (all, share) = (&sums[seed], length / ranks);
                    let own = &all[member.rank() * share..][..share];
                    for (collective, expected, algorithms) in [
                        (
                            Collective::AllReduce,
                            &all[..],
                            &[None, Some(Algorithm::OneShot), Some(Algorithm::TwoShot)][..],
                        ),
                        (Collective::ReduceScatter, own, &[None, Some(Algorithm::Direct)]),
                    ] {
                        for &algorithm in algorithms {
                            let bits = reduced(member, collective, algorithm, &input, ranks);
                            assert!(
                                bits.unwrap() == expected,
                                "{collective} by {algorithm:?}, {length} elements, {config:?}"
                            );
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn other_algorithms_give_other_bits_and_are_rejected_for_reproducible_sums() {
    let (ranks, length) = (3, 3000);
    let expected = sums_in_rank_order(length, 7, ranks);
    for reproducible in [false, true] {
        let config = CollectivesConfig { reproducible, ..CollectivesConfig::default() };
        on_threads(ranks as u32, KINDS[0], config, |member| {
            let input = addends(length, 7, member.rank());
            let ring = Some(Algorithm::Ring);
            let found = reduced(member, Collective::AllReduce, ring, &input, ranks);
            if !reproducible {
                assert_ne!(found.unwrap(), expected);
                return;
            }
            let text = "algorithm: ring: expected one that adds in rank order (one-shot, two-shot, direct-read)";
            assert_eq!(found.unwrap_err().to_string(), text);
            let found = reduced(member, Collective::AllReduce, None, &input, ranks);
            assert_eq!(found.unwrap(), expected);
        });
    }
}

#[test]
fn selection_for_many_ranks_and_long_vectors_adds_in_rank_order() {
    // Beyond the rank count and the length from which a ring is selected otherwise.
    let (ranks, length) = (10, 280_000);
    let config = CollectivesConfig { reproducible: true, ..CollectivesConfig::default() };
    let expected = sums_in_rank_order(length, 11, ranks);
    on_threads(ranks as u32, KINDS[1], config, |member| {
        let input = addends(length, 11, member.rank());
        let (rank, share) = (member.rank(), length / ranks);
        let all = reduced(member, Collective::AllReduce, None, &input, ranks).unwrap();
        assert!(all == expected);
        let own = reduced(member, Collective::ReduceScatter, None, &input, ranks).unwrap();
        assert!(own == expected[rank * share..][..share]);
    });
}

#[test]
fn reproducible_sums_of_16_bit_floats_are_rounded_alike_by_all_algorithms() {
    let (ranks, length) = (4, 4000);
    let halves = |rank: usize| -> Vec<u16> {
        let whole = addends(length, 5, rank).into_iter();
        whole.map(|one| (one.to_bits() >> 16) as u16).collect()
    };
    let config = CollectivesConfig {
        channels: 2,
        channel_bytes: 4096,
        reproducible: true,
        ..CollectivesConfig::default()
    };
    on_threads(ranks as u32, KINDS[0], config, |member| {
        let input = halves(member.rank());
        let reduce = |collective, algorithm: Option<Algorithm>, output: &mut [u16]| {
            let algorithm = algorithm.map(|algorithm| (algorithm, Options::default()));
            let call = Call { collective, algorithm, ..sum_of_halves(&input, output) };
            member.run(&call).unwrap();
        };
        let (mut one, mut two) = (vec![0u16; length], vec![0u16; length]);
        reduce(Collective::AllReduce, Some(Algorithm::OneShot), &mut one);
        reduce(Collective::AllReduce, Some(Algorithm::TwoShot), &mut two);
        assert!(one == two);
        two.fill(0);
        reduce(Collective::AllReduce, Some(Algorithm::DirectRead), &mut two);
        assert!(one == two);
        let mut own = vec![0u16; length / ranks];
        reduce(Collective::ReduceScatter, Some(Algorithm::Direct), &mut own);
        assert!(own == one[member.rank() * own.len()..][..own.len()]);
        let mut other = vec![0u16; length];
        reduce(Collective::AllReduce, None, &mut other);
        assert!(other == one);
    });
}

/// Every sum algorithm, by a mailbox, by writes and by reads.
#[test]
fn sums_and_averages_of_16_bit_floats_are_rounded_once_by_every_algorithm() {
    let ranks = 4;
    // 60000, which overflows if added twice, and numbers from 1/8 to 255/8 whose sums float32 has exactly, in any
    // order.
    let value = |index: usize, rank: usize| match index % 3 {
        0 => 60_000.0,
        _ => ((index * 31 + rank * 97) % 255 + 1) as f32 / 8.0,
    };
    let config = CollectivesConfig { channels: 2, channel_bytes: 8192, ..Default::default() };
    for kind in KINDS {
        on_threads(ranks as u32, kind, config, |member| {
            for length in [12, 4000] {
                for collective in [Collective::AllReduce, Collective::ReduceScatter] {
                    for &algorithm in Algorithm::of(collective) {
                        for scale in [Scale::None, Scale::Average] {
                            let input: Vec<u16> =
                                (0..length).map(|i| half(value(i, member.rank()))).collect();
                            let shares = if collective.shares() { ranks } else { 1 };
                            let mut output = vec![0u16; length / shares];
                            let call = Call {
                                collective,
                                element: Element::F16,
                                scale,
                                algorithm: Some((algorithm, Options::default())),
                                ..sum_of_halves(&input, &mut output)
                            };
                            match member.run(&call) {
                                // Only shm reads memory in place.
                                Err(RunError::TooLarge { .. }) => continue,
                                run => run.unwrap(),
                            }
                            let first = if shares > 1 { member.rank() * output.len() } else { 0 };
                            for (index, seen) in output.into_iter().enumerate() {
                                let at = first + index;
                                let sum: f32 = (0..ranks).map(|rank| value(at, rank)).sum();
                                let divisor = if scale == Scale::Average { 4.0 } else { 1.0 };
                                assert_eq!(
                                    seen,
                                    half(sum / divisor),
                                    "{collective} by {algorithm}, {scale:?}, element {at} of {length}"
                                );
                            }
                        }
                    }
                }
            }
        });
    }
}

/// Code for the float16 nearest to a positive number that is at least 2^-14.
fn half(value: f32) -> u16 {
    half::f16::from_f32(value).to_bits()
}

/// 16-bit float all-reduce.
fn sum_of_halves(input: &[u16], output: &mut [u16]) -> Call {
    Call {
        collective: Collective::AllReduce,
        element: Element::Bf16,
        reduction: Reduction::Sum,
        scale: Scale::None,
        elements: input.len() as u64,
        input: input.as_ptr().cast(),
        output: output.as_mut_ptr().cast(),
        algorithm: None,
    }
}
