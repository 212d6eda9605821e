//! Pending pair: one end during formation, an engine, and the messages between the ends.

use super::config::PairConfig;
use crate::bytes::{Reader, put_block};
use crate::clock;
use crate::communicator::Communicator;
use crate::descriptor::{EngineAddress, Grant};
use crate::device::Device;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::group_control::PairMembers;
use crate::local::WaitLimit;
use crate::processors::{GroupProcessors, Processors};
use crate::providers::tcp::Adoption;
use crate::providers::{NicAddress, VerbsChoice};
use crate::registry::{self, PairDeviceConfig};
use crate::types::{CounterId, Generation, ProviderKind, Time};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
use weft_control::pair::{CONNECTOR, LISTENER, MAX_DETAILS, PairControl, StreamToken};
use weft_control::{Member, Rank};

/// Longest host identity, in bytes.
const MAX_HOST_ID: usize = 256;

/// Description of an end; the dialler's travels with the proof, the listener's with the offer.
pub(super) struct EndDetails {
    pid: u32,
    host_id: String,
    address: EngineAddress,
    /// Silence after which this end counts the other as lost.
    silence: Duration,
    /// This end has payload TLS.
    has_payload_tls: bool,
}

impl EndDetails {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.pid.to_le_bytes().to_vec();
        put_block(&mut out, self.host_id.as_bytes());
        put_block(&mut out, &self.address.encode());
        let milliseconds = u64::try_from(self.silence.as_millis()).unwrap_or(u64::MAX);
        out.extend_from_slice(&milliseconds.to_le_bytes());
        out.push(self.has_payload_tls.into());
        out
    }

    pub fn decode(bytes: &[u8]) -> Option<EndDetails> {
        let mut reader = Reader::new(bytes);
        let pid = reader.u32()?;
        let host_id = reader.block().filter(|bytes| bytes.len() <= MAX_HOST_ID)?;
        let host_id = String::from_utf8(host_id.to_vec()).ok()?;
        let address = EngineAddress::decode(reader.block()?).ok()?;
        let silence = Duration::from_millis(reader.u64()?);
        let has_payload_tls = match reader.u8()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let decoded = EndDetails { pid, host_id, address, silence, has_payload_tls };
        reader.is_at_end().then_some(decoded)
    }

    fn member(&self, rank: Rank, peer: &EndDetails, address: Option<IpAddr>) -> Member {
        let local_index = u32::from(rank == CONNECTOR && self.host_id == peer.host_id);
        let address = address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let (host_id, pid) = (self.host_id.clone(), self.pid);
        Member { rank, original_rank: rank, host_id, pid, local_index, address }
    }
}

/// One end's introduction, after the ends have exchanged details.
pub(super) struct PairIntroduction {
    /// Introduction for the routed link; over tcp the listener sends the data connection's token.
    link: Vec<u8>,
    /// Grant for the barrier lanes.
    grant: Vec<u8>,
}

impl PairIntroduction {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_block(&mut out, &self.link);
        put_block(&mut out, &self.grant);
        out
    }

    pub fn decode(bytes: &[u8]) -> Option<PairIntroduction> {
        let mut reader = Reader::new(bytes);
        let (link, grant) = (reader.block()?.to_vec(), reader.block()?.to_vec());
        reader.is_at_end().then_some(PairIntroduction { link, grant })
    }

    /// Token for the data connection; the staging wrapper's lane may follow it.
    pub fn token(&self) -> Option<StreamToken> {
        let (token, rest) = self.link.split_first_chunk()?;
        [0, size_of::<u32>()].contains(&rest.len()).then_some(*token)
    }
}

/// Verbs link address in an end's details, if it has one.
pub(super) fn verbs_address(details: &[u8]) -> Option<Vec<u8>> {
    let details = EndDetails::decode(details)?;
    details.address.of(ProviderKind::Verbs).map(<[u8]>::to_vec)
}

/// Encodes the listener's offer: details and introduction.
pub(super) fn encode_offer(details: &[u8], introduction: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    put_block(&mut out, details);
    put_block(&mut out, introduction);
    out
}

/// Decodes the details and introduction in an offer.
pub(super) fn decode_offer(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut reader = Reader::new(bytes);
    let (details, introduction) = (reader.block()?, reader.block()?);
    reader.is_at_end().then_some((details, introduction))
}

