//! Credentials of the process at the other end of a Unix socket.
//!
//! The kernel translates them into this process's namespaces. A process in another container has number 0
//! here, unless that PID namespace lies inside this one. `rustix::net::UCred` cannot hold that number, so
//! the option is read by `libc` (docs/rustix-peercred.md).

use rustix::fd::{AsFd, AsRawFd};
use rustix::process::Pid;
use std::io;

/// Process credentials from when it connected, or began to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerCredentials {
    /// Pid here; `None` if this PID namespace does not show it.
    pub process: Option<Pid>,
    /// Effective user, by number here; [`OVERFLOW_USER`] also stands for every user without a number.
    pub user: u32,
}

/// Number that the kernel reports for users without one in a user namespace.
pub(super) const OVERFLOW_USER: u32 = 65534;

impl PeerCredentials {
    /// Reads the other end's credentials.
    ///
    /// # Errors
    /// Errors from `getsockopt`.
    pub fn of(socket: impl AsFd) -> io::Result<PeerCredentials> {
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = size_of_val(&found) as libc::socklen_t;
        let socket = socket.as_fd();
        // SAFETY: the descriptor is open, and the kernel writes at most `length` bytes to `found`, for which all are
        // valid.
        let status = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut length,
            )
        };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        let process = if found.pid > 0 { Pid::from_raw(found.pid) } else { None };
        Ok(PeerCredentials { process, user: found.uid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    #[cfg_attr(miri, ignore = "miri has no credentials of sockets")]
    fn both_ends_of_a_socket_of_one_process_are_of_this_process() {
        let flags = SocketFlags::CLOEXEC;
        let (end, _other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let user = rustix::process::geteuid().as_raw();
        let process = Some(rustix::process::getpid());
        assert_eq!(PeerCredentials::of(&end).unwrap(), PeerCredentials { process, user });
    }

    /// A socket that is inherited into a PID namespace where the process that made it has no number.
    #[test]
    #[cfg_attr(miri, ignore = "miri has no credentials of sockets")]
    fn a_process_of_a_pid_namespace_outside_of_this_one_has_no_number() {
        let flags = SocketFlags::CLOEXEC;
        let (end, _other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let user = rustix::process::geteuid().as_raw();
        let forked = std::thread::spawn(move || {
            // SAFETY: it moves later children of this thread, which ends with the test.
            if unsafe { libc::unshare(libc::CLONE_NEWPID) } != 0 {
                println!("skipped: {}", io::Error::last_os_error());
                return 0;
            }
            // SAFETY: the child makes system calls only, and ends by the last.
            match unsafe { libc::fork() } {
                0 => {
                    let expected = PeerCredentials { process: None, user };
                    let found = PeerCredentials::of(&end).ok();
                    let code = if found == Some(expected) { 0 } else { 1 };
                    // SAFETY: it ends the child.
                    unsafe { libc::_exit(code) }
                }
                child => {
                    let mut status = 0;
                    // SAFETY: the status is valid for a write.
                    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                    status
                }
            }
        });
        assert_eq!(forked.join().unwrap(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no credentials of sockets")]
    fn a_descriptor_that_is_no_socket_has_none() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(PeerCredentials::of(&file).unwrap_err().raw_os_error(), Some(libc::ENOTSOCK));
    }
}
