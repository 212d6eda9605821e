//! Server reader for `/sys`, or a recorded copy.

use super::device::{BusId, Device, DeviceKind, Interface, PcieLink};
use super::model::Host;
use std::collections::HashSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Tree limits: a copy is untrusted input.
const MAX_DEVICES: usize = 1 << 12;
const MAX_DEPTH: usize = 32;

/// Reads the server below `root`. Missing and invalid entries are skipped and recorded in
/// [`notes`](Host::notes).
pub(super) fn read_host(root: &Path) -> Host {
    let mut host = Host { lists_ports: true, ..Host::default() };
    let mut roots = children(&root.join("devices"), "pci");
    roots.extend(elsewhere(root));
    if roots.is_empty() {
        host.notes.push(format!("no PCI devices under {}", root.join("devices").display()));
    }
    let mut seen = HashSet::new();
    for bridge in roots {
        let name = file_name(&bridge);
        let mut left: Vec<(PathBuf, Option<usize>, usize)> = Vec::new();
        push_children(&mut left, &bridge, None, 0);
        while let Some((path, parent, depth)) = left.pop() {
            let Some(bus_id) = BusId::parse(&file_name(&path)) else { continue };
            if depth == MAX_DEPTH || host.devices.len() == MAX_DEVICES {
                host.notes
                    .push(format!("{bus_id} and the devices below it skipped: tree too large"));
                continue;
            }
            if !seen.insert(bus_id) {
                host.notes.push(format!("{bus_id} listed twice"));
                continue;
            }
            let device = read_device(&path, bus_id, parent, &name, &mut host.notes);
            host.devices.push(device);
            push_children(&mut left, &path, Some(host.devices.len() - 1), depth + 1);
        }
    }
    host.numa_nodes = numa_nodes(root);
    if let [(only, _)] = host.numa_nodes[..] {
        host.devices.iter_mut().for_each(|device| device.numa = device.numa.or(Some(only)));
    }
    host.prune();
    let gpus = host.gpus();
    if gpus.is_empty() {
        host.notes.push("no GPU was found".to_owned());
    } else if gpus.iter().all(|&gpu| host.devices[gpu].parent.is_none()) {
        let note = "no bridge is above any GPU: a virtual machine probably hides the PCIe tree, so \
                    distances are unreliable";
        host.notes.push(note.to_owned());
    }
    host
}

/// Pushes the devices in a directory onto a stack, in reverse order.
fn push_children(
    left: &mut Vec<(PathBuf, Option<usize>, usize)>,
    directory: &Path,
    parent: Option<usize>,
    depth: usize,
) {
    let devices = children(directory, "").into_iter().rev();
    let devices = devices.filter(|path| BusId::parse(&file_name(path)).is_some());
    left.extend(devices.map(|path| (path, parent, depth)));
}

/// Host bridges that are not direct children of `devices`, by the links on the PCI bus.
fn elsewhere(root: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    let devices = fs::canonicalize(root.join("devices")).unwrap_or_default();
    for link in children(&root.join("bus/pci/devices"), "").into_iter().take(MAX_DEVICES) {
        let Ok(target) = fs::canonicalize(&link) else { continue };
        let bridge = target.ancestors().find(|path| file_name(path).starts_with("pci"));
        if let Some(bridge) = bridge {
            let usual = bridge.parent() == Some(&devices);
            if !usual && bridge.starts_with(&devices) && !found.iter().any(|known| known == bridge)
            {
                found.push(bridge.to_owned());
            }
        }
    }
    found
}

fn read_device(
    path: &Path,
    bus_id: BusId,
    parent: Option<usize>,
    host_bridge: &str,
    notes: &mut Vec<String>,
) -> Device {
    let hex = |name: &str| {
        let text = read(&path.join(name))?;
        u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()
    };
    let class = hex("class").unwrap_or_else(|| {
        notes.push(format!("{bus_id} has no class"));
        0
    });
    let vendor = hex("vendor").unwrap_or(0) as u16;
    let link = |which: &str| PcieLink {
        gt_per_s: read(&path.join(format!("{which}_link_speed")))
            .map_or(0.0, |text| PcieLink::speed(&text)),
        width: read(&path.join(format!("{which}_link_width")))
            .and_then(|text| text.parse().ok())
            // Devices without a link report 255 or 0.
            .filter(|&width| width <= 32)
            .unwrap_or(0),
    };
    let (most, now) = (link("max"), link("current"));
    let mut kind = DeviceKind::of_class(class & 0xff_ffff, vendor);
    if kind == DeviceKind::SwitchPort && parent.is_none() {
        kind = DeviceKind::RootPort;
    }
    Device {
        bus_id,
        kind,
        parent,
        host_bridge: host_bridge.to_owned(),
        class: class & 0xff_ffff,
        vendor,
        device: hex("device").unwrap_or(0) as u16,
        // A machine with one node reports -1.
        numa: read(&path.join("numa_node")).and_then(|text| text.parse().ok()),
        link: if most.raw_gb_per_s().is_some() { most } else { now },
        link_now: now,
        name: read(&path.join("label")),
        interfaces: if kind == DeviceKind::Nic { interfaces(path) } else { Vec::new() },
        gpu_index: None,
        sm: None,
        mig: None,
    }
}

fn interfaces(path: &Path) -> Vec<Interface> {
    let mut found = Vec::new();
    for device in children(&path.join("infiniband"), "") {
        let name = file_name(&device);
        let guid = read(&device.join("node_guid"));
        let mut ports = children(&device.join("ports"), "");
        if ports.is_empty() {
            ports.push(device.join("ports/1"));
        }
        for port in ports.into_iter().take(16) {
            // "200 Gb/sec (4X HDR)"
            let rate = read(&port.join("rate"));
            let gbps =
                rate.as_deref().and_then(|text| text.split_whitespace().next()?.parse().ok());
            found.push(Interface {
                name: name.clone(),
                gbps: plausible(gbps),
                rdma: true,
                port: file_name(&port).parse().unwrap_or(1),
                guid: guid.clone(),
            });
        }
    }
    if found.is_empty() {
        // Virtio interfaces are one level deeper.
        let mut folders = vec![path.join("net")];
        folders.extend(children(path, "virtio").into_iter().map(|path| path.join("net")));
        for device in folders.iter().flat_map(|path| children(path, "")).take(64) {
            // Mb/s; -1 where there is no link.
            let mbps = read(&device.join("speed")).and_then(|text| text.parse::<f64>().ok());
            let gbps = plausible(mbps.map(|mbps| mbps / 1000.0));
            let name = file_name(&device);
            found.push(Interface { name, gbps, rdma: false, port: 1, guid: None });
        }
    }
    found
}

fn plausible(gbps: Option<f64>) -> Option<f64> {
    gbps.filter(|gbps| gbps.is_finite() && *gbps > 0.0 && *gbps < 1e6)
}

fn numa_nodes(root: &Path) -> Vec<(u32, String)> {
    let mut nodes: Vec<(u32, String)> = children(&root.join("devices/system/node"), "node")
        .into_iter()
        .filter_map(|path| {
            let number = file_name(&path).strip_prefix("node")?.parse().ok()?;
            Some((number, read(&path.join("cpulist")).unwrap_or_default()))
        })
        .collect();
    nodes.sort();
    nodes
}

/// Sorted directory entries with this name prefix; empty if it is unreadable.
fn children(path: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten().take(MAX_DEVICES);
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Trimmed text in a small file; `None` if empty or unreadable.
fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    // A pipe or a device in a copied tree would block.
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    fs::File::open(path).ok()?.take(4096).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    (!text.is_empty()).then_some(text)
}
