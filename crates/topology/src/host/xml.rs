//! NCCL's topology XML: what `NCCL_TOPO_DUMP_FILE` writes and `NCCL_TOPO_FILE` reads.

use super::model::{BusId, Device, DeviceKind, Host, Interface, NvLink, PcieLink};
use crate::error::{Error, Result};
use roxmltree::{Document, Node, ParsingOptions};
use std::collections::HashSet;
use std::fmt::Write as _;

const MAX_DEPTH: usize = 32;
const MAX_DEVICES: usize = 1 << 12;
const MAX_BYTES: usize = 1 << 24;

impl Host {
    /// Reads NCCL's XML: `system`, in it `cpu`, in it `pci`, which nest, with `gpu`, `nic` and `net`.
    pub fn from_nccl_xml(text: &str) -> Result<Host> {
        crate::network::limit("bytes of XML", text.len() as u128, MAX_BYTES as u64)?;
        check_depth(text)?;
        let options = ParsingOptions { allow_dtd: false, nodes_limit: 1 << 18 };
        let document = Document::parse_with_options(text, options)
            .map_err(|error| Error::Xml { line: error.pos().row, reason: error.to_string() })?;
        let system = document.root_element();
        if system.tag_name().name() != "system" {
            let found = system.tag_name().name();
            let reason = format!("<{found}> is not NCCL's topology, which is in <system>");
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
        Ok(host)
    }

    /// Writes NCCL's XML. Switches stand there by the port towards the CPU, as NCCL has them.
    pub fn to_nccl_xml(&self) -> String {
        let mut text = String::from("<system version=\"1\">\n");
        // In the order in which they first come, so that reading it gives devices in their order.
        let mut nodes: Vec<Option<u32>> = Vec::new();
        for device in &self.devices {
            if !nodes.contains(&device.numa) {
                nodes.push(device.numa);
            }
        }
        for node in nodes {
            let tops: Vec<usize> = (0..self.devices.len())
                .filter(|&d| self.devices[d].parent.is_none() && self.devices[d].numa == node)
                .collect();
            if tops.is_empty() {
                continue;
            }
            let number = node.map_or("-1".to_owned(), |node| node.to_string());
            let _ = writeln!(text, "  <cpu numaid=\"{number}\">");
            for top in tops {
                self.write_pci(&mut text, top, 0, 2);
            }
            text.push_str("  </cpu>\n");
        }
        text.push_str("</system>\n");
        text
    }

    fn write_pci(&self, text: &mut String, index: usize, depth: usize, indent: usize) {
        let device = &self.devices[index];
        let bridge = matches!(device.kind, DeviceKind::RootPort | DeviceKind::SwitchPort);
        let children: Vec<usize> = (index + 1..self.devices.len())
            .filter(|&child| self.devices[child].parent == Some(index))
            .collect();
        // Root ports and lower ports of switches are at even depths.
        if bridge && self.lists_ports && depth.is_multiple_of(2) {
            for child in children {
                self.write_pci(text, child, depth + 1, indent);
            }
            return;
        }
        let space = "  ".repeat(indent);
        let _ = write!(
            text,
            "{space}<pci busid=\"{}\" class=\"{:#08x}\" vendor=\"{:#06x}\" device=\"{:#06x}\"",
            device.bus_id, device.class, device.vendor, device.device
        );
        if device.link.raw_gb_per_s().is_some() {
            let PcieLink { gt_per_s, width } = device.link;
            let _ = write!(text, " link_speed=\"{gt_per_s:.1} GT/s PCIe\" link_width=\"{width}\"");
        }
        let mut inside = String::new();
        match device.kind {
            DeviceKind::Gpu => self.write_gpu(&mut inside, index, &"  ".repeat(indent + 1)),
            DeviceKind::Nic => write_nic(&mut inside, device, &"  ".repeat(indent + 1)),
            _ => {}
        }
        for child in children {
            self.write_pci(&mut inside, child, depth + 1, indent + 1);
        }
        let _ = match inside.is_empty() {
            true => writeln!(text, "/>"),
            false => writeln!(text, ">\n{inside}{space}</pci>"),
        };
    }

    fn write_gpu(&self, text: &mut String, index: usize, space: &str) {
        let device = &self.devices[index];
        let number = self.gpus().into_iter().position(|gpu| gpu == index).unwrap_or(0);
        let number = device.gpu_index.unwrap_or(number as u32);
        let _ = write!(text, "{space}<gpu dev=\"{number}\"");
        if let Some(sm) = device.sm {
            let _ = write!(text, " sm=\"{sm}\"");
        }
        let links: Vec<&NvLink> =
            self.nvlinks.iter().filter(|link| link.gpu == device.bus_id).collect();
        if links.is_empty() {
            text.push_str("/>\n");
            return;
        }
        text.push_str(">\n");
        for link in links {
            let class = if link.to_switch { NVSWITCH } else { "0x030200" };
            let target = match link.target {
                BusId::UNSEEN => UNSEEN.to_owned(),
                target => target.to_string(),
            };
            let _ = writeln!(
                text,
                "{space}  <nvlink target=\"{target}\" count=\"{}\" tclass=\"{class}\"/>",
                link.count
            );
        }
        let _ = writeln!(text, "{space}</gpu>");
    }
}

/// The class of a bridge of another kind, which is what NVSwitches say they are.
const NVSWITCH: &str = "0x068000";

/// What NCCL writes for the far end of an NVLink that a virtual machine cannot see.
const UNSEEN: &str = "fffffff:ffff:ff";

fn write_nic(text: &mut String, device: &Device, space: &str) {
    if device.interfaces.is_empty() {
        return;
    }
    let _ = writeln!(text, "{space}<nic>");
    for interface in &device.interfaces {
        let name = escaped(&interface.name);
        let _ = write!(text, "{space}  <net name=\"{name}\" port=\"{}\"", interface.port);
        if let Some(gbps) = interface.gbps {
            let _ = write!(text, " speed=\"{:.0}\"", gbps * 1000.0);
        }
        if let Some(guid) = &interface.guid {
            let _ = write!(text, " guid=\"{}\"", escaped(guid));
        }
        let _ = writeln!(text, " gdr=\"{}\"/>", u8::from(interface.rdma));
    }
    let _ = writeln!(text, "{space}</nic>");
}

fn escaped(text: &str) -> String {
    let mut safe = String::new();
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            letter if letter.is_control() || matches!(letter, '\u{fffe}' | '\u{ffff}') => {
                safe.push('?');
            }
            letter => safe.push(letter),
        }
    }
    safe
}

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
            return fail(format!("busid {text:?} is no PCI address, such as 0000:07:00.0"));
        };
        if !self.seen.insert(bus_id) {
            return fail(format!("{bus_id} is there twice"));
        }
        let inner: Vec<Node<'_, '_>> = elements(pci, "pci").collect();
        let gpu = elements(pci, "gpu").next();
        let nic = elements(pci, "nic").next();
        let class = hex(pci, "class")?;
        let vendor = hex(pci, "vendor")?.unwrap_or(0) as u16;
        let kind = match (&gpu, &nic, class) {
            (Some(_), ..) => DeviceKind::Gpu,
            (_, Some(_), _) => DeviceKind::Nic,
            // Files by hand leave the vendor of a GPU out.
            (_, _, Some(class)) if class >> 8 == 0x0302 => DeviceKind::Gpu,
            (_, _, Some(class)) if inner.is_empty() => Host::kind_of(class, vendor),
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
                reason: format!("<nvlink> leads to {text:?}, which is no PCI address"),
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

fn elements<'a, 'input>(
    node: &Node<'a, 'input>,
    name: &'static str,
) -> impl Iterator<Item = Node<'a, 'input>> {
    node.children().filter(move |child| child.has_tag_name(name))
}

fn line(node: &Node<'_, '_>) -> u32 {
    node.document().text_pos_at(node.range().start).row
}

/// A whole number; -1 means that it is not known.
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

/// Refuses text that nests deeply before a parser that recurses sees it. What is not well-formed is left to the
/// parser, which stops there.
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

/// The length of the tag that a text begins with; brackets in quotes are part of it.
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
