//! NCCL's topology XML: what is read is written back whole.

use proptest::prelude::*;
use roxmltree::{Document, Node};
use weft_topology::host::{Host, NvmlGpu};

/// NCCL's dump from a server, with an attribute and an element that no NCCL version has.
const DUMP: &str = r#"<?xml version="1.0"?>
<!-- recorded -->
<system version="1" name="a &quot;box&quot;">
  <cpu host_hash="0x8393fb66b8b750c5" numaid="3" affinity="ffff0000" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">
    <pci busid="0000:01:00.0" class="0x060400" vendor="0x1000" device="0xc010" subsystem_vendor="0x1000" subsystem_device="0x100b" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:0c:00.0" class="0x020700" vendor="0x15b3" device="0x101b" subsystem_vendor="0x15b3" subsystem_device="0x0007" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic>
          <net name="mlx5_0" dev="0" latency="0.500000" speed="200000" port="1" guid="0xa262550003a1420c" maxconn="131072" gdr="1" coll="1" keep="1"/>
        </nic>
      </pci>
      <pci busid="0000:0f:00.0" class="0x030200" vendor="0x10de" device="0x20b0" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="80" rank="1" gdr="1">
          <nvlink target="0000:c7:00.0" count="2" tclass="0x068000"/>
          <c2c bw="40000" count="1"/>
        </gpu>
      </pci>
      <pci busid="0000:1f:00.0" class="0x010802" vendor="0x144d" device="0xa80a"/>
    </pci>
  </cpu>
  <cpu numaid="1" arch="x86_64"><nic><net name="virtual" dev="1" speed="10000" port="0"/></nic></cpu>
</system>
"#;

#[test]
fn a_dump_of_nccl_is_written_back_whole() {
    assert_eq!(Host::from_nccl_xml(DUMP).unwrap().to_nccl_xml(), DUMP);
}

#[test]
fn nvml_changes_only_gpus_of_a_dump() {
    let gpu = |bus_id: &str, sm| NvmlGpu {
        bus_id: bus_id.to_owned(),
        index: 5,
        name: None,
        sm: Some(sm),
        mig: None,
        nvlinks: vec!["00000000:C8:00.0".to_owned()],
    };
    for (from, into) in [
        ("<nvlink target=\"0000:c7:00.0\" count=\"2\" tclass=\"0x068000\"/>", ""),
        ("<gpu dev=\"1\" sm=\"80\"", "<gpu"),
        ("rank=\"1\" gdr=\"1\">", "rank=\"1\" gdr=\"1\"><!-- </gpu> -->"),
    ] {
        let text = DUMP.replace(from, into);
        let mut host = Host::from_nccl_xml(&text).unwrap();
        host.add_nvml(&[gpu("0000:0f:00.0", 90)]);
        let written = host.to_nccl_xml();
        let again = Host::from_nccl_xml(&written).unwrap();
        assert_eq!((&again.devices, &again.nvlinks), (&host.devices, &host.nvlinks), "{written}");
        let named = |name| move |node: &String| !node.starts_with(name);
        let others = |text: &str| -> Vec<String> {
            let document = Document::parse(text).unwrap();
            let nodes = document.descendants().filter(|node| !node.is_text()).map(described);
            nodes.filter(named("gpu")).filter(named("nvlink")).collect()
        };
        assert_eq!(others(&written), others(&text));
        assert!(written.contains("rank=\"1\" gdr=\"1\""), "{written}");
    }
    // GPUs in handwritten files, known by class.
    for pci in [
        "<pci busid='0:1:0.0' class='0x030200'/>",
        "<pci busid='0:1:0.0' class='0x030200'>\n</pci>",
    ] {
        let mut host = Host::from_nccl_xml(&format!("<system><cpu>{pci}</cpu></system>")).unwrap();
        host.add_nvml(&[gpu("0000:01:00.0", 90)]);
        let again = Host::from_nccl_xml(&host.to_nccl_xml()).unwrap();
        assert_eq!((&again.devices, &again.nvlinks), (&host.devices, &host.nvlinks));
    }
}

/// A node's name, attributes and text.
fn described(node: Node<'_, '_>) -> String {
    let attributes: Vec<_> =
        node.attributes().map(|each| (each.name().to_owned(), each.value().to_owned())).collect();
    format!("{} {attributes:?} {:?}", node.tag_name().name(), node.text().map(str::trim))
}

/// Attributes, each by chance, some with names that NCCL does not have.
fn attributes(names: &'static [&'static str]) -> impl Strategy<Value = String> {
    let value = prop_oneof!["[0-9]{1,3}", "[a-z]{1,4}&amp;[a-z]{0,3}", Just("-1".to_owned())];
    let known = proptest::collection::vec((proptest::sample::select(names), value), 0..5);
    known.prop_map(|listed| {
        let mut once: Vec<(&str, String)> = Vec::new();
        for (name, value) in listed {
            if once.iter().all(|(known, _)| *known != name) {
                once.push((name, value));
            }
        }
        once.iter().map(|(name, value)| format!(" {name}=\"{value}\"")).collect()
    })
}

/// A device below a CPU or a switch: a GPU, a NIC, an unknown one, or a switch with devices.
fn device(depth: u32) -> BoxedStrategy<String> {
    let pci = attributes(&["subsystem_vendor", "subsystem_device", "link_speed", "future"]);
    let gpu = (
        attributes(&["rank", "gdr", "mem", "future"]),
        proptest::collection::vec(attributes(&["tclass", "future"]), 0..3),
    )
        .prop_map(|(gpu, links)| {
            let nvlink = |link: &String| format!("<nvlink target=\"0000:c7:00.0\"{link}/>");
            format!(
                "<gpu dev=\"0\" sm=\"90\"{gpu}>{}</gpu>",
                links.iter().map(nvlink).collect::<String>()
            )
        });
    let nic = attributes(&["dev", "latency", "maxconn", "coll", "gdr", "guid", "future"])
        .prop_map(|net| format!("<nic><net name=\"mlx5_0\"{net}/></nic>"));
    let other = attributes(&["bw", "count"]).prop_map(|future| format!("<future{future}/> text"));
    let inside = match depth {
        0 => prop_oneof![gpu, nic, other].boxed(),
        _ => prop_oneof![
            gpu,
            nic,
            other,
            proptest::collection::vec(device(depth - 1), 0..3).prop_map(|each| each.concat())
        ]
        .boxed(),
    };
    (pci, inside).prop_map(|(pci, inside)| format!("<pci busid=\"?\"{pci}>{inside}</pci>")).boxed()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn generated_servers_are_written_back_whole(
        cpus in proptest::collection::vec(
            (attributes(&["affinity", "arch", "vendor", "familyid", "modelid", "future"]),
             proptest::collection::vec(device(2), 0..3)), 0..3),
    ) {
        let mut text = String::from("<system version=\"1\">\n");
        for (number, (cpu, devices)) in cpus.iter().enumerate() {
            text += &format!("<cpu numaid=\"{number}\"{cpu}>{}</cpu>\n", devices.concat());
        }
        text += "</system>\n";
        let mut bus = 0;
        while text.contains('?') {
            text = text.replacen('?', &format!("0000:{bus:02x}:00.0"), 1);
            bus += 1;
        }
        let written = Host::from_nccl_xml(&text).unwrap().to_nccl_xml();
        let nodes = |text: &str| -> Vec<String> {
            Document::parse(text).unwrap().descendants().map(described).collect()
        };
        prop_assert_eq!(nodes(&written), nodes(&text));
    }
}
