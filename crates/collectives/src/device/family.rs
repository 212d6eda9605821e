//! Collectives as a family of device operators.

use weft_gpu::{Family, Phase, Record, Report};

/// The family of device collectives. It has no codes of its own.
pub static FAMILY: Family = Family {
    name: "collectives",
    first_phase: 16,
    phases: &["packets", "contributions", "results"],
    order: "",
    first_code: 32,
    codes: 0,
    explain,
};

fn explain(record: &Record, phase: Phase) -> Report {
    let text = format!("code {} in {phase}", record.code.number());
    Report { class: "DeviceError", rank: None, text }
}
