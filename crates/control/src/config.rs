//! Rank configuration: rank, world size, rank 0's address, secret and timeouts.
//!
//! Sources by precedence: arguments ([`Overrides`]), Weft's own variables, the variables that torchrun, Open
//! MPI and Slurm set. Without any, the world has one rank.
//!
//! | setting | Weft variables |
//! |---|---|
//! | rank, size | `WEFT_RANK`, `WEFT_WORLD_SIZE`, `WEFT_LOCAL_RANK`, `WEFT_LOCAL_WORLD_SIZE` |
//! | rank 0's address | `WEFT_ADDR`, `WEFT_PORT` (default `MASTER_ADDR`, `MASTER_PORT` + 1) |
//! | this rank's own addresses | `WEFT_BIND`, `WEFT_ADVERTISE` |
//! | the secret | `WEFT_SECRET`, `WEFT_SECRET_FILE` |
//! | host identity (ranks with equal ones share memory) | `WEFT_HOST_ID` |
//! | timeouts, in seconds | `WEFT_CONNECT_TIMEOUT`, `WEFT_SILENCE_TIMEOUT` |

use crate::resolve::loopback;
use crate::tls::Tls;
use crate::{Error, HostIdentity, Rank, Result, Secret, nodelist};
use std::ffi::OsString;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;
use weft_environment as environment;

pub use crate::deadline::Interrupt;

/// Rank 0's default port.
pub const DEFAULT_PORT: u16 = 29501;
/// Largest world size. Each rank keeps a connection and a table entry for each other rank; the roster with all
/// addresses has to fit one control message ([`crate::MAX_PAYLOAD`]) and fills about a third at
/// this size. A mistyped size fails before tables are allocated.
pub const MAX_WORLD_SIZE: u32 = 65_536;
/// Default silence timeout.
pub(crate) const DEFAULT_SILENCE_TIMEOUT: Duration = Duration::from_secs(15);
/// Shortest silence timeout. The heartbeat interval is a quarter as long.
pub const MIN_SILENCE_TIMEOUT: Duration = Duration::from_millis(10);
/// Longest host identity, in bytes.
pub(crate) const MAX_HOST_ID: usize = 256;

/// Settings by which a rank joins a group. [`Config::new`] is for ranks on one host, [`Config::from_env`] for
/// ranks that a launcher starts.
#[derive(Clone)]
pub struct Config {
    /// This process's rank.
    pub rank: Rank,
    /// Rank count.
    pub world_size: u32,
    /// Rank among the launcher's processes on this host, if it reports one.
    pub local_rank: Option<u32>,
    /// Process count that the launcher started on this host, if it reports one.
    pub local_size: Option<u32>,
    /// Name or address of rank 0's host.
    pub host: String,
    /// Port on which rank 0 listens during the rendezvous.
    pub port: u16,
    /// This rank's listening address. Default: on rank 0, the configured address (all addresses if that is a
    /// name); on other ranks, the local end's address on the connection to rank 0.
    pub bind: Option<IpAddr>,
    /// Address that peers dial, if not the listening address.
    pub advertise: Option<IpAddr>,
    /// Shared secret. Required unless rank 0 is on this host's loopback.
    pub secret: Option<Secret>,
    /// Host identity: ranks with equal ones can share memory.
    pub host_id: String,
    /// Time limit for connecting, all phases together: see [`crate::Control::connect_deadline`].
    pub connect_timeout: Duration,
    /// Time without a received byte after which a peer counts as lost. Ranks may have different ones: the
    /// heartbeat interval follows from the shortest in the group.
    pub silence_timeout: Duration,
    /// Interrupt check, called every 100 ms during waits.
    pub interrupt: Option<Interrupt>,
}

/// Settings from the program. They precede all variables.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// This process's rank. Requires `world_size`.
    pub rank: Option<u32>,
    /// Rank count. Requires `rank`.
    pub world_size: Option<u32>,
    /// Rank 0's address as `host`, `host:port` or `[v6]:port`, for example `10.0.0.1:29501`.
    pub address: Option<String>,
    /// This rank's listening address.
    pub bind: Option<IpAddr>,
    /// Shared secret.
    pub secret: Option<Secret>,
    /// Host identity.
    pub host_id: Option<String>,
    /// Time limit for connecting.
    pub connect_timeout: Option<Duration>,
    /// Silence timeout.
    pub silence_timeout: Option<Duration>,
}

