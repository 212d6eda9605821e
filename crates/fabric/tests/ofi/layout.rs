//! Layouts and constants compared with libfabric's headers.

#[path = "../common/layouts.rs"]
mod layouts;

use weft_fabric::providers::ofi::layout;

/// Binding offsets, sizes and constants equal what a C compiler finds in the headers.
#[test]
fn layouts_are_those_of_the_headers() {
    let lines = layout();
    assert!(lines.len() > 100, "{} lines", lines.len());
    let headers = [
        "rdma/fabric.h",
        "rdma/fi_cm.h",
        "rdma/fi_domain.h",
        "rdma/fi_endpoint.h",
        "rdma/fi_eq.h",
        "rdma/fi_errno.h",
        "rdma/fi_rma.h",
    ];
    layouts::assert_equal_to_headers(&headers, "libfabric-dev", &lines);
}
