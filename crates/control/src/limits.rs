//! Process and host limits that a failed system call has reached: name, value, remedy.

use rustix::process::{Resource, getrlimit};
use std::io;

/// Local ports that connections and listeners without an explicit port take.
const PORT_RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";

/// True if a system call failed because this process or host ran out of a resource.
pub fn is_exhausted(error: &io::Error) -> bool {
    use libc::{EMFILE, ENFILE, ENOBUFS, ENOMEM};
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOBUFS | ENOMEM))
}

/// System call error, with the limit that it has reached, if any.
pub fn described(error: &io::Error) -> String {
    format!("{error}{}", remedy(error))
}

/// Limit that a system call error has reached, as a message suffix; empty for other errors.
pub fn remedy(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EMFILE) => of(Resource::Nofile, "file descriptors", "RLIMIT_NOFILE", "-n"),
        Some(libc::ENFILE) => {
            let limit = value("/proc/sys/fs/file-max");
            format!("; the host has its {limit} files (fs.file-max) open: close some, or raise it")
        }
        Some(libc::EFBIG) => of(Resource::Fsize, "bytes in a file", "RLIMIT_FSIZE", "-f"),
        Some(libc::ENOMEM) if getrlimit(Resource::As).current.is_some() => {
            of(Resource::As, "bytes of address space", "RLIMIT_AS", "-v")
        }
        Some(libc::ENOMEM) => {
            let maps = value("/proc/sys/vm/max_map_count");
            format!(
                "; the host has no memory left, or this process its {maps} mappings (vm.max_map_count)"
            )
        }
        Some(libc::ENOBUFS) => {
            "; the host has no memory left for sockets (net.core, net.ipv4.tcp_mem)".into()
        }
        Some(libc::ENOSPC) => {
            let watches = value("/proc/sys/fs/epoll/max_user_watches");
            format!(
                "; if it is of epoll: this user has its {watches} watches (fs.epoll.max_user_watches)"
            )
        }
        _ => String::new(),
    }
}

/// Local port range, as a message suffix for a socket that found no local port.
pub fn ports_remedy() -> String {
    let range = value(PORT_RANGE);
    let range = range.split_whitespace().collect::<Vec<_>>().join(" to ");
    format!(
        "; the local ports {range} (net.ipv4.ip_local_port_range) are in use: widen the range, or end their users"
    )
}

/// Thread limits, as a message suffix for a thread that could not be started.
pub fn threads_remedy() -> String {
    let processes = of(Resource::Nproc, "threads of its user", "RLIMIT_NPROC", "-u");
    let space = of(Resource::As, "bytes of address space", "RLIMIT_AS", "-v");
    let host = value("/proc/sys/kernel/threads-max");
    format!(
        "{processes}{space}; the host may have {host} threads (kernel.threads-max), its containers fewer (pids.max)"
    )
}

fn of(resource: Resource, what: &str, name: &str, option: &str) -> String {
    match getrlimit(resource).current {
        Some(limit) => {
            format!("; this process may have {limit} {what} ({name}): raise `ulimit {option}`")
        }
        None => String::new(),
    }
}

fn value(path: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    // Without a descriptor left no file can be read.
    if text.trim().is_empty() { "allowed".into() } else { text.trim().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "miri has no limits of resources")]
    fn a_limit_is_named_with_its_value_and_its_option() {
        let error = io::Error::from_raw_os_error(libc::EMFILE);
        let limit = getrlimit(Resource::Nofile).current.unwrap();
        let expected =
            format!("may have {limit} file descriptors (RLIMIT_NOFILE): raise `ulimit -n`");
        assert!(
            is_exhausted(&error) && described(&error).contains(&expected),
            "{}",
            described(&error)
        );
        let refused = io::Error::from_raw_os_error(libc::ECONNREFUSED);
        assert!(!is_exhausted(&refused) && remedy(&refused).is_empty());
    }

    #[test]
    #[cfg_attr(miri, ignore = "isolated miri reads no files")]
    fn a_thread_that_cannot_start_names_the_limits_of_threads() {
        let text = crate::Error::thread("the thread")(io::ErrorKind::WouldBlock.into()).to_string();
        assert!(text.starts_with("starting the thread failed: "), "{text}");
        assert!(text.contains("kernel.threads-max"), "{text}");
        if let Some(limit) = getrlimit(Resource::Nproc).current {
            let expected =
                format!("may have {limit} threads of its user (RLIMIT_NPROC): raise `ulimit -u`");
            assert!(text.contains(&expected), "{text}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "isolated miri reads no files")]
    fn a_socket_without_a_port_names_the_range() {
        assert!(ports_remedy().contains(" to "), "{}", ports_remedy());
    }
}
