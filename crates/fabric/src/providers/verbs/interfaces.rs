//! Network interface addresses on an InfiniBand port (IPoIB), whose GIDs are not made from them.

use std::ffi::CStr;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::ptr::null_mut;

/// Directory in which the kernel describes this machine.
pub const SYSFS: &str = "/sys";

/// Interface addresses on a port, which the kernel numbers from 0. Partition interfaces, such as
/// `ib0.8001`, and bonds belong to no port.
pub fn addresses_of_port(
    sysfs: &Path,
    device: &str,
    port: u8,
    interfaces: &[(String, IpAddr)],
) -> Vec<IpAddr> {
    let folder = sysfs.join("class/infiniband").join(device).join("device/net");
    let is_on_port = |name: &str| {
        let number = fs::read_to_string(folder.join(name).join("dev_port"));
        number.is_ok_and(|number| number.trim().parse() == Ok(u32::from(port) - 1))
    };
    let on_port = interfaces.iter().filter(|(name, _)| is_on_port(name));
    on_port.map(|(_, address)| *address).collect()
}

/// Name and address for each interface in this process's network namespace; none if the system refuses.
pub fn interfaces() -> Vec<(String, IpAddr)> {
    let mut list = null_mut();
    let mut found = Vec::new();
    // SAFETY: the call fills in a list, which is freed once below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return found;
    }
    let mut next = list;
    while !next.is_null() {
        // SAFETY: an entry in the list, whose name is a string and whose address is null or matches the
        // address family.
        unsafe {
            let entry = &*next;
            let label = CStr::from_ptr(entry.ifa_name).to_string_lossy();
            found.extend(ip_address(entry.ifa_addr).map(|it| (interface(&label).to_owned(), it)));
            next = entry.ifa_next;
        }
    }
    // SAFETY: the list came from the system and is not used any more.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// Interface that an address label names; the label may have a suffix, such as `ib0:1`.
fn interface(label: &str) -> &str {
    label.split(':').next().unwrap_or(label)
}

/// # Safety
/// Null, or an address that matches the address family.
unsafe fn ip_address(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: by the caller's contract the family states the layout.
    unsafe {
        match i32::from((*address).sa_family) {
            libc::AF_INET => {
                let address = &*address.cast::<libc::sockaddr_in>();
                Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let address = &*address.cast::<libc::sockaddr_in6>();
                Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "miri has no interfaces")]
    fn loopback_is_among_the_interfaces() {
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert!(interfaces().contains(&("lo".into(), loopback)), "{:?}", interfaces());
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no files")]
    fn a_port_has_the_addresses_of_the_interfaces_on_it() {
        let root = std::env::temp_dir().join(format!("weft-interfaces-{}", std::process::id()));
        let folder = root.join("class/infiniband/mlx5_0/device/net");
        for (name, port) in [("ib0", "0\n"), ("ib1", "1\n")] {
            fs::create_dir_all(folder.join(name)).unwrap();
            fs::write(folder.join(name).join("dev_port"), port).unwrap();
        }
        let [one, two, three, four] = [1, 2, 3, 4].map(|it| IpAddr::from([10, 0, 0, it]));
        let interfaces = [("ib0", one), ("eth0", two), ("ib1", three), ("ib0:1", four)];
        let interfaces = interfaces.map(|(label, address)| (interface(label).to_owned(), address));
        let of = |device, port| addresses_of_port(&root, device, port, &interfaces);
        assert_eq!(of("mlx5_0", 1), [one, four]);
        assert_eq!(of("mlx5_0", 2), [three]);
        assert_eq!((of("mlx5_0", 3), of("mlx5_1", 1)), (Vec::new(), Vec::new()));
        fs::remove_dir_all(root).unwrap();
    }
}
