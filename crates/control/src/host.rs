//! Host identity: a process's machine, namespaces and user, which decide what it can share.

/// A process's environment. A field that the system does not report is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostIdentity {
    /// Machine boot id.
    pub boot: String,
    /// Network namespace, the scope for loopback and abstract sockets.
    pub network: String,
    /// IPC namespace.
    pub ipc: String,
    /// PID namespace.
    pub processes: String,
    /// User namespace, the scope for user ids.
    pub users: String,
    /// Effective user id.
    pub user: u32,
}

impl HostIdentity {
    /// This process's identity.
    pub fn here() -> HostIdentity {
        HostIdentity {
            boot: read("/proc/sys/kernel/random/boot_id"),
            network: namespace("net"),
            ipc: namespace("ipc"),
            processes: namespace("pid"),
            users: namespace("user"),
            user: rustix::process::geteuid().as_raw(),
        }
    }

    /// Default `host_id`. Ranks with equal ones can share memory. For example, two containers on one machine with
    /// separate namespaces are two hosts.
    pub fn host_id(&self) -> String {
        let boot = if self.boot.is_empty() { host_name() } else { self.boot.clone() };
        format!("{boot}/{}/{}", self.network, self.ipc)
    }
}

fn host_name() -> String {
    let name = read("/proc/sys/kernel/hostname");
    if name.is_empty() { "unknown host".to_string() } else { name }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_string()
}

fn namespace(kind: &str) -> String {
    let link = std::fs::read_link(format!("/proc/self/ns/{kind}")).unwrap_or_default();
    link.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_is_stable_and_short() {
        let here = HostIdentity::here();
        assert_eq!(here, HostIdentity::here());
        assert!(!here.host_id().is_empty() && here.host_id().len() < 200);
    }

    #[test]
    fn a_machine_without_a_boot_id_is_identified_by_its_name() {
        let here = HostIdentity { boot: String::new(), ..HostIdentity::here() };
        assert!(!here.host_id().starts_with('/'), "{}", here.host_id());
    }
}
