//! JSON in, JSON out.

use crate::error::Error;
use crate::outcome::Outcome;
use crate::spec::Spec;

/// Told how far a run is, as a share from 0 to 1 and in words; false stops it.
pub type Progress<'a> = dyn FnMut(f64, &str) -> bool + 'a;

/// Runs the scenario `spec_json` and gives back its outcome.
pub fn run(spec_json: &str, progress: &mut Progress<'_>) -> Result<String, Error> {
    let outcome = run_spec(&Spec::from_json(spec_json)?, progress)?;
    Ok(serde_json::to_string(&outcome)?)
}

/// The same with values.
pub fn run_spec(spec: &Spec, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
    match spec {
        Spec::Collective(spec) => crate::collective::run(spec, progress),
        Spec::Train(spec) => crate::train::run(spec, progress),
        Spec::Eflops(spec) => crate::eflops::run(spec, progress),
        Spec::Mixture(spec) => crate::mixture::run(spec, progress),
        Spec::Moe(spec) => crate::moe::run(spec, progress),
        Spec::Dlrm(spec) => crate::dlrm::run(spec, progress),
        Spec::Query(spec) => crate::query::run(spec, progress),
    }
}
