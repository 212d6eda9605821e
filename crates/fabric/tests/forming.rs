//! Groups and grants that cannot be completed, with a peer only on the control plane: the program
//! interrupts, the peer dies, the deadline passes. Ranks whose configurations differ.

#[path = "forming/grants.rs"]
mod grants;
#[path = "forming/links.rs"]
mod links;
#[path = "forming/staging.rs"]
mod staging;

use std::net::Ipv4Addr;
use std::time::Duration;
use weft_control::{Cause, Config, Control, Operation, local_world};
use weft_fabric::providers::{CopyBackend, Staging};
use weft_fabric::registry::{self, DeviceConfig};
use weft_fabric::{
    Communicator, CommunicatorConfig, Engine, EngineAddress, EngineConfig, Error, Generation,
    ProviderKind, Rank, Result, WaitLimit, clock,
};

/// Time limit to form a group, unless a test sets another: longer than any of these tests.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit for an early end, before [`PATIENCE`], on a busy machine.
const PROMPT: Duration = Duration::from_secs(10);

/// Second half of `Communicator::init`.
fn join(control: Control, kind: ProviderKind) -> Result<Communicator> {
    let mut config = Config::new(control.rank().0, control.world_size());
    config.connect_timeout = PATIENCE;
    let mut config = CommunicatorConfig::new(config);
    config.providers = vec![kind];
    Communicator::over(control, config)
}

/// Devices of `Communicator::over`: a link over tcp is in the staging wrapper, and reads only such addresses.
fn device_config() -> DeviceConfig {
    DeviceConfig {
        host_id: Config::new(0, 1).host_id,
        bind: Ipv4Addr::LOCALHOST.into(),
        advertise: None,
        devices: CopyBackend::default(),
        staged: Staging::default(),
        hostile: None,
        ofi: None,
        verbs: None,
    }
}

/// Engine that is introduced to peers and not connected, with the state that connecting needs.
struct Introduced {
    engine: Engine,
    addresses: Vec<EngineAddress>,
    messages: Vec<Vec<u8>>,
}

impl Introduced {
    fn new(control: &Control, kind: ProviderKind) -> Introduced {
        let device = registry::open(kind, &device_config()).unwrap();
        let generation = Generation(control.generation() as u8);
        let (rank, size) = (control.rank(), control.world_size());
        let config = EngineConfig::default();
        let mut engine = Engine::new(config, rank, size, generation, &[device]).unwrap();
        let own = engine.address().encode();
        let addresses = control.all_gather_as(Operation::Addresses, &own, PATIENCE).unwrap();
        let addresses: Vec<EngineAddress> =
            addresses.iter().map(|bytes| EngineAddress::decode(bytes).unwrap()).collect();
        let introductions = engine.introduce(&addresses).unwrap();
        let messages =
            control.exchange_as(Operation::Introductions, &introductions, PATIENCE).unwrap();
        Introduced { engine, addresses, messages }
    }

    fn connect(mut self) -> Engine {
        let deadline = clock::now().after(PATIENCE);
        let mut limit = WaitLimit { deadline, give_up: &mut || Ok(()) };
        self.engine.connect(&self.addresses, &self.messages, &mut limit).unwrap();
        self.engine
    }
}

/// Both providers, with either rank absent: one end of a pair dials, the other accepts.
fn cases() -> impl Iterator<Item = (ProviderKind, usize)> {
    [ProviderKind::Shm, ProviderKind::Tcp].into_iter().flat_map(|kind| [(kind, 0), (kind, 1)])
}

/// Two group members; the absent one comes second.
fn two(absent: usize, adjust: impl Fn(&mut Config)) -> [Control; 2] {
    let mut world = local_world(2, adjust).unwrap();
    let second = world.remove(absent);
    [world.remove(0), second]
}

/// Panics unless an error reports that `rank` is lost.
fn assert_lost(error: &Error, rank: usize, what: &str) {
    let Error::Control(weft_control::Error::Poisoned(cause)) = error else {
        panic!("{what}: {error}")
    };
    let lost = (Cause::Lost, Some(Rank(rank as u32)));
    assert_eq!((cause.kind, cause.rank), lost, "{what}: {error}");
}
