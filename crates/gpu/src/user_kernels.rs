//! The user's Triton kernels: context, phases as a family, and the constants in
//! `python/weft/triton/layout.py`, which is generated here.

use crate::layout;
use crate::layout::Field;
use crate::phase::{PROXY_PUSH, PROXY_WAIT, Phase, Report};
use crate::table::{MAX_RANKS, RecordLayout, TABLE_BYTES, Table, VERSION};
use crate::watch::{Code, Family, Record};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use weft_control::Rank;

layout! {
    /// Context for a symmetric tensor: the kernel argument that leads to the table and peers.
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

/// Phases in user kernels that wait, in the order of the family's names.
const PHASES: &[(&str, &str)] = &[
    ("WAIT", "a wait of a Triton kernel"),
    ("BARRIER", "a barrier of a Triton kernel"),
    ("PROXY_WAIT", "a wait for a proxy's word"),
    ("PROXY_PUSH", "a push to the proxy's ring"),
];

const _: () = assert!(PROXY_WAIT == FAMILY.first_phase + 2 && PROXY_PUSH == PROXY_WAIT + 1);

/// Code if a rank passed other arguments than this one to a fused operator.
const DISAGREEMENT: u32 = 64;
/// Maximum number of texts kept; a program has few shapes.
const MOST_TEXTS: usize = 1 << 16;

/// Argument texts for fused operators, by digest.
static TEXTS: Mutex<Option<HashMap<u32, String>>> = Mutex::new(None);

/// Keeps the text with a call's arguments for the error when ranks differ.
pub fn describe_arguments(digest: u32, text: &str) {
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    let texts = texts.get_or_insert_with(HashMap::new);
    if texts.len() < MOST_TEXTS {
        texts.entry(digest).or_insert_with(|| text.to_owned());
    }
}

fn arguments(digest: u64) -> Option<String> {
    let texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    texts.as_ref()?.get(&(digest as u32)).cloned()
}

/// Family for user kernels.
pub static FAMILY: Family = Family {
    name: "triton",
    first_phase: 64,
    phases: &[PHASES[0].1, PHASES[1].1, PHASES[2].1, PHASES[3].1],
    order: "",
    first_code: DISAGREEMENT,
    codes: 1,
    explain,
};

fn explain(record: &Record, _: Phase) -> Report {
    let peer = record.peer.map_or_else(|| "a rank".to_owned(), |peer| Rank(peer).to_string());
    let of =
        |digest| arguments(digest).unwrap_or_else(|| format!("arguments with digest {digest:08x}"));
    let (own, its) = (of(record.expected), of(record.seen));
    let text = format!(
        "{own} at {}, but {its} at {peer}: expected the same call on all ranks; pass equal shapes, dtypes and \
         options",
        Rank(record.rank)
    );
    Report { class: "ConfigurationMismatchError", rank: record.peer.map(Rank), text }
}

/// Text for `python/weft/triton/layout.py`.
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
    constant(
        "Code of a rank that passed other arguments",
        "CODE_DISAGREEMENT",
        DISAGREEMENT.into(),
    );
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
    fn a_disagreement_names_the_arguments_of_both_ranks() {
        describe_arguments(17, "weft.fused.test with batch 3");
        let mut record = Record::from_words([DISAGREEMENT, 0, 64, 1, 0, 0], 17, 0xFFFF_FFFF);
        let report = explain(&record, Phase { number: 64, name: None });
        assert_eq!((report.class, report.rank), ("ConfigurationMismatchError", Some(Rank(1))));
        let own = "weft.fused.test with batch 3 at rank 0, but ";
        assert!(report.text.starts_with(own), "{}", report.text);
        assert!(report.text.contains("digest ffffffff at rank 1"), "{}", report.text);
        describe_arguments(18, "weft.fused.test with batch 4");
        record.seen = 18;
        let report = explain(&record, Phase { number: 64, name: None });
        assert!(
            report.text.contains("but weft.fused.test with batch 4 at rank 1"),
            "{}",
            report.text
        );
    }

    #[test]
    fn phases_have_names() {
        let phases = (64..).take_while(|phase| FAMILY.has_phase(*phase));
        assert_eq!(phases.count(), PHASES.len());
        let name_of = |phase: u32| PHASES[(phase - FAMILY.first_phase) as usize].0;
        assert_eq!([name_of(PROXY_WAIT), name_of(PROXY_PUSH)], ["PROXY_WAIT", "PROXY_PUSH"]);
    }
}
