//! Default NICs for a rank with a GPU: the NICs nearest to the GPU, unless a variable names others.

use crate::error::Error;
use crate::providers::{OfiChoice, VerbsChoice, ofi, verbs};
use crate::types::ProviderKind;
use std::path::Path;
use weft_control::{Config, Overrides, Secret};
use weft_cuda::LocalRank;
use weft_environment as environment;
use weft_topology::Host;
use weft_topology::host::{BusId, NicChoice, RdmaPort};

/// The PCI bus.
const SYSFS: &str = "/sys";

/// NICs for a rank's providers; `None`: as the environment says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DefaultNics {
    /// For [`crate::CommunicatorConfig::verbs`].
    pub verbs: Option<VerbsChoice>,
    /// For [`crate::CommunicatorConfig::ofi`].
    pub ofi: Option<OfiChoice>,
}

impl DefaultNics {
    /// Default NICs for a rank with these providers. `config`: the program's, if it has one; otherwise a launcher's
    /// variables name the local rank. Loads the CUDA driver only if one of the providers uses NICs and no variable
    /// names these; creates no context.
    pub fn of_rank(providers: &[ProviderKind], config: Option<&Config>) -> DefaultNics {
        let is_open = |kind, variable| providers.contains(&kind) && named(variable).is_none();
        let has_verbs = is_open(ProviderKind::Verbs, verbs::DEVICES);
        let has_ofi = is_open(ProviderKind::Ofi, ofi::DOMAINS);
        let mut nics = DefaultNics::default();
        if !has_verbs && !has_ofi {
            return nics;
        }
        let gpu = match gpu_of_rank(local_rank(config)) {
            Ok((gpu, how)) => {
                log::debug!("this rank's GPU is {gpu}: {how}");
                gpu
            }
            Err(why) => {
                log::debug!("NICs are not chosen by a GPU: {why}");
                return nics;
            }
        };
        let host = Host::from_sysfs(Path::new(SYSFS));
        if has_verbs && let Ok(choice) = VerbsChoice::from_env() {
            let devices = chosen(ProviderKind::Verbs, &host, gpu, NicNames::of_verbs(&choice));
            nics.verbs = devices.map(|devices| VerbsChoice { devices, ..choice });
        }
        if has_ofi && let Ok(choice) = OfiChoice::from_env() {
            let domains = chosen(ProviderKind::Ofi, &host, gpu, NicNames::of_ofi(&choice));
            nics.ofi = domains.map(|domains| OfiChoice { domains, ..choice });
        }
        nics
    }
}

/// Each GPU's NICs on this host, for `weft doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicReport {
    /// PCI address of this process's GPU, if it is known, and how, or the reason why not.
    pub rank_gpu: (Option<String>, String),
    /// For the provider verbs.
    pub verbs: ProviderNics,
    /// For the provider ofi.
    pub ofi: ProviderNics,
}

/// A provider's NICs, by GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderNics {
    /// Variable that names NICs, and the value, if it is set: then GPUs choose none.
    pub named: Option<String>,
    /// Reason why no GPU has NICs of its own.
    pub error: Option<String>,
    /// GPUs in address order.
    pub gpus: Vec<GpuNics>,
}

/// NICs for a rank with this GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuNics {
    /// Label, such as `GPU0`.
    pub gpu: String,
    /// PCI address.
    pub address: String,
    /// The provider's names for them. Empty: all.
    pub nics: Vec<String>,
    /// Reason for the choice, or for not choosing.
    pub reason: String,
}

impl NicReport {
    /// Report by the rules of [`DefaultNics::of_rank`], for this host.
    pub fn of_host() -> NicReport {
        let failed = |error: Error| error.to_string();
        let verbs = VerbsChoice::from_env().map_err(failed).and_then(|it| NicNames::of_verbs(&it));
        let ofi = OfiChoice::from_env().map_err(failed).and_then(|it| NicNames::of_ofi(&it));
        NicReport::over(&Host::from_sysfs(Path::new(SYSFS)), verbs, ofi)
    }

    /// [`NicReport::of_host`] for a host whose `/sys` is below `root`, with these active ports and these libfabric
    /// domains.
    pub fn of_copy(root: &Path, ports: Vec<String>, domains: Vec<String>) -> NicReport {
        let (verbs, ofi) = (NicNames::Ports(ports), NicNames::Domains(domains));
        NicReport::over(&Host::from_sysfs(root), Ok(verbs), Ok(ofi))
    }

    fn over(
        host: &Host,
        verbs: Result<NicNames, String>,
        ofi: Result<NicNames, String>,
    ) -> NicReport {
        NicReport {
            rank_gpu: match gpu_of_rank(local_rank(None)) {
                Ok((gpu, how)) => (Some(gpu.to_string()), how),
                Err(why) => (None, why),
            },
            verbs: ProviderNics::of(host, verbs::DEVICES, verbs),
            ofi: ProviderNics::of(host, ofi::DOMAINS, ofi),
        }
    }
}