impl Config {
    /// Settings for a rank on this host's loopback, without a secret.
    pub fn new(rank: u32, world_size: u32) -> Config {
        Config {
            rank: Rank(rank),
            world_size,
            local_rank: None,
            local_size: None,
            host: loopback().to_string(),
            port: DEFAULT_PORT,
            bind: None,
            advertise: None,
            secret: None,
            host_id: HostIdentity::here().host_id(),
            connect_timeout: Duration::from_secs(60),
            silence_timeout: DEFAULT_SILENCE_TIMEOUT,
            interrupt: None,
        }
    }

    /// Settings from this process's environment and the overrides.
    pub fn from_env(overrides: Overrides) -> Result<Config> {
        Config::resolve(&|name| std::env::var_os(name), overrides)
    }

    /// [`Config::from_env`] for any variable source. Reads no file except `WEFT_SECRET_FILE`.
    pub fn resolve(
        variable: &dyn Fn(&str) -> Option<OsString>,
        overrides: Overrides,
    ) -> Result<Config> {
        let variables = Variables(variable);
        let assignment = rank_assignment(&variables, &overrides)?;
        let (host, port) = address(&variables, &overrides, &assignment)?;
        let seconds = |name, given: Option<Duration>, default| -> Result<Duration> {
            match given {
                Some(given) => Ok(given),
                None => Ok(variables.seconds(name)?.unwrap_or(default)),
            }
        };
        let mut config = Config::new(assignment.rank, assignment.world_size);
        config.connect_timeout =
            seconds("WEFT_CONNECT_TIMEOUT", overrides.connect_timeout, config.connect_timeout)?;
        config.silence_timeout =
            seconds("WEFT_SILENCE_TIMEOUT", overrides.silence_timeout, config.silence_timeout)?;
        let config = Config {
            local_rank: assignment.local_rank,
            local_size: assignment.local_size,
            host,
            port,
            bind: match overrides.bind {
                Some(bind) => Some(bind),
                None => variables.parse("WEFT_BIND", "an IP address")?,
            },
            advertise: variables.parse("WEFT_ADVERTISE", "an IP address")?,
            secret: match overrides.secret {
                Some(secret) => Some(secret),
                None => secret(&variables)?,
            },
            host_id: match overrides.host_id {
                Some(host_id) => host_id,
                None => host_id(&variables)?,
            },
            ..config
        };
        config.validate()?;
        Ok(config)
    }

    /// Checks the settings. [`crate::Control::connect`] calls it first.
    pub fn validate(&self) -> Result<()> {
        check_rank(("rank", self.rank.0), ("world_size", self.world_size))?;
        if self.host_id.is_empty() || self.host_id.len() > MAX_HOST_ID {
            return Err(Error::Variable {
                variable: "WEFT_HOST_ID".into(),
                value: self.host_id.clone(),
                problem: format!("it has {} bytes", self.host_id.len()),
                remedy: format!("use 1 to {MAX_HOST_ID} bytes"),
            });
        }
        if self.silence_timeout < MIN_SILENCE_TIMEOUT {
            return Err(Error::Variable {
                variable: "WEFT_SILENCE_TIMEOUT".into(),
                value: format!("{:?}", self.silence_timeout),
                problem: "heartbeats cannot be sent that often".into(),
                remedy: format!("use at least {MIN_SILENCE_TIMEOUT:?}"),
            });
        }
        if self.world_size > 1 && self.secret.is_none() && !is_loopback(&self.host) {
            return Err(Error::SecretMissing { host: self.host.clone() });
        }
        if self.world_size > 1
            && self.secret.is_none()
            && let Some(bind) = self.bind.filter(|bind| !bind.is_loopback())
        {
            return Err(Error::SecretMissing { host: bind.to_string() });
        }
        Ok(())
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("local_rank", &self.local_rank)
            .field("local_size", &self.local_size)
            .field("host", &self.host)
            .field("port", &self.port)
            .field("bind", &self.bind)
            .field("advertise", &self.advertise)
            .field("secret", &self.secret)
            .field("host_id", &self.host_id)
            .field("connect_timeout", &self.connect_timeout)
            .field("silence_timeout", &self.silence_timeout)
            .finish_non_exhaustive()
    }
}

