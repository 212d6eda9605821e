//! Huge pages (2 MiB) reserved by the system (hugetlb).

use crate::error::Error;
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use std::fs::read_to_string;
use std::io;
use std::path::Path;
use std::ptr::NonNull;

/// Huge page size in bytes.
pub(super) const PAGE: usize = 2 << 20;

const FOLDER: &str = "hugepages/hugepages-2048kB";

/// Allocates a mapping's pages now, by the mapping's policy. At the first access a lack of pages would
/// raise SIGBUS: a reservation covers the system, but neither a node nor a control group.
pub(super) fn populate(address: NonNull<u8>, length: usize) -> io::Result<()> {
    // SAFETY: the mapping was made by the caller and holds no bytes yet; the call only fills it.
    match unsafe { madvise(address.as_ptr().cast(), length, Advice::LinuxPopulateWrite) } {
        Err(Errno::INVAL) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "allocating them at once needs Linux 5.14",
        )),
        answer => Ok(answer?),
    }
}

/// Error for huge pages that the system refused.
pub(super) fn refused(length: usize, node: Option<u32>, source: io::Error) -> Error {
    let folder = match node {
        Some(node) => format!("/sys/devices/system/node/node{node}/{FOLDER}"),
        None => format!("/sys/kernel/mm/{FOLDER}"),
    };
    let detail = explain(length, node, &HugePageCounts::of(Path::new(&folder)), &source);
    Error::HugePages { length, detail, source }
}

/// Huge page counts, system-wide or for a node.
struct HugePageCounts {
    all: u64,
    free: u64,
}

impl HugePageCounts {
    /// Reads the counts in a sysfs folder; `None` without pages of this size.
    fn of(folder: &Path) -> Option<HugePageCounts> {
        let number = |name: &str| read_to_string(folder.join(name)).ok()?.trim().parse().ok();
        let free: u64 = number("free_hugepages")?;
        // Nodes have no count for reserved pages, which may come from any node.
        let reserved = number("resv_hugepages").unwrap_or(0);
        Some(HugePageCounts { all: number("nr_hugepages")?, free: free.saturating_sub(reserved) })
    }
}

fn explain(
    length: usize,
    node: Option<u32>,
    pages: &Option<HugePageCounts>,
    source: &io::Error,
) -> String {
    let Some(pages) = pages else {
        return "this kernel has none; leave huge_pages out".into();
    };
    let needed = length.max(1).div_ceil(PAGE) as u64;
    // Enough pages are free, so another limit applies, such as a control group's.
    if pages.free >= needed {
        return format!(
            "{source}, with {needed} pages needed and {} free; leave huge_pages out",
            { pages.free }
        );
    }
    let wanted = pages.all.saturating_add(needed - pages.free);
    let (place, command) = match node {
        Some(node) => (
            format!(" on NUMA node {node}"),
            format!("echo {wanted} > /sys/devices/system/node/node{node}/{FOLDER}/nr_hugepages"),
        ),
        None => (String::new(), format!("sysctl -w vm.nr_hugepages={wanted}")),
    };
    format!(
        "{needed} pages needed, {} free{place}; reserve them as root (`{command}`), or leave \
         huge_pages out",
        pages.free
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none() -> io::Error {
        io::Error::from_raw_os_error(libc::ENOMEM)
    }

    #[test]
    fn the_remedy_reserves_the_missing_pages() {
        let pages = Some(HugePageCounts { all: 10, free: 1 });
        assert_eq!(
            explain(3 * PAGE + 1, None, &pages, &none()),
            "4 pages needed, 1 free; reserve them as root (`sysctl -w vm.nr_hugepages=13`), or leave \
             huge_pages out"
        );
        let of_node = explain(PAGE, Some(1), &Some(HugePageCounts { all: 2, free: 0 }), &none());
        assert!(of_node.contains("1 pages needed, 0 free on NUMA node 1"), "{of_node}");
        let command =
            "echo 3 > /sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages";
        assert!(of_node.contains(command), "{of_node}");
    }

    #[test]
    fn another_cause_than_a_lack_of_pages_is_reported() {
        let enough = explain(PAGE, None, &Some(HugePageCounts { all: 2, free: 2 }), &none());
        assert!(enough.contains("Cannot allocate memory"), "{enough}");
        let never = explain(PAGE, None, &None, &none());
        assert_eq!(never, "this kernel has none; leave huge_pages out");
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no files")]
    fn a_kernel_without_huge_pages_has_no_counts() {
        assert!(HugePageCounts::of(Path::new("/nonexistent")).is_none());
    }
}
