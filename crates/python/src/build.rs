//! Build of this native module: version, commit, target, profile.

use pyo3::prelude::*;

/// Version, commit, target and profile of the native module.
#[pyclass(frozen, get_all, module = "weft._native")]
pub struct BuildInfo {
    /// The version of Weft.
    version: &'static str,
    /// The commit it was built from, or "unknown" outside a git checkout.
    commit: &'static str,
    /// The target triple it was built for.
    target: &'static str,
    /// The optimisation it was built with: "debug" or "release".
    profile: &'static str,
}

#[pymethods]
impl BuildInfo {
    fn __repr__(&self) -> String {
        let Self { version, commit, target, profile } = self;
        format!(
            "BuildInfo(version='{version}', commit='{commit}', target='{target}', profile='{profile}')"
        )
    }
}

/// Version, commit, target and profile of the native module.
#[pyfunction]
pub fn build_info() -> BuildInfo {
    BuildInfo {
        version: env!("CARGO_PKG_VERSION"),
        commit: env!("WEFT_BUILD_COMMIT"),
        target: env!("WEFT_BUILD_TARGET"),
        profile: env!("WEFT_BUILD_PROFILE"),
    }
}
