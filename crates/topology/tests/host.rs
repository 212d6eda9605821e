//! Servers: recorded trees, XML round trips, pairs, and lint findings.

mod common;

use common::Tree;
use proptest::prelude::*;
use weft_topology::Host;
use weft_topology::host::{Assumptions, DeviceKind, Distance, Finding, NvmlGpu, Severity};

fn host(name: &str) -> Host {
    let host = Host::from_sysfs(Tree::of(name).path());
    assert!(host.notes.is_empty(), "{:?}", host.notes);
    host
}

fn lint(host: &Host) -> Vec<Finding> {
    host.lint(&Assumptions::default())
}

fn rules(host: &Host) -> Vec<(&'static str, Severity)> {
    lint(host).iter().map(|finding| (finding.rule, finding.severity)).collect()
}

fn pairs(host: &Host) -> Vec<String> {
    let pairing = host.pairing();
    let all = pairing.pairs.iter().chain(&pairing.further);
    all.map(|pair| {
        format!("{} {} {}", host.label(pair.gpu), host.label(pair.nic), pair.distance.short())
    })
    .collect()
}

fn joined(host: &Host, one: usize, other: usize) -> bool {
    host.nvlinked().joins(host.devices[one].bus_id, host.devices[other].bus_id)
}

/// Adds NVML's list with GPUs that NVSwitches join.
fn nvswitch(host: &mut Host) {
    let gpus: Vec<NvmlGpu> = host
        .of_kind(DeviceKind::Gpu)
        .zip(0..)
        .map(|(gpu, index)| NvmlGpu {
            bus_id: format!("0000{}", host.devices[gpu].bus_id),
            index,
            name: Some("A GPU".to_owned()),
            sm: Some(80),
            mig: Some(false),
            nvlinks: vec!["00000000:C4:00.0".to_owned(); 12],
        })
        .collect();
    host.add_nvml(&gpus);
}

#[test]
fn a_dgx_a100_has_a_nic_beside_each_gpu_and_pairs_share_root_ports() {
    let mut host = host("dgx-a100");
    // Six NVSwitches are on the PCI bus, without NVML.
    assert_eq!(host.nvswitches, 6);
    assert!(lint(&host).iter().all(|finding| finding.severity == Severity::Note));
    nvswitch(&mut host);
    assert_eq!(
        pairs(&host),
        [
            "GPU0 mlx5_1 PXB",
            "GPU1 mlx5_0 PXB",
            "GPU2 mlx5_3 PXB",
            "GPU3 mlx5_2 PXB",
            "GPU4 mlx5_7 PXB",
            "GPU5 mlx5_6 PXB",
            "GPU6 mlx5_9 PXB",
            "GPU7 mlx5_8 PXB"
        ]
    );
    let spare = host.pairing().spare;
    assert_eq!(spare.iter().map(|&nic| host.label(nic)).collect::<Vec<_>>(), ["mlx5_4", "mlx5_10"]);
    let shared = ("pairs-share-root-port", Severity::Note);
    assert_eq!(rules(&host), [shared, shared, shared, shared, ("spare-nics", Severity::Note)]);
    let gpus: Vec<usize> = host.of_kind(DeviceKind::Gpu).collect();
    assert_eq!(host.distance(gpus[0], gpus[1]), Distance::Switches);
    assert_eq!(host.distance(gpus[1], gpus[2]), Distance::System);
    assert!(joined(&host, gpus[0], gpus[7]));
    assert_eq!(host.nvlinks.len(), 8);
    assert_eq!(host.nvlinks[0].count, 12);
    assert!(
        host.tree().contains("GPU0 0000:07:00.0  A GPU  PCIe 4 x16 31.5 GB/s"),
        "{}",
        host.tree()
    );
}

#[test]
fn a_p5en_has_two_nics_for_each_gpu() {
    let mut host = host("p5en");
    nvswitch(&mut host);
    let pairing = host.pairing();
    assert_eq!((pairing.pairs.len(), pairing.further.len(), pairing.spare.len()), (8, 8, 0));
    assert!(pairing.pairs.iter().chain(&pairing.further).all(|p| p.distance == Distance::Switch));
    for gpu in host.of_kind(DeviceKind::Gpu) {
        assert_eq!(pairing.further.iter().filter(|pair| pair.gpu == gpu).count(), 1);
    }
    assert_eq!(rules(&host), [("pairs-share-root-port", Severity::Note); 4]);
    // Without NVLink the same server would go through the NICs.
    host.nvlinks.clear();
    let found = lint(&host);
    assert_eq!(found.iter().filter(|finding| finding.severity == Severity::Warning).count(), 4);
}

