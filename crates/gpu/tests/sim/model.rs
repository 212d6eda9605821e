//! Model: everything that the ranks have put and seen, which one process knows.

use weft_fabric::Rank;

/// Bytes that one round brings.
pub struct Round {
    pub offset: u64,
    pub bytes: Vec<u8>,
}

/// One word from one source at one destination.
#[derive(Default)]
pub struct Word {
    /// Rounds in the order in which the source's kernel has pushed them.
    pub sent: Vec<Round>,
    /// Leading rounds that the destination's word has counted.
    pub seen: u64,
    /// Rounds that the destination has given back.
    pub released: u64,
}

pub struct Model {
    words: Vec<Word>,
    each: usize,
    ranks: usize,
    /// Ranks whose kernels push no more puts.
    pub finished: Vec<bool>,
}

impl Model {
    pub fn new(ranks: usize, each: usize) -> Model {
        let mut words = Vec::new();
        words.resize_with(ranks * ranks * each, Word::default);
        Model { words, each, ranks, finished: vec![false; ranks] }
    }

    pub fn word(&mut self, source: Rank, destination: Rank, word: u32) -> &mut Word {
        let at = (source.index() * self.ranks + destination.index()) * self.each + word as usize;
        &mut self.words[at]
    }

    /// True if all that was put to `destination` was seen and given back.
    pub fn is_over(&mut self, destination: Rank) -> bool {
        let each = self.each as u32;
        self.finished.iter().all(|finished| *finished)
            && (0..self.ranks as u32).map(Rank).all(|source| {
                (0..each).all(|word| {
                    let word = self.word(source, destination, word);
                    word.released == word.sent.len() as u64
                })
            })
    }
}