/// True if a host name or address is always this host's loopback.
pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// This process's rank and world size, with the launcher that set them.
struct RankAssignment {
    launcher: &'static str,
    rank: u32,
    world_size: u32,
    local_rank: Option<u32>,
    local_size: Option<u32>,
}

/// A launcher's variables.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

const WEFT: Launcher = Launcher {
    name: "weft run",
    rank: "WEFT_RANK",
    world_size: "WEFT_WORLD_SIZE",
    local_rank: "WEFT_LOCAL_RANK",
    local_size: "WEFT_LOCAL_WORLD_SIZE",
};
const OTHERS: [Launcher; 3] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        world_size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_STEP_TASKS_PER_NODE",
    },
];

fn rank_assignment(variables: &Variables, overrides: &Overrides) -> Result<RankAssignment> {
    // An invalid value is an error also if another launcher decides.
    let (local_rank, local_size) =
        (variables.number(WEFT.local_rank)?, variables.number(WEFT.local_size)?);
    if let (Some(local_rank), Some(local_size)) = (local_rank, local_size) {
        check_rank((WEFT.local_rank, local_rank), (WEFT.local_size, local_size))?;
    }
    let given = (overrides.rank.is_some(), overrides.world_size.is_some());
    let launchers =
        std::iter::once((&WEFT, given)).chain(OTHERS.iter().map(|o| (o, (false, false))));
    for (launcher, (rank_given, size_given)) in launchers {
        let rank = match overrides.rank.filter(|_| rank_given) {
            Some(rank) => Some(rank),
            None => variables.number(launcher.rank)?,
        };
        let world_size = match overrides.world_size.filter(|_| size_given) {
            Some(size) => Some(size),
            None => variables.number(launcher.world_size)?,
        };
        let name_of =
            |given, variable: &'static str, argument| if given { argument } else { variable };
        let rank_name = name_of(rank_given, launcher.rank, "rank");
        let size_name = name_of(size_given, launcher.world_size, "world_size");
        let (rank, world_size) = match (rank, world_size) {
            (None, None) => continue,
            (Some(rank), Some(world_size)) => (rank, world_size),
            (Some(_), None) => {
                return Err(Error::MissingVariable {
                    set: rank_name.into(),
                    missing: size_name.into(),
                });
            }
            (None, Some(_)) => {
                return Err(Error::MissingVariable {
                    set: size_name.into(),
                    missing: rank_name.into(),
                });
            }
        };
        check_rank((rank_name, rank), (size_name, world_size))?;
        let local_rank = variables.number(launcher.local_rank)?;
        // Slurm writes this one as "4(x2),3"; only a plain number is valid for this host.
        let local_size = match launcher.name {
            "Slurm" => slurm_local_size(variables, launcher.local_size)?,
            _ => variables.number(launcher.local_size)?,
        };
        if let (Some(local_rank), Some(local_size)) = (local_rank, local_size) {
            check_rank((launcher.local_rank, local_rank), (launcher.local_size, local_size))?;
        }
        return Ok(RankAssignment {
            launcher: launcher.name,
            rank,
            world_size,
            local_rank,
            local_size,
        });
    }
    Ok(RankAssignment {
        launcher: "none",
        rank: 0,
        world_size: 1,
        local_rank: Some(0),
        local_size: Some(1),
    })
}

/// Task count on this host, unless Slurm's list has several items.
fn slurm_local_size(variables: &Variables, name: &str) -> Result<Option<u32>> {
    let Some(text) = variables.get(name)? else { return Ok(None) };
    if let Ok(number) = text.parse() {
        return Ok(Some(number));
    }
    let is_number = |text: &str| text.parse::<u32>().is_ok();
    let is_item = |item: &str| match item.strip_suffix(')').and_then(|it| it.split_once("(x")) {
        Some((tasks, hosts)) => is_number(tasks) && is_number(hosts),
        None => is_number(item),
    };
    if text.split(',').all(is_item) {
        return Ok(None);
    }
    Err(invalid(name, &text, "a list of tasks such as 4(x2),3"))
}

