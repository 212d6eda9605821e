//! Measurement file: JSON, with an entry for each measured group.

use super::candidate::{candidates, collective_name};
use super::curve::Curve;
use super::model::LinkConstants;
use super::prediction::Tuning;
use crate::algorithm::{Algorithm, Options};
use crate::op::{Collective, Rank};
use crate::run_error::RunError;
use serde::{Deserialize, Serialize};

/// Value for the key `format`.
const FORMAT: &str = "weft-tuning-1";
/// Longest file, in bytes.
const MAX_TEXT: usize = 16 << 20;
/// Collectives by name; the root has no effect on times.
const COLLECTIVES: [Collective; 5] = [
    Collective::AllReduce,
    Collective::ReduceScatter,
    Collective::AllGather,
    Collective::Broadcast { root: Rank(0) },
    Collective::AllToAll,
];

/// Group that an entry belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TuningKey {
    /// Route providers, sorted, joined by `+`: for example `shm+tcp`.
    pub provider: String,
    /// Rank count.
    pub ranks: u32,
    /// Rank 0's machine, as text.
    pub machine: String,
}

/// Measurement file, and the machine on which the reading rank runs.
#[derive(Clone, Copy, Debug)]
pub struct TuningSource<'a> {
    /// File name, for errors.
    pub name: &'a str,
    /// File contents.
    pub text: &'a str,
    /// Machine, as `weft tune` names it.
    pub machine: &'a str,
}

/// Measurements for several groups.
#[derive(Clone, Debug)]
pub struct TuningFile {
    entries: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    format: String,
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    provider: String,
    ranks: u32,
    machine: String,
    /// Measurement time; not used.
    #[serde(default)]
    at: String,
    constants: LinkConstants,
    times: Vec<Times>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Times {
    collective: String,
    algorithm: String,
    chunks: u32,
    points: Vec<(u64, f64)>,
}

impl TuningFile {
    /// Parses the text in a file named `name`.
    ///
    /// # Errors
    /// [`RunError::Invalid`] with the file, the position, and what was expected there.
    pub fn from_json(name: &str, text: &str) -> Result<TuningFile, RunError> {
        let invalid = |why: String| RunError::Invalid {
            what: "tuning file",
            detail: format!("{name}: {why}; measure again with `weft tune`, or delete the file"),
        };
        if text.len() > MAX_TEXT {
            return Err(invalid(format!("{} bytes: expected at most {MAX_TEXT}", text.len())));
        }
        let file: Text =
            serde_json::from_str(text).map_err(|error| invalid(format!("not valid: {error}")))?;
        if file.format != FORMAT {
            return Err(invalid(format!("format {:?}: expected {FORMAT:?}", file.format)));
        }
        for (index, entry) in file.entries.iter().enumerate() {
            entry.check().map_err(|why| invalid(format!("entry {index}: {why}")))?;
        }
        Ok(TuningFile { entries: file.entries })
    }

    /// JSON for only one group's entry. Without an entry for the rank count: the entry for the nearest rank count, with
    /// the same providers and machine, with constants but no times.
    pub fn entry(&self, key: &TuningKey) -> Option<String> {
        let alike = |entry: &&Entry| entry.provider == key.provider && entry.machine == key.machine;
        // The last one at equal distance: later measurements are appended.
        let nearest = self.entries.iter().filter(alike).rev();
        let mut entry = nearest.min_by_key(|entry| entry.ranks.abs_diff(key.ranks))?.clone();
        if entry.ranks != key.ranks {
            entry.times.clear();
        }
        let text = Text { format: FORMAT.to_owned(), entries: vec![entry] };
        serde_json::to_string(&text).ok()
    }

    /// Measurements in the first entry.
    pub(crate) fn first(&self) -> Option<Tuning> {
        let Entry { constants, times, .. } = self.entries.first()?;
        Some(Tuning {
            constants: *constants,
            curves: times.iter().filter_map(|times| times.curve().ok()).collect(),
        })
    }
}

impl Entry {
    fn check(&self) -> Result<(), String> {
        for (name, value) in self.constants.named() {
            let may_be_zero = matches!(name, "step_s" | "post_s" | "copy_byte_s");
            let least = if may_be_zero { 0.0 } else { f64::MIN_POSITIVE };
            if !(value >= least && value <= 1e3) {
                return Err(format!("{name} {value}: expected seconds of at most 1000, above 0"));
            }
        }
        self.times.iter().try_for_each(|times| times.curve().map(drop))
    }
}

impl Times {
    /// Checked form.
    fn curve(&self) -> Result<Curve, String> {
        let known = COLLECTIVES.map(collective_name);
        let at = known.iter().position(|name| *name == self.collective).ok_or_else(|| {
            format!("collective {:?}: expected one of {}", self.collective, known.join(", "))
        })?;
        let algorithm: Algorithm = self.algorithm.parse().map_err(|error| format!("{error}"))?;
        let is_candidate = |(one, options): (Algorithm, Options)| {
            one == algorithm && options.chunks == self.chunks
        };
        if !candidates(COLLECTIVES[at]).any(is_candidate) {
            let (name, chunks) = (known[at], self.chunks);
            return Err(format!("{algorithm} with {chunks} chunks: no candidate of {name}"));
        }
        let what = || format!("{} by {algorithm}", known[at]);
        if self.points.is_empty() {
            return Err(format!("{}: no points, expected at least one", what()));
        }
        for (index, &(bytes, seconds)) in self.points.iter().enumerate() {
            let before = index.checked_sub(1).map_or(0, |before| self.points[before].0);
            if bytes <= before || !(seconds > 0.0 && seconds <= 1e6) {
                let expected = "rising sizes, and seconds above 0";
                return Err(format!("{}: point {bytes}, {seconds}: expected {expected}", what()));
            }
        }
        let points = self.points.clone();
        Ok(Curve { collective: known[at], algorithm, chunks: self.chunks, points })
    }
}
