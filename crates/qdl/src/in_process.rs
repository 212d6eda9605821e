//! LoadGen's system under test in this process, for comparison.

use crate::completions::Completions;
use crate::counts::Counts;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::samples::Samples;
use std::sync::{Arc, Mutex, PoisonError};
use weft_loadgen::{LoadGen, Sample, SystemUnderTest};

/// System under test in this process: copies each sample once, into a slot, and runs the model on it.
pub struct InProcess {
    samples: Arc<Samples>,
    model: Model,
    answer_bytes: usize,
    counts: Arc<Counts>,
    slots: Mutex<Slots>,
}

/// Slots in turn, as a node has them: copies go to memory that is not in a cache.
struct Slots {
    bytes: Vec<u8>,
    next: usize,
    answer: Vec<u8>,
    completions: Completions<LoadGen>,
}

impl InProcess {
    /// Maximum bytes for all slots together.
    const SLOT_BYTES: u64 = 256 << 20;

    /// System with this many slots, or as many as fit into 256 MiB.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an answer that is too short.
    pub fn new(
        loadgen: LoadGen,
        samples: Arc<Samples>,
        model: Model,
        answer_bytes: u64,
        slots: u32,
        counts: Arc<Counts>,
    ) -> Result<InProcess> {
        let least = model.min_answer_bytes();
        if answer_bytes < least {
            let (value, expected) = (answer_bytes.to_string(), format!("at least {least}"));
            return Err(Error::Invalid { what: "bytes of an answer", value, expected });
        }
        let memory = |what, bytes: u64| {
            let mut memory = Vec::new();
            let wanted = usize::try_from(bytes).unwrap_or(usize::MAX);
            memory.try_reserve_exact(wanted).map_err(|_| {
                let expected = "at most the free memory of this machine".into();
                Error::Invalid { what, value: bytes.to_string(), expected }
            })?;
            memory.resize(wanted, 0);
            Ok::<_, Error>(memory)
        };
        let fit = (InProcess::SLOT_BYTES / samples.bytes()).clamp(1, u64::from(slots.max(1)));
        let slots = Slots {
            bytes: memory("sample bytes per query", fit.saturating_mul(samples.bytes()))?,
            next: 0,
            answer: memory("bytes of an answer", answer_bytes)?,
            completions: Completions::new(loadgen, counts.clone()),
        };
        let (answer_bytes, slots) = (answer_bytes as usize, Mutex::new(slots));
        Ok(InProcess { samples, model, answer_bytes, counts, slots })
    }
}

impl SystemUnderTest for InProcess {
    fn name(&self) -> String {
        "Weft in process".to_owned()
    }

    fn issue(&self, samples: &[Sample]) {
        self.counts.add_issued(samples.len() as u64);
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let Slots { bytes, next, answer, completions } = &mut *slots;
        let length = self.samples.bytes() as usize;
        for sample in samples {
            let slot = &mut bytes[*next..*next + length];
            self.samples.memory().copy_out(self.samples.offset(sample.index) as usize, slot);
            self.model.answer(slot, &mut answer[..self.answer_bytes]);
            completions.answer(sample.id as u64, answer);
            *next = if *next + 2 * length <= bytes.len() { *next + length } else { 0 };
        }
        slots.completions.flush();
    }

    fn flush(&self) {}
}
