//! Reader for NCCL's XML.

use crate::error::{Error, Result};
use crate::host::device::{BusId, Device, DeviceKind, Interface, PcieLink};
use crate::host::model::Host;
use crate::host::nvlink::NvLink;
use roxmltree::{Document, Node, ParsingOptions};
use std::collections::HashSet;
use std::sync::Arc;

const MAX_DEPTH: usize = 32;

const MAX_DEVICES: usize = 1 << 12;

const MAX_BYTES: usize = 1 << 24;

/// Reads NCCL's XML: `system` holds `cpu`, which holds nested `pci` with `gpu`, `nic` and `net`.
pub(in crate::host) fn read(text: &str) -> Result<Host> {
    crate::network::limit("bytes of XML", text.len() as u128, MAX_BYTES as u64)?;
    check_depth(text)?;
    let document = parse(text)?;
    let system = document.root_element();
    if system.tag_name().name() != "system" {
        let found = system.tag_name().name();
        let reason = format!("<{found}>: expected <system>, the root of NCCL's topology");
        return Err(Error::Xml { line: line(&system), reason });
    }
    let mut reader = Reader { host: Host::default(), seen: HashSet::new() };
    for cpu in elements(&system, "cpu") {
        let numa = number(&cpu, "numaid")?;
        let bridge = numa.map_or("cpu".to_owned(), |numa| format!("cpu{numa}"));
        if let Some(numa) = numa {
            reader.host.numa_nodes.push((numa, String::new()));
        }
        for pci in elements(&cpu, "pci") {
            reader.pci(&pci, None, &bridge, numa, 0)?;
        }
    }
    let mut host = reader.host;
    host.numa_nodes.sort();
    host.numa_nodes.dedup();
    host.prune();
    if host.of_kind(DeviceKind::Gpu).next().is_none() {
        host.notes.push("no GPU was found".to_owned());
    }
    host.xml = Some(Arc::from(text));
    Ok(host)
}

pub(super) fn parse(text: &str) -> Result<Document<'_>> {
    let options = ParsingOptions { allow_dtd: false, nodes_limit: 1 << 18 };
    Document::parse_with_options(text, options)
        .map_err(|error| Error::Xml { line: error.pos().row, reason: error.to_string() })
}

/// PCI class for NVSwitches: "other bridge".
pub(super) const NVSWITCH: &str = "0x068000";

/// NCCL's address for the far end of an NVLink that is hidden from a virtual machine.
pub(super) const UNSEEN: &str = "fffffff:ffff:ff";

struct Reader {
    host: Host,
    seen: HashSet<BusId>,
}

impl Reader {
    fn pci(
        &mut self,
        pci: &Node<'_, '_>,
        parent: Option<usize>,
        bridge: &str,
        numa: Option<u32>,
        depth: usize,
    ) -> Result<()> {
        let fail = |reason: String| Err(Error::Xml { line: line(pci), reason });
        if depth == MAX_DEPTH {
            return fail(format!("<pci> is nested more than {MAX_DEPTH} deep"));
        }
        if self.host.devices.len() == MAX_DEVICES {
            return fail(format!("there are more than {MAX_DEVICES} <pci>"));
        }
        let Some(text) = pci.attribute("busid") else {
            return fail("<pci> has no busid".to_owned());
        };
        let Some(bus_id) = BusId::parse(text) else {
            return fail(format!("busid {text:?}: expected a PCI address, such as 0000:07:00.0"));
        };
        if !self.seen.insert(bus_id) {
            return fail(format!("{bus_id} listed twice"));
        }
        let inner: Vec<Node<'_, '_>> = elements(pci, "pci").collect();
        let gpu = elements(pci, "gpu").next();
        let nic = elements(pci, "nic").next();
        let class = hex(pci, "class")?;
        let vendor = hex(pci, "vendor")?.unwrap_or(0) as u16;
        let kind = match (&gpu, &nic, class) {
            (Some(_), ..) => DeviceKind::Gpu,
            (_, Some(_), _) => DeviceKind::Nic,
            // Handwritten files omit the GPU vendor.
            (_, _, Some(class)) if class >> 8 == 0x0302 => DeviceKind::Gpu,
            (_, _, Some(class)) if inner.is_empty() => DeviceKind::of_class(class, vendor),
            _ if inner.is_empty() => DeviceKind::Other,
            _ => DeviceKind::SwitchPort,
        };
        let link = PcieLink {
            gt_per_s: pci.attribute("link_speed").map_or(0.0, PcieLink::speed),
            width: number(pci, "link_width")?.filter(|&width| width <= 32).unwrap_or(0),
        };
        self.host.devices.push(Device {
            bus_id,
            kind,
            parent,
            host_bridge: bridge.to_owned(),
            class: class.unwrap_or(0) & 0xff_ffff,
            vendor,
            device: hex(pci, "device")?.unwrap_or(0) as u16,
            numa,
            link,
            link_now: link,
            name: None,
            interfaces: nic.map_or(Ok(Vec::new()), |nic| interfaces(&nic))?,
            gpu_index: gpu.map_or(Ok(None), |gpu| number(&gpu, "dev"))?,
            sm: gpu.map_or(Ok(None), |gpu| number(&gpu, "sm"))?,
            mig: None,
        });
        let place = self.host.devices.len() - 1;
        for link in gpu.iter().flat_map(|gpu| elements(gpu, "nvlink")) {
            self.nvlink(&link, bus_id)?;
        }
        for child in inner {
            self.pci(&child, Some(place), bridge, numa, depth + 1)?;
        }
        Ok(())
    }