#[test]
fn an_eflops_server_has_no_warnings_and_is_faster_through_its_nics() {
    let host = host("eflops");
    assert_eq!(
        pairs(&host),
        ["GPU0 mlx5_0 PIX", "GPU1 mlx5_1 PIX", "GPU2 mlx5_2 PIX", "GPU3 mlx5_3 PIX"]
    );
    let found = lint(&host);
    assert_eq!(rules(&host), [("gpu-to-gpu", Severity::Advice)]);
    // PCIe 3 x16 is 15.75 GB/s, 12.6 payload; 10.5 by the root complex; one hop each way crosses NUMA at 10.
    let (have, could) = (found[0].have_gb_per_s.unwrap(), found[0].could_gb_per_s.unwrap());
    assert!((have - 10.0).abs() < 1e-9, "{have}");
    assert!((could - 12.5).abs() < 1e-9, "{could}");
    assert!(
        found[0].what.contains("GPU-to-GPU traffic is faster through the NICs"),
        "{}",
        found[0].what
    );
}

#[test]
fn findings_of_a_bad_server_state_their_cost() {
    let host = host("bad");
    let found = lint(&host);
    let of = |rule: &str| -> Vec<&Finding> {
        found.iter().filter(|finding| finding.rule == rule).collect()
    };
    assert_eq!(host.of_kind(DeviceKind::Gpu).count(), 6, "a management controller is no GPU");
    assert_eq!(host.nics().len(), 2, "the 1 Gb/s port is not for GPUs");
    // Four GPUs on mlx5_0 behind another root port, on half the lanes: 12.6 GB/s payload by four, by 1.2.
    let split = of("pair-not-under-one-switch");
    assert_eq!(split.len(), 4);
    let have = split[0].have_gb_per_s.unwrap();
    assert!((have - 31.507_692 / 2.0 * 0.8 / 4.0 / 1.2).abs() < 1e-4, "{have}");
    assert!((split[0].could_gb_per_s.unwrap() - 25.0).abs() < 1e-9);
    assert!(of("pair-across-numa").is_empty());
    assert_eq!(of("pairs-share-root-port").len(), 2);
    let shared = of("gpus-share-nic");
    assert_eq!(shared.len(), 2);
    assert!(shared.iter().any(|finding| finding.devices == ["GPU0", "GPU1", "GPU2", "GPU3"]));
    assert!((shared[1].have_gb_per_s.unwrap() - 12.5).abs() < 1e-9, "{shared:?}");
    let narrow = of("narrow-link");
    assert_eq!(narrow.len(), 1);
    assert!(narrow[0].what.starts_with("mlx5_0 runs on 8 of its 16 PCIe lanes"));
    assert_eq!(of("gpu-to-gpu").len(), 1);
    assert!(found.is_sorted_by_key(|finding| std::cmp::Reverse(finding.severity)));
}

#[test]
fn a_pair_across_numa_nodes_shares_the_link_between_them() {
    let text = "bridge pci0000:00 numa=0
  0000:00:01.0 port link=16.0*16
    0000:01:00.0 gpu=10de:20b5 link=16.0*16
bridge pci0000:80 numa=1
  0000:80:01.0 port link=16.0*16
    0000:81:00.0 ib=mlx5_0:200 link=16.0*16
";
    let host = Host::from_sysfs(Tree::from(text).path());
    let found = lint(&host);
    assert_eq!(rules(&host), [("pair-across-numa", Severity::Warning)]);
    assert_eq!(found[0].have_gb_per_s, Some(10.0));
    assert_eq!(found[0].could_gb_per_s, Some(25.0));
}

#[test]
fn a_virtual_machine_has_gpus_and_nvlinks_to_hidden_switches() {
    let mut host = Host::from_sysfs(Tree::of("h200-vm").path());
    let gpus: Vec<NvmlGpu> = (0..2)
        .map(|index| NvmlGpu {
            bus_id: format!("00000000:00:0{}.0", 6 + index),
            index,
            name: Some("NVIDIA H200".to_owned()),
            sm: Some(90),
            mig: Some(false),
            nvlinks: vec!["FFFFFFFF:FF:FF.0".to_owned(); 18],
        })
        .collect();
    host.add_nvml(&gpus);
    assert_eq!(host.notes.len(), 1);
    assert!(host.notes[0].starts_with("no bridge is above any GPU"));
    let found = rules(&host);
    let note = ("pair-not-under-one-switch", Severity::Note);
    assert_eq!(found, [("gpus-share-nic", Severity::Warning), note, note]);
    assert_eq!(pairs(&host), ["GPU0 eth0 PHB", "GPU1 eth0 PHB"]);
    assert!(joined(&host, host.gpus()[0], host.gpus()[1]));
    assert!(host.tree().starts_with("NUMA node 0  CPUs 0-31\n"), "{}", host.tree());
    let xml = host.to_nccl_xml();
    assert!(xml.contains("<nvlink target=\"fffffff:ffff:ff\" count=\"18\" tclass=\"0x068000\"/>"));
    assert_eq!(Host::from_nccl_xml(&xml).unwrap().nvlinks, host.nvlinks);
}

