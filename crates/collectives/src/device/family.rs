//! Collectives as a device operator family.

use weft_control::Rank;
use weft_gpu::{Code, Family, Phase, Record, Report};

/// Record code: a peer makes another direct call.
pub(super) const OTHER_CALL: u32 = 32;
/// Record code: a message has another length than its receive.
pub(super) const OTHER_LENGTH: u32 = 33;

/// Device collectives family.
pub static FAMILY: Family = Family {
    name: "collectives",
    first_phase: 16,
    phases: &["packets", "contributions", "results", "entry", "exit", "send", "receive"],
    order: "",
    first_code: OTHER_CALL,
    codes: 2,
    explain,
};

fn explain(record: &Record, _phase: Phase) -> Report {
    let (rank, peer) = (Rank(record.rank), record.peer.map(Rank));
    let who = peer.map_or("a peer".to_owned(), |peer| peer.to_string());
    if record.code == Code::Family(OTHER_LENGTH) {
        let (expected, seen) = (record.expected, record.seen);
        let text = format!(
            "{rank} receives {expected} bytes from {who}, which sends {seen}: pass tensors of equal bytes to send and recv, in \
             the same order on both ranks"
        );
        return Report { class: "ConfigurationMismatchError", rank: peer, text };
    }
    let text = format!(
        "{rank} and {who} make different direct calls: pass equal shapes, dtypes and options, and tensors at the same place of \
         the same symmetric allocation on all ranks"
    );
    Report { class: "ConfigurationMismatchError", rank: peer, text }
}
