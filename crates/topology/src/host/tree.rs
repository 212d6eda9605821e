//! Server as a text tree.

use super::device::{DeviceKind, PcieLink};
use super::model::Host;
use std::fmt::Write as _;

/// The tree, a line for each device: NUMA nodes, then GPUs and NICs with links.
pub(super) fn text(host: &Host) -> String {
    let mut text = String::new();
    // Downstream switch ports are omitted: they repeat the device below.
    let lower = |index: usize| {
        let depth = host.above(index).len();
        let port = host.devices[index].kind == DeviceKind::SwitchPort;
        port && host.lists_ports && depth > 0 && depth.is_multiple_of(2)
    };
    let mut below: Vec<Vec<usize>> = vec![Vec::new(); host.devices.len()];
    for index in (0..host.devices.len()).filter(|&index| !lower(index)) {
        if let Some(parent) = host.above(index).into_iter().find(|&bridge| !lower(bridge)) {
            below[parent].push(index);
        }
    }
    let mut nodes: Vec<Option<u32>> = host.devices.iter().map(|device| device.numa).collect();
    nodes.sort_unstable();
    nodes.dedup();
    for node in nodes {
        let tops: Vec<usize> = (0..host.devices.len())
            .filter(|&d| host.devices[d].parent.is_none() && host.devices[d].numa == node)
            .collect();
        if tops.is_empty() {
            continue;
        }
        let title = node.map_or("NUMA node unknown".to_owned(), |node| format!("NUMA node {node}"));
        let cpus = host.numa_nodes.iter().find(|(number, _)| Some(*number) == node);
        let cpus = cpus.filter(|(_, cpus)| !cpus.is_empty());
        let cpus = cpus.map_or(String::new(), |(_, cpus)| format!("  CPUs {cpus}"));
        let _ = writeln!(text, "{title}{cpus}");
        write_children(host, &mut text, &below, &tops, "");
    }
    text
}

fn write_children(
    host: &Host,
    text: &mut String,
    below: &[Vec<usize>],
    children: &[usize],
    indent: &str,
) {
    for (place, &child) in children.iter().enumerate() {
        let last = place + 1 == children.len();
        let branch = if last { "└─" } else { "├─" };
        let _ = writeln!(text, "{indent}{branch} {}", line(host, child));
        let indent = format!("{indent}{}", if last { "   " } else { "│  " });
        write_children(host, text, below, &below[child], &indent);
    }
}

fn line(host: &Host, index: usize) -> String {
    let device = &host.devices[index];
    let mut line = match device.kind {
        DeviceKind::Gpu | DeviceKind::Nic => {
            format!("{} {}", host.label(index), device.bus_id)
        }
        DeviceKind::RootPort => format!("root port {}", device.bus_id),
        DeviceKind::SwitchPort => format!("switch {}", device.bus_id),
        DeviceKind::Other => device.bus_id.to_string(),
    };
    if let Some(name) = &device.name {
        let _ = write!(line, "  {name}");
    }
    if let Some(link) = link_text(&device.link) {
        let _ = write!(line, "  {link}");
    }
    for interface in &device.interfaces {
        let rate = interface.gbps.map_or("rate unknown".to_owned(), |gbps| format!("{gbps} Gb/s"));
        let _ = write!(line, "  {}:{} {rate}", interface.name, interface.port);
    }
    if device.mig == Some(true) {
        line.push_str("  MIG");
    }
    line
}

fn link_text(link: &PcieLink) -> Option<String> {
    let rate = link.raw_gb_per_s()?;
    let speed = match link.generation() {
        Some(generation) => format!("PCIe {generation}"),
        None => format!("{} GT/s", link.gt_per_s),
    };
    Some(format!("{speed} x{} {rate:.1} GB/s", link.width))
}
