//! Placement for shareable memory.

/// Page placement for shareable memory: NUMA node and page size. For example,
/// `Placement { numa_node: Some(1), huge_pages: true }`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// NUMA node for every page. The binding is strict (`MPOL_BIND`): no page comes from another node,
    /// whichever process touches it first. `None` leaves the node to the kernel.
    pub numa_node: Option<u32>,
    /// Huge pages (2 MiB) that the system has reserved (hugetlb). All are allocated at once, so that a
    /// lack of pages is an error here rather than a signal at the first access.
    pub huge_pages: bool,
}
