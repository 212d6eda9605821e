//! Provider verbs: bindings of libibverbs everywhere; NICs where there are some.
//!
//! Tests that need NICs are skipped, with a message, on a machine without an active port; `make rdma-lab`
//! runs them in guests with software RoCE.

#[path = "verbs/choice.rs"]
mod choice;
#[path = "common/layouts.rs"]
mod layouts;

use weft_fabric::providers::verbs::layout;

/// Offsets, sizes and constants of the bindings equal those that a C compiler finds in the headers.
#[test]
fn layouts_are_those_of_the_headers() {
    let lines = layout();
    assert!(lines.len() > 200, "{} lines", lines.len());
    layouts::assert_equal_to_headers(&["infiniband/verbs.h"], "libibverbs-dev", &lines);
}
