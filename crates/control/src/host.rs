//! Which ranks can share memory with this one: those with the same identity.

/// The identity of this host: its boot, and the namespaces in which shared memory and sockets are
/// found. Two containers of one machine that cannot reach each other's are two hosts.
pub(crate) fn identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_string())
        .unwrap_or_else(|_| host_name());
    let namespaces = ["net", "ipc"].map(|kind| {
        std::fs::read_link(format!("/proc/self/ns/{kind}"))
            .map(|link| link.to_string_lossy().into_owned())
            .unwrap_or_default()
    });
    format!("{boot}/{}", namespaces.join("/"))
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_string())
        .unwrap_or_else(|_| "unknown host".to_string())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_identity_is_stable_and_short() {
        assert_eq!(super::identity(), super::identity());
        assert!(!super::identity().is_empty() && super::identity().len() < 200);
    }
}
