//! Packets: a 32-bit value and its epoch in one 64-bit word.

/// Packet of a value and its epoch.
pub(super) fn seal(value: u32, epoch: u32) -> u64 {
    u64::from(epoch) << 32 | u64::from(value)
}

/// Value of a packet of this epoch; otherwise the packet's epoch.
pub(super) fn open(packet: u64, epoch: u32) -> Result<u32, u32> {
    let seen = (packet >> 32) as u32;
    if seen == epoch { Ok(packet as u32) } else { Err(seen) }
}