#[test]
fn unequal_counts_are_found() {
    let mut text =
        String::from("bridge pci0000:00 numa=0\n  0000:00:01.0 port\n    0000:01:00.0 port\n");
    for (device, what) in
        ["gpu=10de:1", "gpu=10de:1", "ib=a:100", "ib=b:100", "ib=c:100"].iter().enumerate()
    {
        text +=
            &format!("      0000:02:0{device}.0 port\n        0000:0{}:00.0 {what}\n", device + 3);
    }
    let host = Host::from_sysfs(Tree::from(&text).path());
    let found = lint(&host);
    let unequal = found.iter().find(|finding| finding.rule == "unequal-nics").unwrap();
    assert!(unequal.what.starts_with("2 GPUs and 3 NICs"), "{}", unequal.what);
}

#[test]
fn xml_written_and_read_is_the_same_server() {
    for name in ["dgx-a100", "p5en", "eflops", "bad"] {
        let mut one = host(name);
        nvswitch(&mut one);
        one.devices.iter_mut().for_each(|device| device.link_now = device.link);
        let xml = one.to_nccl_xml();
        let other = Host::from_nccl_xml(&xml).unwrap();
        assert_eq!(other.to_nccl_xml(), xml);
        assert_eq!(pairs(&other), pairs(&one), "{name}");
        assert_eq!(other.nvlinks, one.nvlinks);
        let told = |host: &Host| {
            lint(host)
                .into_iter()
                .map(|f| (f.rule, f.have_gb_per_s, f.could_gb_per_s))
                .collect::<Vec<_>>()
        };
        assert_eq!(told(&other), told(&one), "{name}");
    }
}

/// NCCL's dump from a DGX A100, shortened.
const DUMP: &str = r#"<system version="1">
  <cpu host_hash="0x8393fb66b8b750c5" numaid="3" affinity="ffff0000" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">
    <pci busid="0000:01:00.0" class="0x060400" vendor="0x1000" device="0xc010" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:0a:00.0" class="0x060400" vendor="0x1000" device="0xc010" link_speed="16.0 GT/s PCIe" link_width="16">
        <pci busid="0000:0c:00.0" class="0x020700" vendor="0x15b3" device="0x101b" link_speed="16.0 GT/s PCIe" link_width="16">
          <nic>
            <net name="mlx5_0" dev="0" speed="200000" port="1" latency="0.000000" guid="0xa262550003a1420c" maxconn="131072" gdr="1"/>
          </nic>
        </pci>
        <pci busid="0000:0f:00.0" class="0x030200" vendor="0x10de" device="0x20b0" link_speed="16.0 GT/s PCIe" link_width="16">
          <gpu dev="1" sm="80" rank="1" gdr="1">
            <nvlink target="0000:c7:00.0" count="2" tclass="0x068000"/>
          </gpu>
        </pci>
      </pci>
    </pci>
  </cpu>
</system>
"#;

#[test]
fn a_dump_of_nccl_is_read() {
    let host = Host::from_nccl_xml(DUMP).unwrap();
    assert_eq!(pairs(&host), ["GPU1 mlx5_0 PIX"]);
    assert_eq!(host.devices[2].interfaces[0].gbps, Some(200.0));
    assert_eq!(host.devices[3].sm, Some(80));
    assert!(host.nvlinks[0].to_switch);
    for (change, into, said) in [
        ("<system", "<topology", "line 18: expected 'topology' tag"),
        ("0000:0a:00.0", "0a:00", "line 4: busid \"0a:00\": expected a PCI address"),
        ("0000:0a:00.0", "0000:01:00.0", "line 4: 0000:01:00.0 listed twice"),
        ("busid=\"0000:0a", "bus=\"0000:0a", "line 4: <pci> has no busid"),
        ("numaid=\"3\"", "numaid=\"three\"", "line 2: numaid is \"three\", not a whole number"),
        ("0x060400", "class", "line 3: class is \"class\", not a hexadecimal number"),
        ("0000:c7:00.0", "switch", "<nvlink> target \"switch\": expected a PCI address"),
    ] {
        let error = Host::from_nccl_xml(&DUMP.replacen(change, into, 1)).unwrap_err().to_string();
        assert!(error.contains(said), "{change} -> {into}: {error}");
    }
    let deep = "<system>".to_owned() + &"<pci busid='0'>".repeat(100_000);
    let error = Host::from_nccl_xml(&deep).unwrap_err().to_string();
    assert!(error.contains("nested more than 128 deep"), "{error}");
    let other = Host::from_nccl_xml("<topology/>").unwrap_err().to_string();
    assert_eq!(other, "line 1: <topology>: expected <system>, the root of NCCL's topology");
}

