//! Node answers in tests.

/// A query's first bytes, and the sum over all.
pub fn answer(query: &[u8]) -> [u8; 16] {
    let mut answer = [0; 16];
    answer[..8].copy_from_slice(&query[..8]);
    let sum: u64 = query.iter().map(|byte| u64::from(*byte)).sum();
    answer[8..].copy_from_slice(&sum.to_le_bytes());
    answer
}
