//! The shared secret and what is proved with it.

use crate::{Error, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fmt;
use std::path::Path;

/// What every rank of a job knows and nobody else does.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// A secret of these bytes. An empty one is refused.
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

    /// The secret that a file holds, without the white space around it.
    pub fn from_file(path: &Path) -> Result<Secret> {
        let refuse =
            |problem: String| Error::SecretFile { path: path.display().to_string(), problem };
        let bytes = std::fs::read(path).map_err(|error| refuse(error.to_string()))?;
        let bytes = bytes.trim_ascii();
        if bytes.is_empty() {
            Err(refuse("it is empty".into()))
        } else {
            Ok(Secret(bytes.to_vec()))
        }
    }

    /// A fresh random secret in hexadecimal, for a launcher to hand to its ranks.
    pub fn generate() -> Result<String> {
        let bytes: [u8; 32] = random()?;
        Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

pub(crate) const PROOF_BYTES: usize = 32;

/// What a rank proves itself with: a key made from the secret.
#[derive(Clone)]
pub(crate) struct Key([u8; 32]);

impl Key {
    /// Ranks without a secret share a key that everybody knows; [`crate::Config`] allows that on
    /// loopback only.
    pub(crate) fn new(secret: Option<&Secret>) -> Key {
        let (label, secret) = match secret {
            Some(secret) => ("weft control secret", secret.0.as_slice()),
            None => ("weft control without a secret", [].as_slice()),
        };
        Key(code(secret, label, &[]).finalize().into_bytes().into())
    }

    /// An authentication code over the parts, for one purpose only.
    pub(crate) fn prove(&self, purpose: &str, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
        code(&self.0, purpose, parts).finalize().into_bytes().into()
    }

    /// Whether a proof holds, in constant time.
    pub(crate) fn verify(&self, purpose: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
        code(&self.0, purpose, parts).verify_slice(proof).is_ok()
    }
}

/// Every part goes in with its length, so that no two lists of parts give the same code.
fn code(key: &[u8], purpose: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut code =
        <Hmac<Sha256> as Mac>::new_from_slice(key).expect("HMAC takes a key of any length");
    for part in std::iter::once(purpose.as_bytes()).chain(parts.iter().copied()) {
        code.update(&(part.len() as u64).to_le_bytes());
        code.update(part);
    }
    code
}

/// Bytes nobody can foresee.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::System {
        doing: "asking the system for random bytes",
        source: std::io::Error::other(error.to_string()),
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_key_purpose_and_parts_only() {
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
