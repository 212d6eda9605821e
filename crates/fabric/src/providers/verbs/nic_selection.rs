//! Selects the NIC that has a connection's address.

use super::config::DEVICES;
use super::nic::Nic;
use super::nic_address::{NicAddress, SELECTED};
use super::objects::Result;
use super::sys;
use std::net::{IpAddr, Ipv6Addr};

impl NicAddress {
    /// The NIC with the address, among these.
    ///
    /// # Errors
    /// Reason why none has an address that is demanded.
    pub(super) fn select(&self, nics: Vec<Nic>, choice: &[String]) -> Result<Vec<Nic>> {
        let found = match nics.iter().find_map(|nic| nic.at(self.address)) {
            None if self.is_demanded => return Err(self.missing(&nics, choice)),
            None => nics.into_iter().next(),
            found => found,
        };
        Ok(found.into_iter().map(|nic| Nic { network: SELECTED, ..nic }).collect())
    }

    fn missing(&self, nics: &[Nic], choice: &[String]) -> String {
        let each = nics.iter().map(|nic| {
            let addresses: Vec<String> = nic.addresses().map(|it| it.to_string()).collect();
            let has = if addresses.is_empty() { "none".into() } else { addresses.join(" and ") };
            format!("{} has {has}", nic.name())
        });
        let each = each.collect::<Vec<_>>().join(", ");
        let named = if choice.is_empty() { "" } else { &format!(" named in {DEVICES}") };
        format!(
            "source {}: expected an address of an RDMA NIC{named}: {each}; connect from one of these, or \
             offer tcp in place of verbs",
            self.address
        )
    }
}

impl Nic {
    /// This NIC for an address, on Ethernet with the GID for it; `None` if it does not have the address.
    pub(super) fn at(&self, address: IpAddr) -> Option<Nic> {
        let gid = match self.is_ethernet() {
            true => *self.gids.iter().find(|it| is_v2(it) && address_of(it) == address)?,
            false => *self.interfaces.contains(&address).then_some(&self.gid)?,
        };
        let gid = if self.has_fixed_gid { self.gid } else { gid };
        Some(Nic { gid, address: Some(address), ..self.clone() })
    }

    /// Addresses from which a connection may come, without repetition.
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let of_gids = self.gids.iter().filter(|it| is_v2(it)).map(address_of);
        let all = of_gids.chain(self.interfaces.iter().copied());
        let is_link_local =
            |it: &IpAddr| matches!(it, IpAddr::V6(address) if address.is_unicast_link_local());
        let mut addresses: Vec<IpAddr> = Vec::new();
        all.filter(|it| !is_link_local(it)).for_each(|it| {
            if !addresses.contains(&it) {
                addresses.push(it);
            }
        });
        addresses.into_iter()
    }
}

fn is_v2(entry: &sys::GidEntry) -> bool {
    entry.gid_type == sys::IBV_GID_TYPE_ROCE_V2
}

/// IP address from which a GID is made.
fn address_of(entry: &sys::GidEntry) -> IpAddr {
    Ipv6Addr::from(entry.gid.0).to_canonical()
}

#[cfg(test)]
mod tests {
    use super::super::config::VerbsConfig;
    use super::super::device::VerbsDevice;
    use super::super::sys::Gid;
    use super::super::wire::VerbsAddress;
    use super::super::{TwinConfig, TwinNic, TwinPort};
    use super::*;
    use crate::device::Device as _;
    use crate::lane_table::LaneTable;
    use crate::link::Membership;
    use crate::types::Generation;
    use std::net::Ipv4Addr;
    use std::sync::Arc;
    use weft_control::Rank;

