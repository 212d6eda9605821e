//! Process identity: host, namespaces and user, which determine how memory can be shared with it.

use crate::error::Error;
use weft_control::{HostIdentity, Rank};
use weft_fabric::bytes::{Reader, put_block};

/// A process's host, namespaces and user. Fields that the system does not report are empty and match all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProcessIdentity {
    pub boot: String,
    pub network: String,
    pub processes: String,
    pub user: u32,
    pub process: u32,
}

impl ProcessIdentity {
    /// This process's identity.
    pub fn here() -> ProcessIdentity {
        let HostIdentity { boot, network, processes, user, .. } = HostIdentity::here();
        ProcessIdentity { boot, network, processes, user, process: std::process::id() }
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        for text in [&self.boot, &self.network, &self.processes] {
            put_block(out, text.as_bytes());
        }
        out.extend_from_slice(&self.user.to_le_bytes());
        out.extend_from_slice(&self.process.to_le_bytes());
    }

    pub fn decode(reader: &mut Reader<'_>) -> Option<ProcessIdentity> {
        let mut text = || Some(std::str::from_utf8(reader.block()?).ok()?.to_owned());
        let (boot, network, processes) = (text()?, text()?, text()?);
        let (user, process) = (reader.u32()?, reader.u32()?);
        Some(ProcessIdentity { boot, network, processes, user, process })
    }

    /// Checks that a peer is on this host.
    pub fn same_host(&self, peer: Rank, theirs: &ProcessIdentity) -> Result<(), Error> {
        if differ(&self.boot, &theirs.boot) {
            let detail = format!("its boot id is {}, here it is {}", theirs.boot, self.boot);
            return Err(Error::OtherHost { peer, detail });
        }
        Ok(())
    }

    /// Checks that descriptors can be passed to a peer.
    pub fn same_sockets(&self, peer: Rank, theirs: &ProcessIdentity) -> Result<(), Error> {
        let separate = |detail, remedy| Err(Error::Namespace { peer, detail, remedy });
        if differ(&self.network, &theirs.network) {
            let detail = format!(
                "in another network namespace or container ({}, here {})",
                theirs.network, self.network
            );
            return separate(detail, SAME_NAMESPACE);
        }
        if self.user != theirs.user {
            let detail = format!("of user {}, this rank of user {}", theirs.user, self.user);
            return separate(detail, "run all ranks as one user");
        }
        Ok(())
    }
}

/// Remedy for peers that descriptors cannot be passed to.
pub(super) const SAME_NAMESPACE: &str = "start the ranks in one network namespace (containers: the \
     same --network, such as host), or use memory=\"ipc\"";

fn differ(ours: &str, theirs: &str) -> bool {
    !ours.is_empty() && !theirs.is_empty() && ours != theirs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(boot: &str, network: &str, user: u32) -> ProcessIdentity {
        let (boot, network, processes) = (boot.into(), network.into(), "pid:[1]".into());
        ProcessIdentity { boot, network, processes, user, process: 7 }
    }

    #[test]
    fn the_difference_of_two_ranks_is_named() {
        let (here, peer) = (at("a", "net:[1]", 0), Rank(3));
        here.same_host(peer, &at("a", "net:[2]", 1)).unwrap();
        let other = here.same_host(peer, &at("b", "net:[1]", 0)).unwrap_err().to_string();
        assert!(
            other.contains("rank 3 is on another host") && other.contains("one host"),
            "{other}"
        );
        here.same_sockets(peer, &here).unwrap();
        here.same_sockets(peer, &at("a", "", 0)).unwrap();
        let other = here.same_sockets(peer, &at("a", "net:[2]", 0)).unwrap_err().to_string();
        assert!(other.contains("net:[2]") && other.contains("memory=\"ipc\""), "{other}");
        let other = here.same_sockets(peer, &at("a", "net:[1]", 5)).unwrap_err().to_string();
        assert!(other.contains("user 5") && other.contains("one user"), "{other}");
    }
}
