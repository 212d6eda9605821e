//! Ranks as processes: this program starts itself once for each rank, with the same arguments. Each rank
//! prints results as JSON on standard output.

use crate::{Outcome, Path};
use serde::{Serialize, de::DeserializeOwned};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use weft_control::{Config, Control, Overrides};
use weft_fabric::providers::OfiChoice;
use weft_fabric::{Communicator, CommunicatorConfig, Rank, WaitOptions, clock};

/// Time limit for any expected event on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
const RANK: &str = "WEFT_RANK";

/// Runs `rank` in `size` processes with this program. Returns the results by rank in the parent process;
/// does not return in the others.
///
/// # Errors
/// If a process fails. The cause is on standard error.
pub fn on_processes<T: Serialize + DeserializeOwned>(
    size: u32,
    rank: impl FnOnce() -> Outcome<T>,
) -> Outcome<Vec<T>> {
    on_processes_under(&[], size, rank)
}

/// As [`on_processes`], with rank 0 under another program, such as a debugger.
pub fn on_processes_under<T: Serialize + DeserializeOwned>(
    wrapper: &[String],
    size: u32,
    rank: impl FnOnce() -> Outcome<T>,
) -> Outcome<Vec<T>> {
    if std::env::var_os(RANK).is_some() {
        match rank() {
            Ok(found) => println!("{}", serde_json::to_string(&found)?),
            Err(error) => {
                eprintln!("rank {}: {error}", std::env::var(RANK).unwrap_or_default());
                std::process::exit(1);
            }
        }
        std::process::exit(0);
    }
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let spawn = |number: u32| -> Outcome<Child> {
        let program = std::env::current_exe()?;
        let mut command = match wrapper.split_first() {
            Some((wrapper, options)) if number == 0 => {
                let mut command = Command::new(wrapper);
                command.args(options).arg(program);
                command
            }
            _ => Command::new(program),
        };
        Ok(command
            .args(std::env::args_os().skip(1))
            .env(RANK, number.to_string())
            .env("WEFT_WORLD_SIZE", size.to_string())
            .env("WEFT_ADDR", "127.0.0.1")
            .env("WEFT_PORT", port.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?)
    };
    let children = (0..size).map(spawn).collect::<Outcome<Vec<Child>>>()?;
    // Pipes hold little: each is read to the end concurrently.
    let readers: Vec<_> = children
        .into_iter()
        .map(|child| std::thread::spawn(move || child.wait_with_output()))
        .collect();
    let mut found = Vec::new();
    for (number, reader) in readers.into_iter().enumerate() {
        let output = reader.join().map_err(|_| "the reader of a rank's output panicked")??;
        if !output.status.success() {
            return Err(format!("rank {number} failed: {}", output.status).into());
        }
        found.push(serde_json::from_slice(&output.stdout)?);
    }
    Ok(found)
}

/// Joins the group over one provider, in a process that [`on_processes`] started. The caller makes
/// progress, beside a communicator thread where the provider demands one.
pub fn join(path: Path, spin: Option<Duration>) -> Outcome<Communicator> {
    let mut config = CommunicatorConfig::new(Config::from_env(Overrides::default())?);
    config.providers = vec![path.provider()];
    if let Some(provider) = path.ofi_provider() {
        config.ofi = Some(OfiChoice { provider: Some(provider.into()), ..OfiChoice::from_env()? });
    }
    config.spin = spin;
    Ok(Communicator::init(config)?)
}

/// Control plane in a communicator from [`join`].
pub fn mesh(communicator: &Communicator) -> Outcome<&Control> {
    communicator.control().mesh().ok_or_else(|| "a pair has no control plane".into())
}

/// Runs a wait, at most [`PATIENCE`] long, that spins for `spin`.
pub fn waiting<T>(spin: Duration, f: impl FnOnce(&mut WaitOptions<'_>) -> T) -> T {
    let mut never = || false;
    f(&mut WaitOptions { deadline: clock::now().after(PATIENCE), spin, interrupted: &mut never })
}

/// Pins this thread to a separate core, if there are enough.
pub fn pin(rank: Rank) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(rank.index());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores > rank.index() {
        // Without permission the rank stays unpinned.
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
}