impl ProviderNics {
    fn of(host: &Host, variable: &str, names: Result<NicNames, String>) -> ProviderNics {
        let of_gpu = |names: &NicNames, gpu: usize| {
            let (label, address) = (host.label(gpu), host.devices[gpu].bus_id);
            let (nics, reason) = match names.choose(host, address) {
                Ok((nics, choice)) => (nics, choice.to_string()),
                Err(why) => (Vec::new(), why),
            };
            GpuNics { gpu: label, address: address.to_string(), nics, reason }
        };
        let gpus = match &names {
            Ok(names) => host.gpus().into_iter().map(|gpu| of_gpu(names, gpu)).collect(),
            Err(_) => Vec::new(),
        };
        ProviderNics {
            named: named(variable).map(|value| format!("{variable}={value}")),
            error: names.err(),
            gpus,
        }
    }
}

/// NICs that a provider can use, by the provider's names for them.
enum NicNames {
    /// Device and port, such as `mlx5_0:1`.
    Ports(Vec<String>),
    /// Libfabric domains.
    Domains(Vec<String>),
}

impl NicNames {
    fn of_verbs(choice: &VerbsChoice) -> Result<NicNames, String> {
        Ok(NicNames::Ports(verbs::equal_ports(&verbs::ports(choice)?)?))
    }

    fn of_ofi(choice: &OfiChoice) -> Result<NicNames, String> {
        Ok(NicNames::Domains(choice.offered_domains()?))
    }

    /// Names of a GPU's NICs, nearest first.
    ///
    /// # Errors
    /// Reason why the GPU has none of its own.
    fn choose(&self, host: &Host, gpu: BusId) -> Result<(Vec<String>, NicChoice), String> {
        let choose =
            |ports: &[RdmaPort]| host.nics_of_gpu(gpu, ports).map_err(|why| why.to_string());
        match self {
            NicNames::Ports(names) => {
                let ports: Vec<RdmaPort> = names.iter().map(|name| RdmaPort::parse(name)).collect();
                let choice = choose(&ports)?;
                Ok((choice.ports.iter().map(RdmaPort::to_string).collect(), choice))
            }
            NicNames::Domains(domains) => {
                let choice = choose(&ports_of(host, domains)?)?;
                let on = |port: &RdmaPort| {
                    let is_on = |domain: &&String| ofi::device_of_domain(domain) == port.device;
                    domains.iter().find(is_on).cloned()
                };
                let mut nics: Vec<String> = choice.ports.iter().filter_map(on).collect();
                nics.dedup();
                Ok((nics, choice))
            }
        }
    }
}

/// RDMA device ports that libfabric's domains are on.
fn ports_of(host: &Host, domains: &[String]) -> Result<Vec<RdmaPort>, String> {
    let interfaces = host.devices.iter().flat_map(|device| &device.interfaces);
    let is_offered =
        |name: &str| domains.iter().any(|domain| ofi::device_of_domain(domain) == name);
    let offered = interfaces.filter(|it| it.rdma && is_offered(&it.name));
    let ports: Vec<RdmaPort> =
        offered.map(|it| RdmaPort { device: it.name.clone(), port: it.port }).collect();
    match ports.is_empty() {
        true => Err(format!("no RDMA device on the PCI bus has a name in {}", domains.join(","))),
        false => Ok(ports),
    }
}

/// A provider's names for a GPU's NICs, or none, with the reason in the log.
fn chosen(
    provider: ProviderKind,
    host: &Host,
    gpu: BusId,
    names: Result<NicNames, String>,
) -> Option<Vec<String>> {
    match names.and_then(|names| names.choose(host, gpu)) {
        Ok((nics, choice)) => {
            log::info!("{provider} uses {}, {choice}", nics.join(","));
            Some(nics)
        }
        Err(why) => {
            log::info!("{provider} does not choose NICs by GPU {gpu}: {why}");
            None
        }
    }
}

/// A variable's text. Invalid text is reported by [`VerbsChoice::from_env`] and [`OfiChoice::from_env`].
fn named(variable: &str) -> Option<String> {
    environment::text(variable).ok().flatten()
}

/// This rank among those on its host, from a configuration or else from a launcher's variables.
fn local_rank(config: Option<&Config>) -> Option<LocalRank> {
    let of = |config: &Config| {
        let local = LocalRank { rank: config.local_rank?, size: config.local_size? };
        (local.rank < local.size).then_some(local)
    };
    let launched = || {
        let secret = Some(Secret::new(vec![0; 16]).ok()?);
        Config::from_env(Overrides { secret, ..Overrides::default() }).ok()
    };
    match config {
        // Without a launcher the environment describes a world with one rank.
        Some(config) => of(config).or_else(|| {
            let launched = launched()?;
            of(&launched).filter(|_| launched.world_size == config.world_size)
        }),
        None => of(&launched()?),
    }
}