/// Fuzz target: decoded messages round-trip through encoding.
#[cfg(any(test, feature = "fuzz"))]
pub fn fuzz(data: &[u8]) {
    let details = |bytes: &[u8]| {
        if let Some(details) = EndDetails::decode(bytes) {
            assert!(details.host_id.len() <= MAX_HOST_ID);
            let again = details.encode();
            assert_eq!(EndDetails::decode(&again).map(|details| details.encode()), Some(again));
        }
    };
    let introduction = |bytes: &[u8]| {
        if let Some(introduction) = PairIntroduction::decode(bytes) {
            assert_eq!(introduction.encode(), bytes);
            let token = introduction.token();
            assert!(token.is_none_or(|token| introduction.link.starts_with(&token)));
        }
    };
    details(data);
    introduction(data);
    if let Some((theirs, link)) = decode_offer(data) {
        assert_eq!(encode_offer(theirs, link), data);
        details(theirs);
        introduction(link);
    }
}

/// One end of a pair during formation.
pub(super) struct PendingPair {
    rank: Rank,
    engine: Engine,
    devices: Vec<Arc<dyn Device>>,
    adoption: Adoption,
    barrier: CounterId,
    own: EndDetails,
    peer: Option<EndDetails>,
}

impl PendingPair {
    /// This end, with an unconnected engine. `local`: the end's control connection address. `nic`:
    /// address of the end's only RDMA NIC.
    pub fn new(
        rank: Rank,
        config: &PairConfig,
        local: IpAddr,
        nic: Option<NicAddress>,
    ) -> Result<PendingPair> {
        let host_id = config.settings.host_id.clone();
        let adoption = Adoption::default();
        let providers = providers_of(config)?;
        let mut verbs = VerbsChoice::default();
        if providers.contains(&ProviderKind::Verbs) {
            verbs = verbs_choice(config.verbs.clone(), nic)?;
        }
        let (adopted, ofi) = (adoption.clone(), registry::ofi_choice(&config.ofi)?);
        let staged = config.staged;
        let device_config = PairDeviceConfig {
            host_id: host_id.clone(),
            adoption: adopted,
            local,
            devices: config.devices,
            ofi,
            verbs,
            staged,
        };
        let open = |kind: &ProviderKind| registry::open_pair(*kind, &device_config);
        let has_payload_tls = config.settings.tls.is_of_payloads();
        let devices = providers.iter().map(open).collect::<Result<Vec<_>>>()?;
        let mut engine = Engine::new(config.engine.clone(), rank, 2, Generation(0), &devices)?;
        let barrier = engine.counter()?;
        engine.use_for_barriers(barrier);
        let (pid, silence) = (std::process::id(), config.settings.silence_timeout);
        let address = EngineAddress { processors: Processors::of_thread(), ..engine.address() };
        let own = EndDetails { pid, host_id, address, silence, has_payload_tls };
        if own.host_id.len() > MAX_HOST_ID || own.encode().len() > MAX_DETAILS {
            let (wanted, limit) = (own.host_id.len() as u64, MAX_HOST_ID as u64);
            return Err(Error::Limit { what: "bytes of a host identity", wanted, limit });
        }
        Ok(PendingPair { rank, engine, devices, adoption, barrier, own, peer: None })
    }

    pub fn details(&self) -> Vec<u8> {
        self.own.encode()
    }

    fn peer_rank(&self) -> Rank {
        if self.rank == LISTENER { CONNECTOR } else { LISTENER }
    }

    fn malformed(&self, what: &'static str, bytes: &[u8]) -> Error {
        Error::Malformed { peer: self.peer_rank(), what, detail: format!("{} bytes", bytes.len()) }
    }

    /// Resolves the route from the peer's details, and makes the introduction.
    pub fn introduce(&mut self, peer: &[u8]) -> Result<PairIntroduction> {
        let peer = EndDetails::decode(peer).ok_or_else(|| self.malformed("its details", peer))?;
        let addresses = self.in_rank_order(self.own.address.clone(), peer.address.clone());
        self.peer = Some(peer);
        let mut messages = self.engine.introduce(&addresses)?;
        let to = self.peer_rank();
        let link = messages.swap_remove(to.index());
        let grant = self.engine.grant(to, &[], &[self.barrier])?.encode();
        Ok(PairIntroduction { link, grant })
    }

    fn in_rank_order<T>(&self, own: T, peer: T) -> Vec<T> {
        if self.rank == LISTENER { vec![own, peer] } else { vec![peer, own] }
    }

    /// True if the route is over tcp, which needs a data connection.
    pub fn is_over_tcp(&self) -> bool {
        let route = self.engine.route(self.peer_rank());
        route.is_some_and(|route| route.provider == ProviderKind::Tcp)
    }

    /// Checks that both ends have payload TLS, or neither.
    pub fn check_tls(&self, listener: &str) -> Result<()> {
        let here = self.own.has_payload_tls;
        match &self.peer {
            Some(peer) if peer.has_payload_tls != here => {
                let address = listener.to_owned();
                Err(weft_control::Error::TlsPayloads { address, here }.into())
            }
            _ => Ok(()),
        }
    }

