//! The verbs provider: libibverbs bindings and simulated NICs everywhere; real NICs where there are some.
//!
//! Tests that need NICs are skipped, with a message, on a machine without an active port; `make rdma-lab`
//! runs them in guests with software RoCE.

#[path = "verbs/busy_owner.rs"]
mod busy_owner;
#[path = "verbs/choice.rs"]
mod choice;
#[path = "common/mod.rs"]
mod common;
#[path = "verbs/credits.rs"]
mod credits;
#[path = "verbs/faults.rs"]
mod faults;
#[path = "verbs/gpu_memory.rs"]
mod gpu_memory;
#[path = "common/layouts.rs"]
mod layouts;
#[path = "verbs/links.rs"]
mod links;
#[path = "verbs/paging.rs"]
mod paging;
#[path = "verbs/reform.rs"]
mod reform;

use weft_fabric::providers::verbs::layout;

/// Binding offsets, sizes and constants equal what a C compiler finds in the headers.
#[test]
fn layouts_are_those_of_the_headers() {
    let lines = layout();
    assert!(lines.len() > 200, "{} lines", lines.len());
    layouts::assert_equal_to_headers(&["infiniband/verbs.h"], "libibverbs-dev", &lines);
}
