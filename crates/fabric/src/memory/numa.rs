//! NUMA nodes in this machine, and binding pages to a node.

use crate::error::{Error, Result};
use std::fs::read_to_string;
use std::io;
use std::path::Path;
use std::ptr::NonNull;

const FOLDER: &str = "/sys/devices/system/node";
/// Limit for node numbers, above any kernel's limit.
const MAX_NODES: u32 = 1 << 12;

/// Node in this machine that has memory.
#[derive(Debug)]
pub(super) struct NumaNode {
    number: u32,
    /// True for the machine's only node.
    only: bool,
}

/// The node with this number.
///
/// # Errors
/// [`Error::NoNumaNode`].
pub(super) fn find(number: u32) -> Result<NumaNode> {
    let nodes = nodes(Path::new(FOLDER));
    if !nodes.contains(&number) {
        return Err(Error::NoNumaNode { node: number, nodes });
    }
    Ok(NumaNode { number, only: nodes.len() == 1 })
}

impl NumaNode {
    /// Binds a mapping's pages strictly to this node. The pages must be untouched: existing pages do not
    /// move. Pages in a memory file are bound for all processes that map it.
    ///
    /// # Errors
    /// [`Error::NumaBind`].
    pub fn bind(&self, address: NonNull<u8>, length: usize) -> Result<()> {
        match bind(address, length, self.number) {
            // Pages cannot come from another node.
            Err(error) if self.only && is_refusal(&error) => Ok(()),
            Err(source) => {
                let remedy = match source.raw_os_error() {
                    Some(libc::EPERM) => "give the container CAP_SYS_NICE, or leave numa_node out",
                    Some(libc::EINVAL) => {
                        "this process is kept from the node (cpuset): choose another"
                    }
                    _ => "leave numa_node out",
                };
                Err(Error::NumaBind { node: self.number, source, remedy })
            }
            Ok(()) => Ok(()),
        }
    }
}

/// True if the call is forbidden or absent, whatever the arguments.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS))
}

fn bind(address: NonNull<u8>, length: usize, node: u32) -> io::Result<()> {
    let mut mask = vec![0 as libc::c_ulong; node as usize / BITS + 1];
    mask[node as usize / BITS] = 1 << (node as usize % BITS);
    // The kernel reads one bit less than the count passed.
    let bits = mask.len() * BITS + 1;
    // SAFETY: it changes the policy for pages that the caller has mapped, and reads the mask, which has
    // as many bits and lives through the call.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            address.as_ptr(),
            length,
            libc::MPOL_BIND,
            mask.as_ptr(),
            bits,
            0_u32,
        )
    };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

const BITS: usize = libc::c_ulong::BITS as usize;

/// Nodes with memory, in order; node 0 on a machine without a list.
fn nodes(folder: &Path) -> Vec<u32> {
    let read = |name| read_to_string(folder.join(name)).ok().and_then(|list| parse(list.trim()));
    read("has_memory").or_else(|| read("online")).unwrap_or_else(|| vec![0])
}

/// Numbers in a list such as `0-3,8`; `None` for other text.
fn parse(list: &str) -> Option<Vec<u32>> {
    let mut nodes = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if last >= MAX_NODES {
            return None;
        }
        nodes.extend(first..=last);
    }
    Some(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(not(miri))]
    use crate::memory::{Memory, Placement};

    #[test]
    fn lists_of_nodes_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse("0"), Some(vec![0]));
        assert_eq!(parse("0-2,7,9-10"), Some(vec![0, 1, 2, 7, 9, 10]));
        for wrong in ["", "a", "1-", "-1", "0,,1", "0-4294967295", "5000"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no files")]
    fn a_machine_without_a_list_of_nodes_has_node_0() {
        assert_eq!(nodes(Path::new("/nonexistent")), [0]);
    }

    /// Policy mode and first nodes for the page at an address; `None` if the system forbids the query.
    #[cfg(not(miri))]
    fn policy(memory: &Memory) -> Option<(libc::c_int, libc::c_ulong)> {
        const MPOL_F_ADDR: u32 = 2;
        let mut mode: libc::c_int = -1;
        let mut mask = vec![0 as libc::c_ulong; MAX_NODES as usize / BITS];
        // SAFETY: it writes a mode and a mask with as many bits, for an address that is mapped.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                mask.as_mut_ptr(),
                MAX_NODES as usize,
                memory.address(),
                MPOL_F_ADDR,
            )
        };
        if answer != 0 {
            eprintln!("skipped: get_mempolicy: {}", io::Error::last_os_error());
            return None;
        }
        Some((mode, mask[0]))
    }

    #[cfg(not(miri))]
    #[test]
    fn pages_are_bound_to_their_node_for_every_process_that_maps_them() {
        let placement = Placement { numa_node: Some(0), huge_pages: false };
        let memory = Memory::shared_with(100_000, placement).expect("memory on node 0");
        let peer = Memory::map(memory.descriptor().expect("shareable"), 100_000).expect("mapped");
        for mapping in [&memory, &peer] {
            let Some(found) = policy(mapping) else { return };
            assert_eq!(found, (libc::MPOL_BIND, 1));
        }
        let anywhere = Memory::shared(100_000).expect("memory");
        assert_ne!(policy(&anywhere).map(|(mode, _)| mode), Some(libc::MPOL_BIND));
        memory.copy_in(99_999, &[7]);
        let mut byte = [0];
        peer.copy_out(99_999, &mut byte);
        assert_eq!(byte, [7]);
    }

    #[cfg(not(miri))]
    #[test]
    fn an_unknown_node_is_rejected_with_the_list_of_nodes() {
        let placement = Placement { numa_node: Some(4000), huge_pages: false };
        let error = Memory::shared_with(1, placement).expect_err("no such node").to_string();
        let begin = "NUMA node 4000: expected a node that has memory (here: 0";
        assert!(error.starts_with(begin), "{error}");
        assert!(error.ends_with("pass one of these, or leave numa_node out"), "{error}");
    }

    #[cfg(not(miri))]
    #[test]
    fn a_forbidden_binding_is_an_error_unless_the_node_is_the_only_one() {
        for only in [false, true] {
            // An unaligned address, which the kernel rejects for any node.
            let refused = NumaNode { number: 0, only }.bind(NonNull::<u8>::dangling(), 1);
            let barred =
                matches!(&refused, Err(Error::NumaBind { source, .. }) if is_refusal(source));
            assert!(refused.is_err() || only, "{refused:?}");
            assert!(!(only && barred), "{refused:?}");
        }
        assert!(is_refusal(&io::Error::from_raw_os_error(libc::EPERM)));
        assert!(!is_refusal(&io::Error::from_raw_os_error(libc::EINVAL)));
    }
}
