//! Address of a process of this host: the name of its socket, and its token.

use crate::bytes::{Reader, put_block};
use crate::error::{Error, Result};
use weft_control::HostIdentity;

/// Secret that authenticates the other end of a socket as the rank that the control plane named.
pub(super) type ProofToken = [u8; 16];

/// Address of a rank over shm and copy ([`crate::Link::address`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalAddress {
    /// Ranks of equal domains can pass descriptors to each other.
    pub domain: Vec<u8>,
    /// Sent over the authenticated control plane, and in the hello on the socket.
    pub token: ProofToken,
    /// Name of the listening socket in the abstract namespace, which ends with the socket.
    pub name: Vec<u8>,
}

impl LocalAddress {
    /// A new address on the host with this name.
    pub fn new(host_id: &str) -> Result<LocalAddress> {
        let mut random = [0; 32];
        getrandom::fill(&mut random).map_err(|e| {
            Error::system("cannot make a random token", std::io::Error::other(e.to_string()))
        })?;
        let mut token = ProofToken::default();
        token.copy_from_slice(&random[..16]);
        let name: String = random[16..].iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(LocalAddress {
            domain: domain(host_id),
            token,
            name: format!("weft-{name}").into_bytes(),
        })
    }

    /// Its bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.token.to_vec();
        put_block(&mut out, &self.domain);
        put_block(&mut out, &self.name);
        out
    }

    /// Decodes a peer's bytes; `None` if they are not an address.
    pub fn decode(bytes: &[u8]) -> Option<LocalAddress> {
        let mut reader = Reader::new(bytes);
        let token = reader.bytes(16)?.try_into().ok()?;
        let domain = reader.block()?.to_vec();
        let name = reader.block()?.to_vec();
        reader.is_at_end().then_some(LocalAddress { domain, token, name })
    }
}

/// Domain within which processes reach each other over abstract sockets: host, network namespace and user.
fn domain(host_id: &str) -> Vec<u8> {
    let mut domain = Vec::new();
    put_block(&mut domain, host_id.as_bytes());
    let HostIdentity { network, user, .. } = HostIdentity::here();
    put_block(&mut domain, network.as_bytes());
    domain.extend_from_slice(&user.to_le_bytes());
    domain
}

/// Fuzz target: an address that decodes encodes to the same bytes.
#[cfg(any(test, feature = "fuzz"))]
pub fn fuzz(data: &[u8]) {
    if let Some(address) = LocalAddress::decode(data) {
        assert_eq!(address.encode(), data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "an address names /proc/self/ns, and isolated miri reads no files")]
    fn an_address_round_trips_and_no_prefix_of_it_decodes() {
        let address = LocalAddress::new("host").unwrap();
        let bytes = address.encode();
        assert_eq!(LocalAddress::decode(&bytes), Some(address.clone()));
        for end in 0..bytes.len() {
            assert_eq!(LocalAddress::decode(&bytes[..end]), None);
        }
        assert_ne!(LocalAddress::new("host").unwrap().name, address.name);
    }

    #[test]
    #[cfg_attr(miri, ignore = "an address names /proc/self/ns, and isolated miri reads no files")]
    fn hosts_of_different_names_have_different_domains() {
        let address = |host| LocalAddress::new(host).unwrap().domain;
        assert_eq!(address("a"), address("a"));
        assert_ne!(address("a"), address("b"));
    }
}
