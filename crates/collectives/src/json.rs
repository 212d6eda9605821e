//! JSON format for programs.

use crate::error::{Error, at_most};
use crate::op::{MAX_RANKS, OpLocation, Rank};
use crate::program::Program;
use crate::verify;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Value for the key `format`.
const FORMAT: &str = "weft-schedule-1";

/// Largest text, in bytes.
const MAX_TEXT: u64 = 1 << 28;

/// Limit on all ranks' operations together.
const MAX_OPERATIONS: u64 = 1 << 24;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File<'a> {
    format: String,
    schedule: Cow<'a, Program>,
}

impl Program {
    /// The program as JSON.
    pub fn to_json(&self) -> String {
        let file = File { format: FORMAT.to_owned(), schedule: Cow::Borrowed(self) };
        serde_json::to_string_pretty(&file).expect("all fields of a program have a JSON form")
    }

    /// Parses an untrusted program. All ranks, lanes, steps and spans are checked to exist; [`verify`](crate::verify())
    /// proves that the program computes the collective.
    ///
    /// # Errors
    /// [`Error::Json`] with line and column, [`Error::TooLarge`], and the errors from [`Program::check`].
    pub fn from_json(text: &str) -> Result<Program, Error> {
        at_most("bytes of JSON", text.len() as u64, MAX_TEXT)?;
        let file: File<'_> =
            serde_json::from_str(text).map_err(|error| Error::Json(error.to_string()))?;
        if file.format != FORMAT {
            let text = format!("its format is {:?}, not {FORMAT:?}", file.format);
            return Err(Error::Json(text));
        }
        let program = file.schedule.into_owned();
        program.check()?;
        Ok(program)
    }

    /// Static check: sizes within limits, and every rank, lane, step and span exists.
    ///
    /// # Errors
    /// The first fault, with rank and operation.
    pub fn check(&self) -> Result<(), Error> {
        at_most("ranks", self.ops.len() as u64, MAX_RANKS.into())?;
        let operations = self.ops.iter().map(|ops| ops.len() as u64).sum();
        at_most("operations", operations, MAX_OPERATIONS)?;
        verify::header(self)?;
        if self.scratch_blocks.len() != self.ops.len() {
            return Err(Error::Json(format!(
                "scratch_blocks has {} entries for {} ranks",
                self.scratch_blocks.len(),
                self.ops.len()
            )));
        }
        for (rank, ops) in (0..).map(Rank).zip(&self.ops) {
            for (index, &op) in (0..).zip(ops) {
                verify::operation(self, OpLocation { rank, index, op })?;
            }
        }
        Ok(())
    }
}
