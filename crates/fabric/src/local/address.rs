//! Local process address: socket name and token.

use super::credentials::OVERFLOW_USER;
use super::socket;
use crate::bytes::{Reader, put_block};
use crate::error::{Error, Result};
use weft_control::HostIdentity;

/// Secret that authenticates the other end of a socket as the rank that the control plane named.
pub(super) type ProofToken = [u8; 16];

/// Rank address over shm and copy ([`crate::Link::address`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalAddress {
    /// Ranks in equal domains can pass descriptors to each other.
    pub domain: Vec<u8>,
    /// Sent over the authenticated control plane, and in the hello on the socket.
    pub token: ProofToken,
    /// User namespace, and the effective user in it.
    user: (Vec<u8>, u32),
    /// Listening socket name in the abstract namespace, which ends with the socket.
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
            user: user(),
            name: format!("weft-{name}").into_bytes(),
        })
    }

    /// Encodes the address for the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.token.to_vec();
        put_block(&mut out, &self.domain);
        put_block(&mut out, &self.user.0);
        out.extend_from_slice(&self.user.1.to_le_bytes());
        put_block(&mut out, &self.name);
        out
    }

    /// True if memory can be shared with the process at this address. Both ends of a pair decide alike.
    pub fn reaches(&self, theirs: &LocalAddress) -> bool {
        self.domain == theirs.domain && self.is_of_user_of(theirs)
    }

    /// Users in one user namespace have equal numbers or are not equal. Across namespaces one user may
    /// have two numbers, and two users one, so the kernel compares them: it translates a socket's owner.
    /// The number for users without one is no proof.
    fn is_of_user_of(&self, theirs: &LocalAddress) -> bool {
        if self.user.0 == theirs.user.0 {
            return self.user.1 == theirs.user.1;
        }
        let is_numbered = [self.user.1, theirs.user.1].iter().all(|user| *user != OVERFLOW_USER);
        is_numbered && !socket::is_of_another_user(&theirs.name)
    }

    /// Decodes a peer's bytes; `None` if they are not an address.
    pub fn decode(bytes: &[u8]) -> Option<LocalAddress> {
        let mut reader = Reader::new(bytes);
        let token = reader.bytes(16)?.try_into().ok()?;
        let domain = reader.block()?.to_vec();
        let user = (reader.block()?.to_vec(), reader.u32()?);
        let name = reader.block()?.to_vec();
        reader.is_at_end().then_some(LocalAddress { domain, token, user, name })
    }
}

/// Domain within which processes reach each other over abstract sockets: host and network namespace.
fn domain(host_id: &str) -> Vec<u8> {
    let mut domain = Vec::new();
    put_block(&mut domain, host_id.as_bytes());
    put_block(&mut domain, HostIdentity::here().network.as_bytes());
    domain
}

fn user() -> (Vec<u8>, u32) {
    let HostIdentity { users, user, .. } = HostIdentity::here();
    (users.into_bytes(), user)
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

    #[test]
    #[cfg_attr(miri, ignore = "miri has no abstract sockets")]
    fn users_are_compared_by_number_within_a_namespace_and_by_the_kernel_across_namespaces() {
        let address = |users: &str, user| LocalAddress {
            user: (users.into(), user),
            ..LocalAddress::new("host").unwrap()
        };
        let here = address("user:[1]", 0);
        assert!(here.reaches(&address("user:[1]", 0)));
        assert!(!here.reaches(&address("user:[1]", 7)));
        let other = address("user:[2]", 7);
        let _listener = socket::listen(&other.name).unwrap();
        assert!(here.reaches(&other) && other.user != here.user);
        // No user is known by this number.
        let unknown = LocalAddress { user: ("user:[2]".into(), OVERFLOW_USER), ..other };
        assert!(!here.reaches(&unknown));
    }
}
