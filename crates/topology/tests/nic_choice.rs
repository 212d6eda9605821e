//! NICs for ranks with GPUs: recorded servers, ports that are down, and properties for random ones.

mod common;

use common::Tree;
use proptest::prelude::*;
use std::collections::BTreeMap;
use weft_topology::Host;
use weft_topology::host::{BusId, Distance, NicChoice, NoNicChoice, RdmaPort};

fn host(name: &str) -> Host {
    Host::from_sysfs(Tree::of(name).path())
}

/// All RDMA device ports.
fn ports(host: &Host) -> Vec<RdmaPort> {
    let interfaces = host.devices.iter().flat_map(|device| &device.interfaces);
    let rdma = interfaces.filter(|interface| interface.rdma);
    rdma.map(|it| RdmaPort { device: it.name.clone(), port: it.port }).collect()
}

/// Each GPU's choice, in address order.
fn choices(host: &Host, usable: &[RdmaPort]) -> Vec<NicChoice> {
    let gpus = host.gpus().into_iter().map(|gpu| host.devices[gpu].bus_id);
    gpus.map(|gpu| host.nics_of_gpu(gpu, usable).unwrap()).collect()
}

fn names(choice: &NicChoice) -> Vec<&str> {
    choice.ports.iter().map(|port| port.device.as_str()).collect()
}

/// GPUs by NIC.
fn loads(choices: &[NicChoice]) -> BTreeMap<String, u32> {
    let mut loads = BTreeMap::new();
    for port in choices.iter().flat_map(|choice| &choice.ports) {
        *loads.entry(port.device.clone()).or_default() += 1;
    }
    loads
}

#[test]
fn a_rank_of_a_dgx_a100_uses_the_nic_beside_its_gpu_and_no_storage_nic() {
    let host = host("dgx-a100");
    let choices = choices(&host, &ports(&host));
    let chosen: Vec<_> = choices.iter().flat_map(names).collect();
    assert_eq!(
        chosen,
        ["mlx5_1", "mlx5_0", "mlx5_3", "mlx5_2", "mlx5_7", "mlx5_6", "mlx5_9", "mlx5_8"]
    );
    assert!(choices.iter().all(|choice| choice.distance == Distance::Switches));
    assert_eq!(
        choices[3].to_string(),
        "nearest to GPU3: under the same PCIe switches (PXB)",
        "NIC {:?}",
        choices[3].ports
    );
}

#[test]
fn a_rank_of_a_p5en_uses_two_nics_under_the_switch_of_its_gpu() {
    let host = host("p5en");
    let choices = choices(&host, &ports(&host));
    assert!(choices.iter().all(|choice| choice.ports.len() == 2));
    assert!(choices.iter().all(|choice| choice.distance == Distance::Switch));
    assert_eq!(names(&choices[0]), ["rdmap85s0", "rdmap87s0"]);
    assert_eq!(loads(&choices).len(), 16, "each NIC serves one GPU");
}

#[test]
fn a_rank_of_an_eflops_server_uses_the_nic_of_its_pair() {
    let host = host("eflops");
    let choices = choices(&host, &ports(&host));
    let chosen: Vec<_> = choices.iter().flat_map(names).collect();
    assert_eq!(chosen, ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]);
    assert_eq!(
        choices[0].to_string(),
        "nearest to GPU0: under the same PCIe switch (PIX)",
        "{:?}",
        choices[0].ports
    );
}

#[test]
fn a_nic_without_an_active_port_is_replaced_by_the_nearest_one() {
    let host = host("eflops");
    let usable: Vec<_> = ports(&host).into_iter().filter(|port| port.device != "mlx5_0").collect();
    let choices = choices(&host, &usable);
    let chosen: Vec<_> = choices.iter().flat_map(names).collect();
    assert_eq!(chosen, ["mlx5_1", "mlx5_1", "mlx5_2", "mlx5_3"]);
    assert_eq!(
        choices[0].to_string(),
        "nearest to GPU0: on the same NUMA node (NODE), shared by 2 GPUs"
    );
}