fn check_rank((rank_name, rank): (&str, u32), (size_name, size): (&str, u32)) -> Result<()> {
    let refuse = |variable: &str, value: u32, problem: String, remedy: String| {
        Err(Error::Variable {
            variable: variable.into(),
            value: value.to_string(),
            problem,
            remedy,
        })
    };
    if size == 0 {
        let remedy = "set it to the number of ranks, at least 1".into();
        return refuse(size_name, size, "a group has at least 1 rank".into(), remedy);
    }
    if size > MAX_WORLD_SIZE {
        let problem = format!("a group has at most {MAX_WORLD_SIZE} ranks");
        let remedy = format!("set it to the number of ranks, 1 to {MAX_WORLD_SIZE}");
        return refuse(size_name, size, problem, remedy);
    }
    if rank >= size {
        let problem = format!("{size_name} is {size}, so the highest rank is {}", size - 1);
        return refuse(rank_name, rank, problem, format!("set it to 0 to {}", size - 1));
    }
    Ok(())
}

/// Rank 0's address.
fn address(
    variables: &Variables,
    overrides: &Overrides,
    assignment: &RankAssignment,
) -> Result<(String, u16)> {
    let port = match variables.parse("WEFT_PORT", "a port from 0 to 65535")? {
        Some(port) => port,
        None => after_master(variables)?.unwrap_or(DEFAULT_PORT),
    };
    if let Some(address) = &overrides.address {
        return split_address("address", address, port);
    }
    if let Some(address) = variables.get("WEFT_ADDR")? {
        return split_address("WEFT_ADDR", &address, port);
    }
    let here = loopback().to_string();
    if assignment.local_size == Some(assignment.world_size) {
        return Ok((here, port));
    }
    if let Some(host) = variables.get("MASTER_ADDR")? {
        return Ok((host, port));
    }
    match assignment.launcher {
        "Slurm" => Ok((slurm_host(variables)?, port)),
        // torchrun always sets MASTER_ADDR; without it, RANK was set by hand.
        "Open MPI" => Err(Error::MissingAddress { launcher: assignment.launcher }),
        _ => Ok((here, port)),
    }
}

/// Port after MASTER_PORT, which torchrun's own store uses.
fn after_master(variables: &Variables) -> Result<Option<u16>> {
    let Some(port) = variables.parse::<u16>("MASTER_PORT", "a port from 0 to 65535")? else {
        return Ok(None);
    };
    port.checked_add(1).map(Some).ok_or_else(|| Error::Variable {
        variable: "MASTER_PORT".into(),
        value: port.to_string(),
        problem: "there is no port after it for Weft".into(),
        remedy: "set WEFT_PORT to a free port, the same on every rank".into(),
    })
}

fn slurm_host(variables: &Variables) -> Result<String> {
    let Some(list) = variables.get("SLURM_JOB_NODELIST")? else {
        return Err(Error::MissingAddress { launcher: "Slurm" });
    };
    match nodelist::expand(&list, 2).as_deref() {
        Some([_]) => Ok(loopback().to_string()),
        Some([first, ..]) => Ok(first.clone()),
        _ => Err(Error::Variable {
            variable: "SLURM_JOB_NODELIST".into(),
            value: list,
            problem: "it is not a node list such as node[003-007,9]".into(),
            remedy: "set WEFT_ADDR to the host of rank 0".into(),
        }),
    }
}

/// Parses `host`, `host:port`, `[v6]:port` or a bare IPv6 address.
pub(crate) fn split_address(
    variable: &str,
    address: &str,
    default_port: u16,
) -> Result<(String, u16)> {
    let refuse = |problem: &str| {
        Err(Error::Variable {
            variable: variable.into(),
            value: address.into(),
            problem: problem.into(),
            remedy: "write HOST, HOST:PORT or [IPV6]:PORT".into(),
        })
    };
    let (host, port) = if address.parse::<IpAddr>().is_ok() {
        (address, None)
    } else if let Some((host, rest)) = address.strip_prefix('[').and_then(|a| a.split_once(']')) {
        match rest.strip_prefix(':') {
            None if !rest.is_empty() => return refuse("there is text after the bracket"),
            port => (host, port),
        }
    } else {
        match address.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (address, None),
        }
    };
    if host.is_empty() {
        return refuse("the host is missing");
    }
    match port.map(str::parse::<u16>) {
        None => Ok((host.into(), default_port)),
        Some(Ok(port)) => Ok((host.into(), port)),
        Some(Err(_)) => refuse("the part after the colon is not a port"),
    }
}

