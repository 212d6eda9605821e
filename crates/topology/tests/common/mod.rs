//! Helpers for several tests: paths, and directories like `/sys` from compact descriptions (format in
//! `tests/data/README.md`).
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use weft_topology::{EndpointId, LinkId, Router};

/// Links on an existing path.
pub fn path(router: &mut Router, from: u32, to: u32, flow: u64) -> Vec<LinkId> {
    let mut links = Vec::new();
    router.path(EndpointId(from), EndpointId(to), flow, &mut links).unwrap();
    links
}

/// Temporary directory, removed on drop.
pub struct Tree(PathBuf);

impl Tree {
    /// Empty directory.
    pub fn empty() -> Tree {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("weft-topology-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Tree(path)
    }

    /// Server with this name in `tests/data`.
    pub fn of(name: &str) -> Tree {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/{name}.sysfs"));
        Tree::from(&fs::read_to_string(file).unwrap())
    }

    /// Server from a description.
    pub fn from(text: &str) -> Tree {
        let tree = Tree::empty();
        let mut above: Vec<PathBuf> = Vec::new();
        let mut bridge_numa = "-1";
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let depth = (line.len() - line.trim_start().len()) / 2;
            let words: Vec<&str> = line.split_whitespace().collect();
            above.truncate(depth);
            match words[0] {
                "node" => {
                    tree.write(&format!("devices/system/node/node{}/cpulist", words[1]), words[2]);
                }
                "bridge" => {
                    bridge_numa = words[2].strip_prefix("numa=").unwrap();
                    above.push(Path::new("devices").join(words[1]));
                    fs::create_dir_all(tree.0.join(&above[0])).unwrap();
                }
                address => {
                    let path = above.last().unwrap().join(address);
                    tree.device(path.to_str().unwrap(), &words[1..], bridge_numa);
                    above.push(path);
                }
            }
        }
        tree
    }

    /// Directory path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn device(&self, path: &str, words: &[&str], numa: &str) {
        let put =
            |name: &str, value: &str| self.write(&format!("{path}/{name}"), format!("{value}\n"));
        put("numa_node", numa);
        for word in words {
            let (word, value) = word.split_once('=').unwrap_or((word, ""));
            let link = |which: &str| {
                let (speed, width) = value.split_once('*').unwrap();
                put(&format!("{which}_link_speed"), &format!("{speed} GT/s PCIe"));
                put(&format!("{which}_link_width"), width);
            };
            let set = |class: &str, vendor: &str, device: &str| {
                put("class", class);
                put("vendor", &format!("0x{vendor}"));
                put("device", &format!("0x{device}"));
            };
            match word {
                "port" => set("0x060400", "1000", "c010"),
                "nvswitch" => set("0x068000", "10de", "1af1"),
                "gpu" => {
                    let (vendor, device) = value.split_once(':').unwrap();
                    set("0x030200", vendor, device);
                }
                "ib" => {
                    let (name, gbps) = value.split_once(':').unwrap();
                    set("0x020700", "15b3", "101b");
                    put(
                        &format!("infiniband/{name}/ports/1/rate"),
                        &format!("{gbps} Gb/sec (4X HDR)"),
                    );
                    put(&format!("infiniband/{name}/node_guid"), "a262:5500:03a1:420c");
                }
                "net" => {
                    let (name, mbps) = value.split_once(':').unwrap();
                    set("0x020000", "1d0f", "ec20");
                    let name = if name.contains('/') { name } else { &format!("net/{name}") };
                    put(&format!("{name}/speed"), mbps);
                }
                "link" => {
                    link("max");
                    link("current");
                }
                "now" => link("current"),
                "numa" => put("numa_node", value),
                other => panic!("unknown word {other}"),
            }
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