#[test]
fn without_an_rdma_port_or_the_gpu_there_is_a_reason_in_place_of_a_choice() {
    let vm = host("h200-vm");
    let gpu = BusId::parse("00000000:00:06.0").unwrap();
    let refused = vm.nics_of_gpu(gpu, &ports(&vm)).unwrap_err();
    assert_eq!(refused, NoNicChoice::NoNic, "eth0 is no RDMA device");
    assert_eq!(refused.to_string(), "no port that can be used is on the PCI bus");
    // Software RoCE has a port, and no PCI device.
    let software = RdmaPort { device: "rxe0".into(), port: 1 };
    assert_eq!(vm.nics_of_gpu(gpu, &[software]), Err(NoNicChoice::NoNic));
    let other = BusId::parse("0000:99:00.0").unwrap();
    let refused = vm.nics_of_gpu(other, &[]).unwrap_err();
    assert_eq!(refused.to_string(), "the PCI bus has no GPU at 0000:99:00.0");
}

#[test]
fn a_port_is_read_as_it_is_written() {
    let port = RdmaPort { device: "mlx5_0".into(), port: 2 };
    assert_eq!(RdmaPort::parse(&port.to_string()), port);
    assert_eq!(RdmaPort::parse("rdmap85s0").to_string(), "rdmap85s0:1");
}

/// A virtual machine without switches: GPUs and NICs on each NUMA node.
fn virtual_machine(nodes: &[(u32, u32)]) -> Host {
    let mut text = String::new();
    let mut nic = 0;
    for (node, (gpus, nics)) in nodes.iter().enumerate() {
        text += &format!("bridge pci000{node}:00 numa={node}\n");
        for gpu in 0..*gpus {
            text += &format!("  000{node}:00:{:02x}.0 gpu=10de:2335 link=32.0*16\n", gpu + 1);
        }
        for _ in 0..*nics {
            text += &format!("  000{node}:01:{nic:02x}.0 ib=rdmap{nic}s0:200 link=32.0*16\n");
            nic += 1;
        }
    }
    Host::from_sysfs(Tree::from(&text).path())
}

#[test]
fn without_switches_the_nics_of_a_numa_node_are_dealt_out_to_its_gpus() {
    let host = virtual_machine(&[(4, 8), (4, 8)]);
    let choices = choices(&host, &ports(&host));
    assert!(choices.iter().all(|choice| choice.ports.len() == 2), "{choices:?}");
    let loads = loads(&choices);
    assert!(loads.len() == 16 && loads.values().all(|&users| users == 1), "{loads:?}");
    // A ninth NIC stays spare: no GPU has more than another.
    let host = virtual_machine(&[(4, 9)]);
    assert!(self::choices(&host, &ports(&host)).iter().all(|choice| choice.ports.len() == 2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Any ports of any recorded server are up.
    #[test]
    fn each_gpu_has_a_usable_nic_if_there_is_one(
        name in prop::sample::select(vec!["dgx-a100", "p5en", "eflops", "bad"]),
        up in proptest::collection::vec(any::<bool>(), 16),
    ) {
        let host = host(name);
        let all = ports(&host);
        let usable: Vec<RdmaPort> =
            all.into_iter().zip(up).filter(|(_, up)| *up).map(|(port, _)| port).collect();
        prop_assume!(!usable.is_empty());
        let choices = choices(&host, &usable);
        for choice in &choices {
            prop_assert!(!choice.ports.is_empty());
            prop_assert!(choice.ports.iter().all(|port| usable.contains(port)));
        }
        if usable.len() >= choices.len() && name != "bad" {
            let loads = loads(&choices);
            prop_assert!(loads.len() >= choices.len(), "an idle NIC beside a shared one: {loads:?}");
        }
    }

    /// Equal loads on each NUMA node of a virtual machine.
    #[test]
    fn gpus_on_one_node_have_equally_many_nics_and_nics_equal_loads(
        gpus in 1u32..9, nics in 1u32..20,
    ) {
        let host = virtual_machine(&[(gpus, nics)]);
        let choices = choices(&host, &ports(&host));
        let counts: Vec<usize> = choices.iter().map(|choice| choice.ports.len()).collect();
        let each = (nics / gpus).max(1) as usize;
        prop_assert!(counts.iter().all(|&count| count == each), "{counts:?}");
        let loads = loads(&choices);
        let (most, least) = (loads.values().max().unwrap(), loads.values().min().unwrap());
        prop_assert!(most - least <= 1, "{loads:?}");
        if gpus >= nics {
            prop_assert_eq!(loads.len(), nics as usize);
        }
    }
}
