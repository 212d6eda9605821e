//! Shared secret of a job, and the authentication codes made with it.

use crate::{Error, Result};
use hmac::{Hmac, Mac};
use rustix::fs::{Mode, OFlags};
use sha2::Sha256;
use std::fmt;
use std::fs::{File, Metadata};
use std::io::Read as _;
use std::path::Path;

/// Largest secret file: 64 KiB.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Secret shared by the ranks of a job only.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Secret of these bytes; empty ones are rejected.
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
        let failed = |error: std::io::Error| refuse(error.to_string());
        // Opening a pipe would block until it has a writer, so the file type is checked before; and once
        // more after, since the path may name another file by then.
        check_file(&std::fs::metadata(path).map_err(failed)?).map_err(refuse)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        let file = File::from(file);
        check_file(&file.metadata().map_err(failed)?).map_err(refuse)?;
        let mut bytes = Vec::new();
        file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(refuse(format!("it has more than {MAX_FILE_BYTES} bytes")));
        }
        let bytes = bytes.trim_ascii();
        if bytes.is_empty() {
            Err(refuse("it is empty".into()))
        } else {
            Ok(Secret(bytes.to_vec()))
        }
    }

    /// Random secret of 32 bytes in hexadecimal, for launchers.
    pub fn generate() -> Result<String> {
        let bytes: [u8; 32] = random_bytes()?;
        Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

fn check_file(metadata: &Metadata) -> std::result::Result<(), String> {
    if !metadata.is_file() {
        return Err("it is not a regular file".into());
    }
    let length = metadata.len();
    if length > MAX_FILE_BYTES {
        return Err(format!("it has {length} bytes, at most {MAX_FILE_BYTES} are read"));
    }
    Ok(())
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

pub(crate) const PROOF_BYTES: usize = 32;

/// Authentication key derived from the secret.
#[derive(Clone)]
pub(crate) struct Key([u8; 32]);

impl Key {
    /// Key of a secret. Without a secret it is a public constant, which [`crate::Config`] allows on
    /// loopback only.
    pub(crate) fn new(secret: Option<&Secret>) -> Key {
        let (label, secret) = match secret {
            Some(secret) => ("weft control secret", secret.0.as_slice()),
            None => ("weft control without a secret", [].as_slice()),
        };
        Key(authentication_code(secret, label, &[]).finalize().into_bytes().into())
    }

    /// Authentication code over the parts, for one purpose.
    pub(crate) fn prove(&self, purpose: &str, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
        authentication_code(&self.0, purpose, parts).finalize().into_bytes().into()
    }

    /// True if a proof is valid; in constant time.
    pub(crate) fn verify(&self, purpose: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
        authentication_code(&self.0, purpose, parts).verify_slice(proof).is_ok()
    }
}

/// HMAC-SHA256 over the parts, each with its length, so that different lists of parts never share a code.
fn authentication_code(key: &[u8], purpose: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut code =
        <Hmac<Sha256> as Mac>::new_from_slice(key).expect("HMAC takes a key of any length");
    for part in std::iter::once(purpose.as_bytes()).chain(parts.iter().copied()) {
        code.update(&(part.len() as u64).to_le_bytes());
        code.update(part);
    }
    code
}

/// Unpredictable bytes of the system.
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
