//! Address of a process of this host: the name of its socket, and the token that proves it.

use crate::bytes::{Reader, put_block};
use crate::error::{Error, Result};
use weft_control::HostIdentity;

/// Proof to a peer that the other end of a socket is the rank that the control plane named.
pub(super) type Token = [u8; 16];

/// What [`crate::Link::address`] returns for shm and copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// Ranks with equal domains can pass descriptors to each other.
    pub domain: Vec<u8>,
    /// Sent over the authenticated control plane, and shown on the socket.
    pub token: Token,
    /// Of the listening socket, in the abstract namespace: it is gone when the socket is.
    pub name: Vec<u8>,
}

impl Address {
    /// A new address on the host of this name.
    pub fn new(host_id: &str) -> Result<Address> {
        let mut random = [0; 32];
        getrandom::fill(&mut random).map_err(|e| {
            Error::system("cannot make a random token", std::io::Error::other(e.to_string()))
        })?;
        let mut token = Token::default();
        token.copy_from_slice(&random[..16]);
        let name: String = random[16..].iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Address { domain: domain(host_id), token, name: format!("weft-{name}").into_bytes() })
    }

    /// Its bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.token.to_vec();
        put_block(&mut out, &self.domain);
        put_block(&mut out, &self.name);
        out
    }

    /// The address in a peer's bytes, or `None` if they are none.
    pub fn decode(bytes: &[u8]) -> Option<Address> {
        let mut reader = Reader::new(bytes);
        let token = reader.bytes(16)?.try_into().ok()?;
        let domain = reader.block()?.to_vec();
        let name = reader.block()?.to_vec();
        reader.is_at_end().then_some(Address { domain, token, name })
    }
}

/// The bounds within which processes can meet on an abstract socket and trust each other there: the host,
/// the network namespace and the user.
fn domain(host_id: &str) -> Vec<u8> {
    let mut domain = Vec::new();
    put_block(&mut domain, host_id.as_bytes());
    let HostIdentity { network, user, .. } = HostIdentity::here();
    put_block(&mut domain, network.as_bytes());
    domain.extend_from_slice(&user.to_le_bytes());
    domain
}

/// An address that decodes encodes to the same bytes; see `crate::fuzz`.
#[cfg(any(test, feature = "fuzz"))]
pub fn fuzz(data: &[u8]) {
    if let Some(address) = Address::decode(data) {
        assert_eq!(address.encode(), data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "an address names /proc/self/ns, and isolated miri reads no files")]
    fn an_address_survives_the_wire_and_no_part_of_it_does() {
        let address = Address::new("host").unwrap();
        let bytes = address.encode();
        assert_eq!(Address::decode(&bytes), Some(address.clone()));
        for end in 0..bytes.len() {
            assert_eq!(Address::decode(&bytes[..end]), None);
        }
        assert_ne!(Address::new("host").unwrap().name, address.name);
    }

    #[test]
    #[cfg_attr(miri, ignore = "an address names /proc/self/ns, and isolated miri reads no files")]
    fn pretended_hosts_differ() {
        let address = |host| Address::new(host).unwrap().domain;
        assert_eq!(address("a"), address("a"));
        assert_ne!(address("a"), address("b"));
    }
}
