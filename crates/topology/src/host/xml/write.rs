//! Writer for NCCL's topology XML, for a server that was not read from XML.

use super::reader::{NVSWITCH, UNSEEN};
use crate::host::device::{BusId, Device, DeviceKind, PcieLink};
use crate::host::model::Host;
use crate::host::nvlink::NvLink;
use std::fmt::Write as _;

/// NCCL's XML for a server. A PCIe switch is written as its upstream port, as NCCL has it.
pub fn write(host: &Host) -> String {
    let mut text = String::from("<system version=\"1\">\n");
    // In the order in which they first occur: the reader returns devices in the same order.
    let mut nodes: Vec<Option<u32>> = Vec::new();
    for device in &host.devices {
        if !nodes.contains(&device.numa) {
            nodes.push(device.numa);
        }
    }
    for node in nodes {
        let tops: Vec<usize> = (0..host.devices.len())
            .filter(|&d| host.devices[d].parent.is_none() && host.devices[d].numa == node)
            .collect();
        if tops.is_empty() {
            continue;
        }
        let number = node.map_or("-1".to_owned(), |node| node.to_string());
        let _ = writeln!(text, "  <cpu numaid=\"{number}\">");
        for top in tops {
            write_pci(host, &mut text, top, 0, 2);
        }
        text.push_str("  </cpu>\n");
    }
    text.push_str("</system>\n");
    text
}

fn write_pci(host: &Host, text: &mut String, index: usize, depth: usize, indent: usize) {
    let device = &host.devices[index];
    let bridge = matches!(device.kind, DeviceKind::RootPort | DeviceKind::SwitchPort);
    let children: Vec<usize> = (index + 1..host.devices.len())
        .filter(|&child| host.devices[child].parent == Some(index))
        .collect();
    // Root ports and downstream switch ports are at even depths.
    if bridge && host.lists_ports && depth.is_multiple_of(2) {
        for child in children {
            write_pci(host, text, child, depth + 1, indent);
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
        DeviceKind::Gpu => write_gpu(host, &mut inside, index, &"  ".repeat(indent + 1)),
        DeviceKind::Nic => write_nic(&mut inside, device, &"  ".repeat(indent + 1)),
        _ => {}
    }
    for child in children {
        write_pci(host, &mut inside, child, depth + 1, indent + 1);
    }
    let _ = match inside.is_empty() {
        true => writeln!(text, "/>"),
        false => writeln!(text, ">\n{inside}{space}</pci>"),
    };
}

fn write_gpu(host: &Host, text: &mut String, index: usize, space: &str) {
    let device = &host.devices[index];
    let number = host.gpus().into_iter().position(|gpu| gpu == index).unwrap_or(0);
    let number = device.gpu_index.unwrap_or(number as u32);
    let _ = write!(text, "{space}<gpu dev=\"{number}\"");
    if let Some(sm) = device.sm {
        let _ = write!(text, " sm=\"{sm}\"");
    }
    let links: Vec<&NvLink> =
        host.nvlinks.iter().filter(|link| link.gpu == device.bus_id).collect();
    if links.is_empty() {
        text.push_str("/>\n");
        return;
    }
    text.push_str(">\n");
    for link in links {
        let _ = writeln!(text, "{space}  {}", nvlink_element(link));
    }
    let _ = writeln!(text, "{space}</gpu>");
}

/// NVLink element.
pub(super) fn nvlink_element(link: &NvLink) -> String {
    let class = if link.to_switch { NVSWITCH } else { "0x030200" };
    let target = match link.target {
        BusId::UNSEEN => UNSEEN.to_owned(),
        target => target.to_string(),
    };
    format!("<nvlink target=\"{target}\" count=\"{}\" tclass=\"{class}\"/>", link.count)
}

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