    /// Receives the data connection.
    pub fn adoption(&self) -> &Adoption {
        &self.adoption
    }

    /// Connects with the peer's introduction, and makes the communicator.
    pub fn finish(
        mut self,
        introduction: &[u8],
        control: PairControl,
        config: &PairConfig,
        timeout: Duration,
    ) -> Result<Communicator> {
        let peer_rank = self.peer_rank();
        let malformed = self.malformed("its introduction", introduction);
        let (Some(peer), Some(introduction)) =
            (self.peer.take(), PairIntroduction::decode(introduction))
        else {
            return Err(malformed);
        };
        let grant = Grant::decode(&introduction.grant).ok_or(malformed)?;
        let addresses = self.in_rank_order(self.own.address.clone(), peer.address.clone());
        let messages = self.in_rank_order(Vec::new(), introduction.link);
        let mut give_up = || match control.check() {
            // The listener's program may close the pair before this end has finished.
            Err(weft_control::Error::Left { .. }) if control.is_confirmed() => Ok(()),
            checked => Ok(checked?),
        };
        let deadline = clock::now().after(timeout);
        let mut limit = WaitLimit { deadline, give_up: &mut give_up };
        self.engine.connect(&addresses, &messages, &mut limit)?;
        self.engine.import_within(peer_rank, &grant, &[self.barrier], &mut limit)?;
        let (local, remote) = control.addresses();
        let own = self.own.member(self.rank, &peer, local.map(|address| address.ip()));
        let peer_silence = peer.silence;
        let peer = peer.member(peer_rank, &self.own, remote.map(|address| address.ip()));
        let members = self.in_rank_order(own, peer).into();
        if self.rank == CONNECTOR {
            control.wait_until_formed(left(deadline))?;
        }
        control.set_peer_silence(peer_silence);
        control.set_formed();
        let control = Arc::new(control);
        control.watch()?;
        let control = PairMembers { control, members };
        let processors = [&addresses[0].processors, &addresses[1].processors];
        let processors = GroupProcessors::of(&control.members, self.rank, &processors);
        self.engine.set_shares_cores(processors.share.is_shared);
        let PendingPair { engine, devices, .. } = self;
        let (progress, spin) = (config.progress, config.spin);
        Communicator::over_pair(control, engine, devices, progress, spin, processors)
    }
}

/// NICs for verbs. An address names one of all NICs, whichever are the default.
fn verbs_choice(default: Option<VerbsChoice>, nic: Option<NicAddress>) -> Result<VerbsChoice> {
    let default = default.filter(|_| nic.is_none());
    Ok(VerbsChoice { address: nic, ..default.map_or_else(VerbsChoice::from_env, Ok)? })
}

/// Configured providers; without NIC providers, whose messages have no TLS, if payloads must have it.
pub(super) fn providers_of(config: &PairConfig) -> Result<Vec<ProviderKind>> {
    let has_tls = config.settings.tls.is_of_payloads();
    let is_in_clear = |kind: &ProviderKind| [ProviderKind::Verbs, ProviderKind::Ofi].contains(kind);
    let admits = |kind: &ProviderKind| !has_tls || !is_in_clear(kind);
    let admitted: Vec<ProviderKind> = config.providers.iter().copied().filter(admits).collect();
    if let ([], Some(&provider)) = (&admitted[..], config.providers.first()) {
        let detail = "its messages have no TLS (WEFT_TLS_PAYLOADS=1): offer tcp or shm, too";
        return Err(Error::Provider { provider, detail: detail.into() });
    }
    Ok(admitted)
}

/// Adds the remedy to the error from a process without descriptors left.
pub(super) fn name_descriptors(error: Error) -> Error {
    match error {
        Error::System { what, source } => {
            match weft_control::pair::descriptor_error(what, source) {
                weft_control::Error::System { doing, source } => {
                    Error::System { what: doing, source }
                }
                named => named.into(),
            }
        }
        other => other,
    }
}

/// Time until `deadline`.
pub(super) fn left(deadline: Time) -> Duration {
    deadline.since(clock::now())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn a_source_chooses_among_all_nics_and_a_default_holds_without_one() {
        let default = VerbsChoice { devices: vec!["mlx5_3:1".into()], ..VerbsChoice::default() };
        let chosen = verbs_choice(Some(default.clone()), None).unwrap();
        assert_eq!(chosen, default);
        let nic = NicAddress::of_source(Ipv4Addr::new(10, 0, 0, 1).into());
        let chosen = verbs_choice(Some(default), Some(nic)).unwrap();
        assert_eq!((chosen.address, chosen.devices), (Some(nic), Vec::new()));
    }
}
