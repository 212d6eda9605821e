//! A job's shared secret, and the authentication codes made with it.

use crate::{Error, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fmt;
use std::path::Path;

/// Largest secret file: 64 KiB.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Secret shared only by ranks in one job.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Secret from these bytes; empty ones are rejected.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Secret> {
        let bytes = bytes.into();
        if bytes.is_empty() {
            return Err(Error::Variable {
                variable: "the secret".into(),
                value: String::new(),
                problem: "it is empty".into(),
                remedy: "use at least 16 random bytes".into(),
            });
        }
        Ok(Secret(bytes))
    }

    /// Secret in a file, with surrounding white space removed. The file must be regular and at most 64 KiB
    /// long, so that reading it ends.
    pub fn from_file(path: &Path) -> Result<Secret> {
        let refuse =
            |problem: String| Error::SecretFile { path: path.display().to_string(), problem };
        let read = weft_environment::read(path, MAX_FILE_BYTES);
        let bytes = read.map_err(|error| refuse(error.to_string()))?;
        let bytes = bytes.trim_ascii();
        if bytes.is_empty() {
            Err(refuse("it is empty".into()))
        } else {
            Ok(Secret(bytes.to_vec()))
        }
    }

    /// Key derived from the secret, for one purpose.
    pub fn derive_key(&self, purpose: &str) -> [u8; 32] {
        Key::new(Some(self)).prove("weft derived key", &[purpose.as_bytes()])
    }

    /// Random 32-byte secret in hexadecimal, for launchers.
    pub fn generate() -> Result<String> {
        let bytes: [u8; 32] = random_bytes()?;
        Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

pub(crate) const PROOF_BYTES: usize = 32;

/// Authentication key derived from the secret.
#[derive(Clone)]
pub(crate) struct Key {
    bytes: [u8; 32],
    is_public: bool,
}

impl Key {
    /// Key for a secret. Without a secret it is a public constant, which [`crate::Config`] allows on
    /// loopback only, between one user's processes (`neighbour.rs`).
    pub(crate) fn new(secret: Option<&Secret>) -> Key {
        let (label, secret) = match secret {
            Some(secret) => ("weft control secret", secret.0.as_slice()),
            None => ("weft control without a secret", [].as_slice()),
        };
        let is_public = secret.is_empty();
        let bytes = authentication_code(secret, label, &[]).finalize().into_bytes().into();
        Key { bytes, is_public }
    }

    /// True without a secret: every process has the key.
    pub(crate) fn is_public(&self) -> bool {
        self.is_public
    }

    /// Authentication code over the parts, for one purpose.
    pub(crate) fn prove(&self, purpose: &str, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
        authentication_code(&self.bytes, purpose, parts).finalize().into_bytes().into()
    }

    /// True if a proof is valid; in constant time.
    pub(crate) fn verify(&self, purpose: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
        authentication_code(&self.bytes, purpose, parts).verify_slice(proof).is_ok()
    }
}

/// HMAC-SHA256 over the parts, each with its length, so that different part lists never share a code.
fn authentication_code(key: &[u8], purpose: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut code =
        <Hmac<Sha256> as Mac>::new_from_slice(key).expect("HMAC takes a key of any length");
    for part in std::iter::once(purpose.as_bytes()).chain(parts.iter().copied()) {
        code.update(&(part.len() as u64).to_le_bytes());
        code.update(part);
    }
    code
}

/// Unpredictable system bytes.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::System {
        doing: "reading random bytes of the system",
        source: std::io::Error::other(error.to_string()),
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_valid_for_its_key_purpose_and_parts_only() {
        let key = Key::new(Some(&Secret::new("apple").unwrap()));
        let proof = key.prove("dialer", &[b"ab", b"c"]);
        assert!(key.verify("dialer", &[b"ab", b"c"], &proof));
        assert!(!key.verify("acceptor", &[b"ab", b"c"], &proof));
        assert!(!key.verify("dialer", &[b"a", b"bc"], &proof));
        assert!(!key.verify("dialer", &[b"ab", b"c"], &proof[..31]));
        assert!(!Key::new(None).verify("dialer", &[b"ab", b"c"], &proof));
    }

    #[test]
    fn a_secret_is_not_printed() {
        assert_eq!(format!("{:?}", Secret::new("apple").unwrap()), "Secret(..)");
    }
}