/// Pair group settings in the environment: secret, host identity, silence timeout, TLS.
pub(crate) fn pair_from_env() -> Result<(Option<Secret>, String, Duration, Tls)> {
    let get = |name: &str| std::env::var_os(name);
    let variables = Variables(&get);
    let silence = variables.seconds("WEFT_SILENCE_TIMEOUT")?.unwrap_or(DEFAULT_SILENCE_TIMEOUT);
    Ok((secret(&variables)?, host_id(&variables)?, silence, tls(&variables)?))
}

fn host_id(variables: &Variables) -> Result<String> {
    Ok(variables.get("WEFT_HOST_ID")?.unwrap_or_else(|| HostIdentity::here().host_id()))
}

/// Variable for payload TLS.
pub(crate) const TLS_PAYLOADS: &str = "WEFT_TLS_PAYLOADS";

fn tls(variables: &Variables) -> Result<Tls> {
    let missing = |variable: &str, given: &str, path: PathBuf| Error::Variable {
        variable: given.into(),
        value: path.display().to_string(),
        problem: format!("{variable} is not set"),
        remedy: "set both".into(),
    };
    let tls = match (variables.path("WEFT_TLS_CERT"), variables.path("WEFT_TLS_KEY")) {
        (Some(certificate), Some(key)) => Tls::default().with_certificate(&certificate, &key)?,
        (None, None) => Tls::default(),
        (Some(path), None) => return Err(missing("WEFT_TLS_KEY", "WEFT_TLS_CERT", path)),
        (None, Some(path)) => return Err(missing("WEFT_TLS_CERT", "WEFT_TLS_KEY", path)),
    };
    let tls = match variables.path("WEFT_TLS_CA") {
        Some(path) => tls.with_authorities(&path)?,
        None => tls,
    };
    match variables.get(TLS_PAYLOADS)?.as_deref() {
        None | Some("0") => Ok(tls),
        Some("1") => Ok(tls.with_payloads()),
        Some(other) => Err(Error::Variable {
            variable: TLS_PAYLOADS.into(),
            value: other.into(),
            problem: "it is neither 0 nor 1".into(),
            remedy: "use 1 for TLS of payloads".into(),
        }),
    }
}

fn secret(variables: &Variables) -> Result<Option<Secret>> {
    match (variables.bytes("WEFT_SECRET"), variables.path("WEFT_SECRET_FILE")) {
        (Some(secret), _) => Secret::new(secret).map(Some),
        (None, Some(path)) => Secret::from_file(&path).map(Some),
        (None, None) => Ok(None),
    }
}

/// Variable source; blank variables count as unset.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl Variables<'_> {
    /// Text; other bytes are an error.
    fn get(&self, name: &str) -> Result<Option<String>> {
        Ok(environment::text_of(name, self.0(name))?)
    }

    /// Path with any bytes.
    fn path(&self, name: &str) -> Option<PathBuf> {
        environment::path_of(self.0(name))
    }

    /// Secret bytes.
    fn bytes(&self, name: &str) -> Option<Vec<u8>> {
        environment::bytes_of(self.0(name))
    }

    fn parse<T: std::str::FromStr>(&self, name: &str, what: &str) -> Result<Option<T>> {
        let Some(text) = self.get(name)? else { return Ok(None) };
        text.parse().map(Some).map_err(|_| invalid(name, &text, what))
    }

    fn number(&self, name: &str) -> Result<Option<u32>> {
        self.parse(name, "a whole number")
    }

    fn seconds(&self, name: &str) -> Result<Option<Duration>> {
        let what = "a number of seconds above zero";
        let Some(seconds) = self.parse::<f64>(name, what)? else { return Ok(None) };
        let duration = Duration::try_from_secs_f64(seconds).ok().filter(|d| !d.is_zero());
        duration.map(Some).ok_or_else(|| invalid(name, &seconds.to_string(), what))
    }
}

fn invalid(name: &str, value: &str, what: &str) -> Error {
    environment::invalid(name, value, what).into()
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