    fn nvlink(&mut self, link: &Node<'_, '_>, gpu: BusId) -> Result<()> {
        let target = match link.attribute("target").unwrap_or_default() {
            UNSEEN => BusId::UNSEEN,
            text => BusId::parse(text).ok_or_else(|| Error::Xml {
                line: self::line(link),
                reason: format!("<nvlink> target {text:?}: expected a PCI address"),
            })?,
        };
        let count = number(link, "count")?.unwrap_or(1);
        let to_switch = link.attribute("tclass") == Some(NVSWITCH);
        self.host.nvlinks.push(NvLink { gpu, target, count, to_switch });
        Ok(())
    }
}

fn interfaces(nic: &Node<'_, '_>) -> Result<Vec<Interface>> {
    elements(nic, "net")
        .map(|net| {
            let speed = net.attribute("speed").and_then(|text| text.parse::<f64>().ok());
            Ok(Interface {
                name: net.attribute("name").unwrap_or("net").to_owned(),
                gbps: speed
                    .filter(|mbps| mbps.is_finite() && *mbps > 0.0 && *mbps < 1e9)
                    .map(|mbps| mbps / 1000.0),
                rdma: net.attribute("gdr") == Some("1") || net.attribute("guid").is_some(),
                port: number(&net, "port")?.unwrap_or(1),
                guid: net.attribute("guid").map(str::to_owned),
            })
        })
        .collect()
}

pub(super) fn elements<'a, 'input>(
    node: &Node<'a, 'input>,
    name: &'static str,
) -> impl Iterator<Item = Node<'a, 'input>> {
    node.children().filter(move |child| child.has_tag_name(name))
}

fn line(node: &Node<'_, '_>) -> u32 {
    node.document().text_pos_at(node.range().start).row
}

/// A whole number; -1 is unknown.
fn number(node: &Node<'_, '_>, name: &str) -> Result<Option<u32>> {
    match node.attribute(name) {
        None | Some("-1" | "") => Ok(None),
        Some(text) => text.parse().map(Some).map_err(|_| Error::Xml {
            line: line(node),
            reason: format!("{name} is {text:?}, not a whole number"),
        }),
    }
}

fn hex(node: &Node<'_, '_>, name: &str) -> Result<Option<u32>> {
    let Some(text) = node.attribute(name).filter(|text| !text.is_empty()) else { return Ok(None) };
    u32::from_str_radix(text.trim_start_matches("0x"), 16).map(Some).map_err(|_| Error::Xml {
        line: line(node),
        reason: format!("{name} is {text:?}, not a hexadecimal number"),
    })
}

/// Limits the nesting depth before the recursive parser runs; malformed text is left to the parser.
fn check_depth(text: &str) -> Result<()> {
    let mut depth = 0usize;
    let mut place = 0;
    while let Some(next) = text[place..].find('<') {
        place += next;
        let rest = &text[place..];
        let length = if let Some(comment) = rest.strip_prefix("<!--") {
            comment.find("-->").map(|end| end + 7)
        } else if rest.starts_with("<![CDATA[") {
            rest.find("]]>").map(|end| end + 3)
        } else if rest.starts_with("<?") {
            rest.find("?>").map(|end| end + 2)
        } else if rest.starts_with("</") {
            depth = depth.saturating_sub(1);
            rest.find('>').map(|end| end + 1)
        } else {
            let length = tag_length(rest);
            let alone = length.is_some_and(|length| rest[..length].ends_with("/>"));
            depth += usize::from(!alone);
            length
        };
        if depth > 4 * MAX_DEPTH {
            let line = text[..place].matches('\n').count() as u32 + 1;
            let reason = format!("elements are nested more than {} deep", 4 * MAX_DEPTH);
            return Err(Error::Xml { line, reason });
        }
        let Some(length) = length else { break };
        place += length;
    }
    Ok(())
}

/// Tag length at the start of a text, quoted brackets included.
fn tag_length(text: &str) -> Option<usize> {
    let mut quote = None;
    for (place, byte) in text.bytes().enumerate() {
        match (quote, byte) {
            (None, b'>') => return Some(place + 1),
            (None, b'"' | b'\'') => quote = Some(byte),
            (Some(open), _) if open == byte => quote = None,
            _ => {}
        }
    }
    None
}
