//! Reduction throughput next to a copy, in bytes read and written.
//!
//! `cargo bench -p weft-collectives`. On a shared machine, take the best result from several runs.

#![allow(missing_docs, reason = "what criterion_group makes has none")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use weft_collectives::reduction::{Element, Reduction, combine, combine_all, divide};

const SIZES: [(&str, usize); 2] = [("16 KiB", 16 << 10), ("16 MiB", 16 << 20)];
const ELEMENTS: [Element; 4] = [Element::F32, Element::Bf16, Element::F16, Element::I64];

/// Vectors with `bytes` zeros each, resident in memory.
fn vectors<const N: usize>(bytes: usize) -> [Vec<u8>; N] {
    [(); N].map(|()| {
        let mut vector = vec![1; bytes];
        vector.fill(0);
        vector
    })
}

fn copies(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("copy");
    for (size, bytes) in SIZES {
        let [mut target, source] = vectors(bytes);
        group.throughput(Throughput::Bytes(2 * bytes as u64));
        group.bench_function(size, |bencher| {
            bencher.iter(|| black_box(&mut target).copy_from_slice(black_box(&source)));
        });
    }
}

fn sums(criterion: &mut Criterion) {
    for (size, bytes) in SIZES {
        let mut group = criterion.benchmark_group(format!("sum of {size}"));
        let [mut target, a, b] = vectors(bytes);
        group.throughput(Throughput::Bytes(3 * bytes as u64));
        for element in ELEMENTS {
            let count = bytes / element.bytes();
            let (target, a, b) = (target.as_mut_ptr(), a.as_ptr(), b.as_ptr());
            group.bench_function(format!("{element}"), |bencher| {
                // SAFETY: three vectors with `count` elements each.
                bencher.iter(|| unsafe { combine(Reduction::Sum, element, target, a, b, count) });
            });
            group.bench_function(format!("{element} in place"), |bencher| {
                // SAFETY: as above; the target is a source.
                bencher.iter(|| unsafe {
                    combine(Reduction::Sum, element, target, target, b, count);
                });
            });
        }
    }
}

fn others(criterion: &mut Criterion) {
    let bytes = 16 << 10;
    let mut group = criterion.benchmark_group("16 KiB");
    let [mut target, a, b, c, d] = vectors(bytes);
    let sources = [a.as_ptr(), b.as_ptr(), c.as_ptr(), d.as_ptr()];
    let target = target.as_mut_ptr();
    for element in ELEMENTS {
        let count = bytes / element.bytes();
        group.throughput(Throughput::Bytes(3 * bytes as u64));
        group.bench_function(format!("minimum of {element}"), |bencher| {
            // SAFETY: three vectors with `count` elements each.
            bencher.iter(|| unsafe {
                combine(Reduction::Min, element, target, sources[0], sources[1], count);
            });
        });
        group.throughput(Throughput::Bytes(5 * bytes as u64));
        group.bench_function(format!("sum of four vectors of {element}"), |bencher| {
            // SAFETY: five vectors with `count` elements each.
            bencher.iter(|| unsafe {
                combine_all(Reduction::Sum, element, target, &sources, count);
            });
        });
        group.throughput(Throughput::Bytes(2 * bytes as u64));
        group.bench_function(format!("average of {element}"), |bencher| {
            // SAFETY: two vectors with `count` elements each.
            bencher.iter(|| unsafe { divide(element, target, sources[0], count, 7) });
        });
    }
}

criterion_group!(benches, copies, sums, others);
criterion_main!(benches);
