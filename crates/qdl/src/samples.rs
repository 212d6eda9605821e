//! LoadGen's sample library: samples from a file or a generator, loaded into registered memory.

use crate::error::{Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use weft_fabric::Memory;
use weft_loadgen::SampleLibrary;

/// Sample offsets in memory are multiples of this.
const ALIGNMENT: u64 = 64;
/// LoadGen loads a few more samples than the performance count where a query has several.
const EXTRA: usize = 64;
/// Place for a sample that is not in memory.
const NOWHERE: u32 = u32::MAX;

/// Equally sized samples.
#[derive(Debug)]
pub struct Samples {
    memory: Arc<Memory>,
    bytes: u64,
    stride: u64,
    performance: usize,
    /// Each sample's place in memory.
    places: Box<[AtomicU32]>,
    free: Mutex<Vec<u32>>,
    /// `None`: made up.
    file: Option<File>,
}

impl Samples {
    /// `total` samples with `bytes` each, `performance` of them in memory at a time. `file` has all samples
    /// concatenated; without one, sample i is the splitmix64 sequence with seed i.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a number; [`Error::Samples`] for another file size; memory errors.
    pub fn new(
        total: usize,
        performance: usize,
        bytes: u64,
        samples_per_query: usize,
        file: Option<&Path>,
    ) -> Result<Samples> {
        let invalid = |what, value: String, expected: &str| {
            Err(Error::Invalid { what, value, expected: expected.into() })
        };
        if bytes == 0 {
            return invalid("bytes of a sample", "0".into(), "at least 1");
        }
        if performance == 0 || performance > total || total >= NOWHERE as usize {
            let value = format!("{performance} of {total}");
            return invalid("samples in memory", value, "at least 1, and no more than there are");
        }
        let (Some(whole), Some(stride)) =
            (bytes.checked_mul(total as u64), bytes.checked_next_multiple_of(ALIGNMENT))
        else {
            return invalid("bytes of a sample", bytes.to_string(), "at most 2^64 in all samples");
        };
        let file = file.map(|path| open(path, whole)).transpose()?;
        let places = total.min(performance.saturating_add(samples_per_query.max(EXTRA)));
        let length = usize::try_from(stride.saturating_mul(places as u64)).unwrap_or(usize::MAX);
        Ok(Samples {
            memory: Arc::new(Memory::shared(length)?),
            bytes,
            stride,
            performance,
            places: (0..total).map(|_| AtomicU32::new(NOWHERE)).collect(),
            free: Mutex::new((0..places as u32).rev().collect()),
            file,
        })
    }

    /// Memory with loaded samples.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Sample size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Offset of a loaded sample in memory.
    ///
    /// # Panics
    /// For a sample that is not loaded: LoadGen issues loaded samples only.
    #[inline]
    pub fn offset(&self, index: usize) -> u64 {
        let place = self.places[index].load(Ordering::Relaxed);
        assert!(place != NOWHERE, "sample {index} is not loaded");
        u64::from(place) * self.stride
    }

    /// A sample's bytes.
    fn read(&self, index: usize, into: &mut [u8]) -> std::io::Result<()> {
        match &self.file {
            Some(file) => file.read_exact_at(into, index as u64 * self.bytes),
            None => {
                make_up(index as u64, into);
                Ok(())
            }
        }
    }
}

fn open(path: &Path, expected: u64) -> Result<File> {
    let failed = |problem: String| Error::Samples { path: path.to_owned(), problem };
    let file = weft_environment::open(path).map_err(|error| failed(error.to_string()))?;
    let length = file.metadata().map_err(|error| failed(error.to_string()))?.len();
    if length != expected {
        return Err(failed(format!(
            "{length} bytes: expected {expected}, samples times bytes of a sample"
        )));
    }
    Ok(file)
}

/// splitmix64 sequence with a seed.
fn make_up(seed: u64, into: &mut [u8]) {
    let mut state = seed;
    for word in into.chunks_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word.copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes()[..word.len()]);
    }
}

impl SampleLibrary for Samples {
    fn name(&self) -> String {
        "Weft samples".to_owned()
    }

    fn total(&self) -> usize {
        self.places.len()
    }

    fn performance(&self) -> usize {
        self.performance
    }

    /// # Panics
    /// If a sample cannot be read, or LoadGen loads more than fit: LoadGen accepts no error here.
    fn load(&self, indices: &[usize]) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sample = vec![0; self.bytes as usize];
        for &index in indices {
            if self.places[index].load(Ordering::Relaxed) != NOWHERE {
                continue;
            }
            let Some(place) = free.pop() else {
                panic!("{} samples to load: memory has none left", indices.len());
            };
            if let Err(error) = self.read(index, &mut sample) {
                panic!("sample {index} cannot be read: {error}");
            }
            self.memory.copy_in((u64::from(place) * self.stride) as usize, &sample);
            self.places[index].store(place, Ordering::Release);
        }
    }

    fn unload(&self, indices: &[usize]) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        for &index in indices {
            let place = self.places[index].swap(NOWHERE, Ordering::Relaxed);
            if place != NOWHERE {
                free.push(place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Samples, make_up};
    use weft_loadgen::SampleLibrary;

    fn sample(samples: &Samples, index: usize) -> Vec<u8> {
        let mut bytes = vec![0; samples.bytes() as usize];
        samples.memory().copy_out(samples.offset(index) as usize, &mut bytes);
        bytes
    }

    #[test]
    fn made_up_samples_differ_and_repeat() {
        let samples = Samples::new(100, 10, 21, 1, None).unwrap();
        samples.load(&[3, 4]);
        let (three, four) = (sample(&samples, 3), sample(&samples, 4));
        assert_ne!(three, four);
        samples.unload(&[3, 4]);
        samples.load(&[4, 3, 3]);
        assert_eq!((sample(&samples, 3), sample(&samples, 4)), (three, four));
        assert_ne!(samples.offset(3), samples.offset(4));
    }

    #[test]
    fn places_are_reused_for_any_number_of_loads() {
        let samples = Samples::new(1000, 10, 8, 1, None).unwrap();
        for first in (0..990).step_by(10) {
            let indices: Vec<usize> = (first..first + 10).collect();
            samples.load(&indices);
            let mut expected = vec![0; 8];
            make_up(first as u64, &mut expected);
            assert_eq!(sample(&samples, first), expected);
            samples.unload(&indices);
        }
    }

    #[test]
    fn samples_of_a_file_are_its_parts_and_its_size_is_checked() {
        let path = std::env::temp_dir().join(format!("weft-samples-{}", std::process::id()));
        std::fs::write(&path, (0..40).collect::<Vec<u8>>()).unwrap();
        let samples = Samples::new(4, 4, 10, 1, Some(&path)).unwrap();
        samples.load(&[2]);
        assert_eq!(sample(&samples, 2), (20..30).collect::<Vec<u8>>());
        let text = Samples::new(5, 4, 10, 1, Some(&path)).unwrap_err().to_string();
        assert!(text.ends_with("40 bytes: expected 50, samples times bytes of a sample"), "{text}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn numbers_that_do_not_fit_are_refused() {
        for (total, performance, bytes) in [(0, 0, 1), (5, 6, 1), (5, 0, 1), (5, 5, 0)] {
            assert!(Samples::new(total, performance, bytes, 1, None).is_err());
        }
    }
}
