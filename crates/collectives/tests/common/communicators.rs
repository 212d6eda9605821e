//! Communicators for ranks that are threads or processes on this host.

use crate::ranks;
use std::net::TcpListener;
use weft_control::{Config, local_world};
use weft_fabric::{Communicator, CommunicatorConfig, ProviderKind, Rank};

fn joined(kind: ProviderKind, own: Config, hostile: Option<u64>) -> CommunicatorConfig {
    let mut config = CommunicatorConfig::new(own);
    (config.providers, config.hostile) = (vec![kind], hostile);
    config
}

/// Runs `rank` on `size` communicators, each on a separate thread. All leave together.
pub fn communicators(
    size: u32,
    kind: ProviderKind,
    hostile: Option<u64>,
    rank: impl Fn(Communicator) + Send + Sync,
) {
    let adjust = |config: &mut Config| config.host_id = "this".into();
    let world = local_world(size, adjust).unwrap();
    std::thread::scope(|scope| {
        for control in world {
            let rank = &rank;
            scope.spawn(move || {
                let mut own = Config::new(control.rank().0, size);
                adjust(&mut own);
                let config = joined(kind, own, hostile);
                rank(Communicator::over(control, config).unwrap());
            });
        }
    });
}

/// This process's communicator, under `on_processes`.
pub fn process_communicator(rank: Rank, size: u32, kind: ProviderKind) -> Communicator {
    let listener = (rank == Rank(0)).then(|| TcpListener::bind("127.0.0.1:0").unwrap());
    let port = listener.as_ref().map_or(0, |own| own.local_addr().unwrap().port());
    let ports = ranks::process_gather(port.to_le_bytes().to_vec());
    let mut own = Config::new(rank.0, size);
    own.port = u16::from_le_bytes(ports[0][..].try_into().unwrap());
    let config = joined(kind, own, None);
    match listener {
        Some(listener) => Communicator::init_with_listener(config, listener).unwrap(),
        None => Communicator::init(config).unwrap(),
    }
}
