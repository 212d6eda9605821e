//! NCCL's XML as it was read, with changes to the GPUs.

use super::reader::{elements, parse, read};
use super::write::nvlink_element;
use crate::error::Result;
use crate::host::device::{BusId, DeviceKind};
use crate::host::model::Host;
use crate::host::nvlink::NvLink;
use roxmltree::Node;
use std::ops::Range;

/// The XML that a server was read from, with the GPU numbers and NVLinks that have changed since. All other bytes stay
/// as they were read.
pub(super) fn rewritten(host: &Host, text: &str) -> Result<String> {
    let before = read(text)?;
    let document = parse(text)?;
    let mut edits = Edits::default();
    for pci in document.descendants().filter(|node| node.has_tag_name("pci")) {
        let Some(bus_id) = pci.attribute("busid").and_then(BusId::parse) else { continue };
        let gpu_of = |host: &Host| {
            let gpu = host.of_kind(DeviceKind::Gpu).find(|&gpu| host.devices[gpu].bus_id == bus_id);
            gpu.map(|gpu| (host.devices[gpu].gpu_index, host.devices[gpu].sm))
        };
        let (Some(was), Some(is)) = (gpu_of(&before), gpu_of(host)) else { continue };
        let links = nvlinks(host, bus_id);
        let relinked = (links != nvlinks(&before, bus_id)).then_some(links);
        if was == is && relinked.is_none() {
            continue;
        }
        match elements(&pci, "gpu").next() {
            Some(gpu) => edits.change(&gpu, is, relinked),
            // Handwritten files have GPUs only by class.
            None => edits.insert(&pci, gpu_element(is, &relinked.unwrap_or_default())),
        }
    }
    Ok(edits.apply(text))
}

fn nvlinks(host: &Host, gpu: BusId) -> Vec<NvLink> {
    host.nvlinks.iter().filter(|link| link.gpu == gpu).copied().collect()
}

fn gpu_element((dev, sm): (Option<u32>, Option<u32>), links: &[NvLink]) -> String {
    let attribute = |name, value: Option<u32>| {
        value.map_or(String::new(), |value| format!(" {name}=\"{value}\""))
    };
    let links: String = links.iter().map(nvlink_element).collect();
    format!("<gpu{}{}>{links}</gpu>", attribute("dev", dev), attribute("sm", sm))
}

/// Replacements for text ranges, which do not overlap.
#[derive(Default)]
struct Edits(Vec<(Range<usize>, String)>);

impl Edits {
    /// Sets the numbers on a `<gpu>`, and the NVLinks if there are others.
    fn change(
        &mut self,
        gpu: &Node<'_, '_>,
        (dev, sm): (Option<u32>, Option<u32>),
        links: Option<Vec<NvLink>>,
    ) {
        for (name, value) in [("dev", dev), ("sm", sm)] {
            let Some(value) = value.map(|value| value.to_string()) else { continue };
            match gpu.attribute_node(name) {
                Some(known) => self.0.push((known.range_value(), value)),
                None => {
                    let behind_name = gpu.range().start + "<gpu".len();
                    self.0.push((behind_name..behind_name, format!(" {name}=\"{value}\"")));
                }
            }
        }
        if let Some(links) = links {
            self.0.extend(elements(gpu, "nvlink").map(|link| (link.range(), String::new())));
            self.insert(gpu, links.iter().map(nvlink_element).collect());
        }
    }

    /// Inserts elements at the end of another one.
    fn insert(&mut self, node: &Node<'_, '_>, inside: String) {
        let range = node.range();
        let source = &node.document().input_text()[range.clone()];
        if source.ends_with("/>") && !node.has_children() {
            let name = node.tag_name().name();
            self.0.push((range.end - 2..range.end, format!(">{inside}</{name}>")));
        } else if let Some(end_tag) = source.rfind("</") {
            let place = range.start + end_tag;
            self.0.push((place..place, inside));
        }
    }

    fn apply(mut self, text: &str) -> String {
        // Stable: among edits at one place, the first comes first.
        self.0.sort_by_key(|(range, _)| (range.start, range.end));
        let mut edited = String::with_capacity(text.len());
        let mut place = 0;
        for (range, replacement) in self.0 {
            edited.push_str(&text[place..range.start]);
            edited.push_str(&replacement);
            place = range.end;
        }
        edited.push_str(&text[place..]);
        edited
    }
}