/// PCI address of a rank's GPU, and how it is known.
fn gpu_of_rank(local: Option<LocalRank>) -> Result<(BusId, String), String> {
    let (how, device) = weft_cuda::device_of_rank(local).map_err(|why| why.to_string())?;
    let address = BusId::parse(device.bus_id());
    let address = address.ok_or_else(|| format!("{device} has no PCI address"))?;
    Ok((address, how.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two GPUs with two NICs each, under two switches.
    fn host() -> Host {
        let device = |bus: &str, class: &str, what: &str| {
            format!(
                r#"<pci busid="0000:{bus}:00.0" class="{class}" vendor="0x10de" device="0x2335"
                   link_speed="32.0 GT/s PCIe" link_width="16">{what}</pci>"#
            )
        };
        let nic = |bus, name: &str| {
            let net = format!(r#"<nic><net name="{name}" speed="200000" port="1" gdr="1"/></nic>"#);
            device(bus, "0x020700", &net)
        };
        let switches = [
            ("0a", ["0b", "0c", "0d"], ["rdmap12s0", "rdmap13s0"]),
            ("1a", ["1b", "1c", "1d"], ["rdmap28s0", "rdmap29s0"]),
        ];
        let switches = switches.map(|(switch, [gpu, first, second], names)| {
            let gpu = device(gpu, "0x030200", "<gpu sm=\"90\"/>");
            device(switch, "0x060400", &(gpu + &nic(first, names[0]) + &nic(second, names[1])))
        });
        let text =
            format!(r#"<system version="1"><cpu numaid="0">{}</cpu></system>"#, switches.concat());
        Host::from_nccl_xml(&text).unwrap()
    }

    fn strings(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Each GPU's NICs.
    fn chosen_by(names: NicNames) -> Vec<Result<Vec<String>, String>> {
        let host = host();
        let gpus = host.gpus().into_iter().map(|gpu| host.devices[gpu].bus_id);
        gpus.map(|gpu| names.choose(&host, gpu).map(|(nics, _)| nics)).collect()
    }

    #[test]
    fn ports_have_the_names_that_verbs_takes() {
        let up = strings(&["rdmap12s0:1", "rdmap28s0:1", "rdmap29s0:1"]);
        assert_eq!(
            chosen_by(NicNames::Ports(up)),
            [Ok(strings(&["rdmap12s0:1"])), Ok(strings(&["rdmap28s0:1", "rdmap29s0:1"]))]
        );
    }

    #[test]
    fn domains_of_efa_are_matched_with_the_devices_they_are_named_after() {
        // libfabric lists them in another order than the bus.
        let domains = ["rdmap29s0-rdm", "rdmap13s0-rdm", "rdmap28s0-rdm", "rdmap12s0-rdm"];
        assert_eq!(
            chosen_by(NicNames::Domains(strings(&domains))),
            [
                Ok(strings(&["rdmap12s0-rdm", "rdmap13s0-rdm"])),
                Ok(strings(&["rdmap28s0-rdm", "rdmap29s0-rdm"]))
            ]
        );
    }

    #[test]
    fn domains_without_an_rdma_device_are_not_chosen() {
        let why = "no RDMA device on the PCI bus has a name in eth0,rdmap2-rdm";
        let refused = chosen_by(NicNames::Domains(strings(&["eth0", "rdmap2-rdm"])));
        assert!(refused.iter().all(|chosen| chosen.as_ref().unwrap_err() == why), "{refused:?}");
    }

    #[test]
    fn other_providers_ask_for_no_gpu() {
        let tcp = [ProviderKind::Shm, ProviderKind::Tcp];
        assert_eq!(DefaultNics::of_rank(&tcp, None), DefaultNics::default());
    }

    #[test]
    #[cfg_attr(miri, ignore = "a configuration reads the host's identity from files")]
    fn the_local_rank_is_the_configuration_s() {
        let config = Config { local_rank: Some(3), local_size: Some(8), ..Config::new(11, 16) };
        assert_eq!(local_rank(Some(&config)), Some(LocalRank { rank: 3, size: 8 }));
        // A group without a launcher, such as one that torch.multiprocessing.spawn starts.
        assert_eq!(local_rank(Some(&Config::new(11, 16))), None);
    }

    #[test]
    fn a_report_has_each_gpu_with_nics_and_reason() {
        let report = ProviderNics::of(
            &host(),
            "UNSET_VARIABLE",
            Ok(NicNames::Ports(strings(&["rdmap12s0:1", "rdmap28s0:1"]))),
        );
        assert_eq!((report.named, report.error), (None, None));
        let second = &report.gpus[1];
        assert_eq!(
            (&*second.address, &*second.nics),
            ("0000:1b:00.0", &strings(&["rdmap28s0:1"])[..])
        );
        assert!(second.reason.ends_with("under the same PCIe switch (PIX)"), "{}", second.reason);
        let refused = ProviderNics::of(&host(), "UNSET_VARIABLE", Err("no library".into()));
        assert_eq!((refused.error.as_deref(), refused.gpus.len()), (Some("no library"), 0));
    }
}
