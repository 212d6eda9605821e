//! Kernels of the user, written in Triton: their context, their phases as a family, and the constants of
//! `python/weft/triton/layout.py`, which is generated here.

use crate::layout;
use crate::layout::Field;
use crate::phase::{Phase, Report};
use crate::table::{MAX_RANKS, RecordLayout, TABLE_BYTES, Table, VERSION};
use crate::watch::{Code, Family, Record};
use std::fmt::Write as _;

layout! {
    /// Context of a symmetric tensor: the argument of a kernel by which it reaches the table and peers.
    pub struct Context {
        table: u64, "address of the domain's table";
        rank: u32, "this rank";
        ranks: u32, "number of ranks";
        clock: u64, "latest time at which a program has checked a wait, common to its threads";
        aborted: u32, "last value of the abort word that a program has read, common to its threads";
        reserved: u32, "0";
        shifts: [u64; MAX_RANKS], "bytes from the tensor here to that of each rank, modulo 2^64";
    }
}

/// Phases of user kernels that wait, in the order of the family's names.
const PHASES: &[(&str, &str)] =
    &[("WAIT", "a wait of a Triton kernel"), ("BARRIER", "a barrier of a Triton kernel")];

/// The family of user kernels. It has no codes of its own.
pub static FAMILY: Family = Family {
    name: "triton",
    first_phase: 64,
    phases: &[PHASES[0].1, PHASES[1].1],
    order: "",
    first_code: 64,
    codes: 0,
    explain,
};

fn explain(record: &Record, phase: Phase) -> Report {
    let text = format!("code {} in {phase}", record.code.number());
    Report { class: "DeviceError", rank: None, text }
}

/// Text of `python/weft/triton/layout.py`.
pub fn python_layout() -> String {
    let mut text = String::from(
        "\"\"\"Byte offsets and codes of the table, of records and of contexts.\n\n\
         Generated from crates/gpu/src/table.rs and crates/gpu/src/user_kernels.rs; a test compares\n\
         both.\n\"\"\"\n\nfrom typing import Final\n",
    );
    let mut constant = |about: &str, name: &str, value: u64| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n#: {about}.\n{name}: Final = {value}");
    };
    constant("Version of the table's layout", "LAYOUT_VERSION", VERSION.into());
    constant("Bytes reserved for the table", "TABLE_BYTES", TABLE_BYTES);
    constant("Limit of ranks", "MAX_RANKS", MAX_RANKS as u64);
    let structs =
        [("TABLE", Table::FIELDS), ("RECORD", RecordLayout::FIELDS), ("CONTEXT", Context::FIELDS)];
    for (prefix, fields) in structs {
        for Field { name, offset, about, .. } in fields {
            let about = about.split([';', ':']).next().unwrap_or(about);
            let name = format!("{prefix}_{}", name.to_uppercase());
            constant(&capitalised(about), &name, *offset);
        }
    }
    constant("Bytes of a context", "CONTEXT_BYTES", Context::SIZE as u64);
    constant("Code of an expired wait", "CODE_TIMEOUT", Code::Timeout.number().into());
    constant("Code of a wait that the host ended", "CODE_ABORTED", Code::Aborted.number().into());
    for ((name, about), number) in PHASES.iter().zip(FAMILY.first_phase..) {
        constant(&format!("Phase: {about}"), &format!("PHASE_{name}"), number.into());
    }
    text
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    #[test]
    fn python_has_what_is_declared() {
        let path =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../python/weft/triton/layout.py");
        let expected = python_layout();
        if std::env::var_os("BLESS").is_some() {
            fs::write(&path, &expected).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == expected, "the layout has changed: run this test with BLESS=1");
    }

    #[test]
    fn phases_have_names() {
        assert!(FAMILY.has_phase(64) && FAMILY.has_phase(65) && !FAMILY.has_phase(66));
    }
}
