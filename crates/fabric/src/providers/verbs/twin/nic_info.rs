//! NIC identity and configuration behind a handle.

use super::super::sys;
use super::config::TwinConfig;
use std::ffi::CString;
use std::sync::atomic::AtomicU32;

/// NIC identity and configuration.
pub struct NicInfo {
    pub(super) number: u32,
    pub(super) name: CString,
    pub(super) config: TwinConfig,
    /// 0: live. Otherwise a null device, whose completions follow after this many polls less one.
    pub(super) null: AtomicU32,
}

impl NicInfo {
    /// GIDs on a port, with GID types: link-local first, without an address.
    pub(super) fn gids(&self, port: u8) -> Vec<(sys::Gid, u32)> {
        const ROCE_V1: u32 = 1;
        let mut local = [0; 16];
        local[..2].copy_from_slice(&[0xfe, 0x80]);
        local[11..15].copy_from_slice(&self.number.to_be_bytes());
        local[15] = port;
        let mut ipv4 = local;
        ipv4[..12].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
        match self.config.ports.get(usize::from(port.wrapping_sub(1))) {
            None => Vec::new(),
            Some(found) if found.is_ethernet => vec![
                (sys::Gid(local), ROCE_V1),
                (sys::Gid(local), sys::IBV_GID_TYPE_ROCE_V2),
                (sys::Gid(ipv4), sys::IBV_GID_TYPE_ROCE_V2),
            ],
            Some(_) => vec![(sys::Gid(local), 0)],
        }
    }

    /// Local identifier for a port; 0 on Ethernet.
    pub(super) fn lid(&self, port: u8) -> u16 {
        let found = self.config.ports.get(usize::from(port.wrapping_sub(1)));
        match found {
            Some(port) if port.is_ethernet => 0,
            _ => (self.number << 3) as u16 + u16::from(port),
        }
    }
}

/// A context's NIC and number.
///
/// # Safety
/// The context is open, and stays so for as long as the reference is used.
pub unsafe fn opened<'a>(context: *mut sys::Context) -> (&'a NicInfo, u32) {
    // SAFETY: a live context, which keeps the NIC.
    unsafe { (&*(*context).device.cast::<NicInfo>(), (*context).cmd_fd as u32) }
}
