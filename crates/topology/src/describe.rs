//! Network descriptions: short forms such as `rail:hosts=4,gpus=8`, and JSON.

use crate::builders::{Attachment, BiGraph, FatTree, FatTree3, Rail};
use crate::error::{Error, Result, hint};
use crate::inner_paths;
use crate::network::{LinkSpec, Network};
use std::collections::BTreeMap;
use std::path::Path;

/// Network description: a builder with options, or a network node by node.
#[derive(Clone, Debug, PartialEq)]
pub enum Description {
    /// `bigraph:...`
    BiGraph(BiGraph),
    /// `fat-tree:...`
    FatTree(FatTree),
    /// `fat-tree3:...`
    FatTree3(FatTree3),
    /// `rail:...`
    Rail(Rail),
    /// Node by node.
    Explicit(Network),
}

/// File size limit.
const MAX_FILE: u64 = 1 << 28;

impl Description {
    /// Parses a short form, such as `bigraph:switches=16,endpoints=4,gbps=100,latency_us=0.5`, or the JSON file at that
    /// path.
    pub fn parse(spec: &str) -> Result<Description> {
        let is_short = spec.split_once(':').is_some_and(|(kind, _)| KINDS.contains(&kind));
        match Path::new(spec) {
            path if !is_short && path.exists() => Description::from_json(&read(path)?),
            _ => Description::from_short_form(spec),
        }
    }

    /// Parses a short form. Reads no file.
    pub fn from_short_form(spec: &str) -> Result<Description> {
        match spec.split_once(':') {
            Some((kind, options)) if KINDS.contains(&kind) => {
                let options = options_from_text(spec, options)?;
                Description::from_options(kind, options)
            }
            _ => {
                let kind = spec.split(':').next().unwrap_or(spec);
                let hint = hint(kind, KINDS.iter().copied());
                let reason = format!(
                    "neither a file nor one of {}{hint}",
                    KINDS.map(|kind| format!("{kind}:...")).join(", ")
                );
                Err(Error::Spec { spec: spec.to_owned(), reason })
            }
        }
    }

    /// The network described.
    pub fn network(&self) -> Result<Network> {
        match self {
            Description::BiGraph(shape) => shape.network(),
            Description::FatTree(shape) => shape.network(),
            Description::FatTree3(shape) => shape.network(),
            Description::Rail(shape) => shape.network(),
            Description::Explicit(network) => Ok(network.clone()),
        }
    }

    pub(crate) fn from_options(kind: &str, mut options: Options) -> Result<Description> {
        let link = options.link("gbps", "latency_us", LinkSpec::default())?;
        let description = match kind {
            "rail" => Description::Rail(rail(&mut options, link)?),
            "bigraph" => {
                let switches = options.count("switches")?;
                if switches % 2 == 1 {
                    let must = "an even number, for two equal halves";
                    let what = "switches".to_owned();
                    return Err(Error::Count { what, value: switches.into(), must });
                }
                Description::BiGraph(BiGraph {
                    endpoints: options.count("endpoints")?,
                    physical: options.optional_count("physical")?,
                    nics: options.count_or("nics", 1)?,
                    trunks: options.count_or("trunks", 1)?,
                    trunk: options.trunk(link)?,
                    attach: options.attach()?,
                    link,
                    ..BiGraph::new(switches / 2, 1)
                })
            }
            "fat-tree" => Description::FatTree(FatTree {
                leaves: options.count("leaves")?,
                spines: options.count("spines")?,
                hosts: options.count("hosts")?,
                trunks: options.count_or("trunks", 1)?,
                trunk: options.trunk(link)?,
                attach: options.attach()?,
                link,
            }),
            _ => Description::FatTree3(fat_tree3(&mut options, link)?),
        };
        options.all_used()?;
        Ok(description)
    }
}

impl Network {
    /// Network from a short form or from a JSON file; see [`Description::parse`].
    pub fn parse(spec: &str) -> Result<Network> {
        Description::parse(spec)?.network()
    }

    /// Warnings about hosts whose internal traffic can leave the host, one sentence for each kind: a path
    /// through switches is as short as the path inside (routing takes the one inside), or shorter
    /// (routing leaves the host).
    pub fn warnings(&self) -> Vec<String> {
        inner_paths::warnings(self)
    }
}

fn read(path: &Path) -> Result<String> {
    weft_environment::read_text(path, MAX_FILE)
        .map_err(|source| Error::Read { path: path.to_owned(), source })
}

const KINDS: [&str; 4] = ["bigraph", "fat-tree", "fat-tree3", "rail"];

