//! Packets: a 32-bit value and an epoch in one 64-bit word.

/// Packet with a value and an epoch, for example `0x0000_0007_0000_0003` for value 3 in epoch 7.
pub(super) fn seal(value: u32, epoch: u32) -> u64 {
    u64::from(epoch) << 32 | u64::from(value)
}

/// Value in a packet with this epoch; otherwise the packet's epoch.
pub(super) fn open(packet: u64, epoch: u32) -> Result<u32, u32> {
    let seen = (packet >> 32) as u32;
    if seen == epoch { Ok(packet as u32) } else { Err(seen) }
}