#[test]
fn missing_entries_are_noted_and_not_fatal() {
    let nothing = Host::from_sysfs(std::path::Path::new("/there/is/no/such/place"));
    assert!(nothing.devices.is_empty() && nothing.notes.len() == 2, "{:?}", nothing.notes);
    assert!(lint(&nothing).is_empty());
    assert_eq!(nothing.tree(), "");
    let here = Host::from_sysfs(std::path::Path::new("/sys"));
    let _ = (here.tree(), lint(&here), here.to_nccl_xml());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn no_bytes_in_a_tree_make_it_panic(
        files in proptest::collection::vec(
            (0usize..28, 0usize..9, proptest::collection::vec(any::<u8>(), 0..20)), 0..12),
    ) {
        let tree = Tree::of("eflops");
        let mut devices = Vec::new();
        let mut left = vec![tree.path().join("devices")];
        while let Some(path) = left.pop() {
            for entry in std::fs::read_dir(path).unwrap().flatten() {
                if entry.file_type().unwrap().is_dir() {
                    left.push(entry.path());
                    devices.push(entry.path());
                }
            }
        }
        devices.sort();
        for (device, file, bytes) in files {
            let names = ["class", "vendor", "numa_node", "max_link_speed", "max_link_width",
                "current_link_speed", "current_link_width", "label", "infiniband"];
            let path = devices[device % devices.len()].join(names[file]);
            if !path.is_dir() {
                std::fs::write(path, bytes).unwrap();
            }
        }
        let host = Host::from_sysfs(tree.path());
        let xml = host.to_nccl_xml();
        let back = Host::from_nccl_xml(&xml);
        prop_assert!(back.is_ok(), "{:?}: {}", back, xml);
        let _ = (host.tree(), lint(&host), host.pairing());
    }

    #[test]
    fn no_change_to_xml_makes_it_panic(
        place in 0usize..DUMP.len(),
        length in 0usize..40,
        with in prop_oneof![".{0,8}", Just("<pci busid=\"0000:99:00.0\">".to_owned()),
            Just("&x;".to_owned()), Just("-1".to_owned()), Just("99999999999".to_owned())],
    ) {
        let mut text = DUMP.to_owned();
        if text.is_char_boundary(place) {
            text.replace_range(place..(place + length).min(text.len()), &with);
        }
        if let Ok(host) = Host::from_nccl_xml(&text) {
            let _ = (host.tree(), lint(&host), host.to_nccl_xml());
        }
    }

    #[test]
    fn no_text_makes_the_xml_reader_panic(text in ".{0,200}") {
        let _ = Host::from_nccl_xml(&text);
        let _ = Host::from_nccl_xml(&format!("<system><cpu>{text}</cpu></system>"));
    }
}

#[test]
fn deeply_nested_xml_is_rejected_without_a_crash() {
    let deep = |open: &str| Host::from_nccl_xml(&open.repeat(60_000)).unwrap_err().to_string();
    for open in ["<a>", "<a x='/>'>", "<a><!--</a>-->", "<a><![CDATA[</a>]]>", "<a><?p </a>?>"] {
        let error = deep(open);
        assert!(error.contains("nested more than 128 deep"), "{open}: {error}");
    }
    // Elements in a comment do not nest.
    let comment = format!("<system><!--{}--></system>", "<a>".repeat(1000));
    assert!(Host::from_nccl_xml(&comment).is_ok());
    // Both take linear time: each bracket is searched once.
    for text in ["<a/".repeat(1 << 20), "<a/".repeat(1 << 20) + ">", "<!--".repeat(1 << 20)] {
        assert!(Host::from_nccl_xml(&text).is_err());
    }
}

#[test]
fn many_gpus_with_many_nvlinks_are_linted_in_time() {
    let gpus = 2000;
    let mut text =
        String::from("<system><cpu numaid='0'><pci busid='ffff:00:00.0' class='0x060400'>");
    for gpu in 0..gpus {
        text += &format!("<pci busid='{gpu:04x}:01:00.0' class='0x030200'><gpu dev='{gpu}'>");
        for link in 0..40 {
            let target = (gpu + link) % gpus;
            text += &format!("<nvlink target='{target:04x}:02:00.0' tclass='0x068000'/>");
        }
        text +=
            &format!("</gpu></pci><pci busid='{gpu:04x}:03:00.0' class='0x020700'><nic/></pci>");
    }
    text += "</pci></cpu></system>";
    let host = Host::from_nccl_xml(&text).unwrap();
    let start = std::time::Instant::now();
    assert!(!host.lint(&Assumptions::default()).is_empty());
    // Searching all links for each pair took minutes.
    assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
}