fn fat_tree3(options: &mut Options, link: LinkSpec) -> Result<FatTree3> {
    let shape = match options.optional_count("k")? {
        Some(k) => FatTree3::of_ports(k)?,
        None => FatTree3::new(
            options.count("pods")?,
            options.count("leaves")?,
            options.count("aggs")?,
            options.count("cores")?,
            options.count("hosts")?,
        ),
    };
    let trunks = options.count_or("trunks", 1)?;
    Ok(FatTree3 { trunks, trunk: options.trunk(link)?, attach: options.attach()?, link, ..shape })
}

fn rail(options: &mut Options, link: LinkSpec) -> Result<Rail> {
    let shape = Rail::new(options.count("hosts")?, options.count("gpus")?);
    Ok(Rail {
        hosts_per_leaf: options.count_or("hosts_per_leaf", 0)?,
        spines: options.count_or("spines", 0)?,
        trunks: options.count_or("trunks", 1)?,
        trunk: options.trunk(link)?,
        nvlink: options.link("nvlink_gbps", "nvlink_latency_us", shape.nvlink)?,
        link,
        ..shape
    })
}

/// Builder options by name, each removed when it is read.
pub(crate) struct Options {
    /// The description, for errors.
    pub(super) spec: String,
    pub(super) given: BTreeMap<String, f64>,
    pub(super) known: Vec<&'static str>,
}

fn options_from_text(spec: &str, options: &str) -> Result<Options> {
    let fail = |reason| Error::Spec { spec: spec.to_owned(), reason };
    let mut given = BTreeMap::new();
    for option in options.split(',').filter(|option| !option.trim().is_empty()) {
        let (name, value) = option
            .split_once('=')
            .ok_or_else(|| fail(format!("{option:?} is not of the form name=number")))?;
        let (name, value) = (name.trim(), value.trim());
        let number: f64 =
            value.parse().map_err(|_| fail(format!("{name} is {value:?}, not a number")))?;
        if given.insert(name.to_owned(), number).is_some() {
            return Err(fail(format!("{name} is given twice")));
        }
    }
    Ok(Options { spec: spec.to_owned(), given, known: Vec::new() })
}

impl Options {
    fn take(&mut self, name: &'static str) -> Option<f64> {
        self.known.push(name);
        self.given.remove(name)
    }

    fn optional_count(&mut self, name: &'static str) -> Result<Option<u32>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        if value.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&value) {
            return Ok(Some(value as u32));
        }
        let must = "a whole number from 0 to 4294967295";
        Err(Error::Number { at: self.spec.clone(), what: name, value, must })
    }

    fn count_or(&mut self, name: &'static str, default: u32) -> Result<u32> {
        Ok(self.optional_count(name)?.unwrap_or(default))
    }

    fn count(&mut self, name: &'static str) -> Result<u32> {
        self.optional_count(name)?.ok_or_else(|| {
            let known = self.given.keys().map(String::as_str);
            let hint = hint(name, known).replace("did you mean", "did you mean it by");
            Error::Spec { spec: self.spec.clone(), reason: format!("{name} is missing{hint}") }
        })
    }

    fn link(
        &mut self,
        gbps: &'static str,
        latency: &'static str,
        default: LinkSpec,
    ) -> Result<LinkSpec> {
        let bandwidth = self.take(gbps).map(|gbps| LinkSpec::new(gbps, 0.0).bandwidth);
        let latency = self.take(latency).map(|us| LinkSpec::new(0.0, us).latency);
        let spec = LinkSpec {
            bandwidth: bandwidth.unwrap_or(default.bandwidth),
            latency: latency.unwrap_or(default.latency),
        };
        spec.checked(|| self.spec.clone())
    }

    fn trunk(&mut self, link: LinkSpec) -> Result<Option<LinkSpec>> {
        let trunk = self.link("trunk_gbps", "trunk_latency_us", link)?;
        Ok((trunk != link).then_some(trunk))
    }

    fn attach(&mut self) -> Result<Attachment> {
        let default = Attachment::default();
        Ok(Attachment {
            gpus_per_nic: self.count_or("gpus_per_nic", 1)?,
            pcie: self.link("pcie_gbps", "pcie_latency_us", default.pcie)?,
        })
    }

    fn all_used(&self) -> Result<()> {
        let Some(name) = self.given.keys().next() else { return Ok(()) };
        let hint = hint(name, self.known.iter().copied());
        let reason = format!("there is no option {name}{hint} Known: {}", self.known.join(", "));
        let reason = if hint.is_empty() { reason.replace(" Known", "; known") } else { reason };
        Err(Error::Spec { spec: self.spec.clone(), reason })
    }
}