    const FOREIGN: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 255, 255, 1));

    /// Two NICs, the second with two ports.
    fn twins() -> [Arc<TwinNic>; 2] {
        let ports = vec![TwinPort::default(); 2];
        [TwinConfig::default(), TwinConfig { ports, ..TwinConfig::default() }].map(TwinNic::new)
    }

    fn device(twins: &[Arc<TwinNic>], address: Option<NicAddress>) -> crate::Result<VerbsDevice> {
        VerbsDevice::over(VerbsConfig { address, ..VerbsConfig::default() }, twins)
    }

    fn names(device: &VerbsDevice) -> Vec<String> {
        device.nics().collect()
    }

    /// A device's link address toward one peer.
    fn link_address(device: &VerbsDevice) -> VerbsAddress {
        let generation = Generation(0);
        let lanes = Arc::new(LaneTable::new(64, generation).unwrap());
        let link = device.open(Membership { rank: Rank(0), size: 2, generation, lanes }).unwrap();
        VerbsAddress::decode(&link.address()).unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
    fn each_address_selects_the_port_that_has_it_with_its_gid() {
        let twins = twins();
        for (twin, port) in [(0, 1), (1, 1), (1, 2)] {
            let address = IpAddr::V4(twins[twin].address(port));
            let at = NicAddress::of_source(address);
            let device = device(&twins, Some(at)).unwrap();
            assert_eq!(names(&device), [format!("{}:{port}", twins[twin].name())]);
            let ports = link_address(&device).ports;
            assert_eq!((ports.len(), ports[0].network), (1, SELECTED));
            assert_eq!(
                ports[0].gid,
                Gid(Ipv4Addr::to_ipv6_mapped(&twins[twin].address(port)).octets())
            );
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
    fn a_link_local_address_selects_its_port_and_keeps_its_gid_when_links_open() {
        let twins = twins();
        let mut found = device(&twins, None).unwrap().nics.swap_remove(1);
        let local = *found.gids.iter().find(|it| is_v2(it)).unwrap();
        assert_ne!(local.gid, found.gid.gid, "the preferred GID is another one");
        let address = address_of(&local);
        let at = NicAddress::of_source(address);
        let device = device(&twins, Some(at)).unwrap();
        assert_eq!(link_address(&device).ports[0].gid, local.gid);
        // A fixed table entry stays.
        found.has_fixed_gid = true;
        assert_eq!(found.at(address).unwrap().gid.gid, found.gid.gid);
    }

    #[test]
    #[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
    fn a_port_of_infiniband_has_the_addresses_of_its_interfaces_and_its_only_gid() {
        let ports = vec![TwinPort { is_ethernet: false, ..TwinPort::default() }];
        let twin = TwinNic::new(TwinConfig { ports, ..TwinConfig::default() });
        let mut nic = device(std::slice::from_ref(&twin), None).unwrap().nics.swap_remove(0);
        assert!(nic.at(FOREIGN).is_none() && nic.addresses().next().is_none());
        nic.interfaces.push(FOREIGN);
        let found = nic.at(FOREIGN).unwrap();
        assert_eq!((found.gid.gid, found.address), (nic.gid.gid, Some(FOREIGN)));
        assert_eq!(nic.addresses().collect::<Vec<_>>(), [FOREIGN]);
        // The link's GID is not an address.
        let gid = address_of(&nic.gid);
        assert!(nic.at(gid).is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
    fn a_source_that_no_nic_has_is_refused_with_the_addresses_of_all() {
        let twins = twins();
        let at = NicAddress::of_source(FOREIGN);
        let refused = device(&twins, Some(at)).map(drop).unwrap_err().to_string();
        let has = |twin: &TwinNic, port| {
            format!("{}:{port} has {}", twin.name(), twin.address(port as u8))
        };
        let all = [has(&twins[0], 1), has(&twins[1], 1), has(&twins[1], 2)].join(", ");
        let start =
            "source 10.255.255.1: expected an address of an RDMA NIC named in WEFT_VERBS_DEVICES: ";
        let end = "; connect from one of these, or offer tcp in place of verbs";
        assert!(refused.contains(&format!("{start}{all}{end}")), "{refused}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
    fn a_listener_selects_if_and_only_if_the_connector_has() {
        let (here, there) = (twins(), twins());
        let local = IpAddr::V4(here[1].address(2));
        let source = IpAddr::V4(there[0].address(1));
        let at = NicAddress::of_source(source);
        let connector = link_address(&device(&there, Some(at)).unwrap());
        let at = NicAddress::of_listener(local, &connector.encode()).unwrap();
        let listener = device(&here, Some(at)).unwrap();
        assert_eq!(names(&listener), [format!("{}:2", here[1].name())]);
        assert_eq!(link_address(&listener).shared_ports(&connector), [(0, 0)]);
        // The first NIC on a listener whose address no NIC has.
        let at = NicAddress::of_listener(FOREIGN, &connector.encode());
        let listener = device(&here, at).unwrap();
        assert_eq!(names(&listener), [format!("{}:1", here[0].name())]);
        assert_eq!(link_address(&listener).shared_ports(&connector), [(0, 0)]);
        // One that has not selected, such as an earlier version, shares no NIC.
        let all = link_address(&device(&here, None).unwrap());
        assert_eq!(all.shared_ports(&connector), []);

        for twins in [&there[..1], &there[..]] {
            let connector = link_address(&device(twins, None).unwrap());
            assert_eq!(NicAddress::of_listener(local, &connector.encode()), None);
        }
        assert_eq!(NicAddress::of_listener(local, b"another version"), None);
    }
}
