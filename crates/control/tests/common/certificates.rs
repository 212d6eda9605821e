//! Files for an authority and a certificate that it issued.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::path::PathBuf;

/// Folder with the PEM files `ca`, `cert` and `key`. Removed on drop.
pub struct Files(PathBuf);

impl Files {
    /// Files for a test, with a certificate for this name or address.
    pub fn new(test: &str, name: &str) -> Files {
        let folder = std::env::temp_dir().join(format!("weft-tls-{}-{test}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        let files = Files(folder);
        std::fs::write(files.path("ca"), issuer.pem()).unwrap();
        std::fs::write(files.path("cert"), certificate.pem()).unwrap();
        std::fs::write(files.path("key"), key.serialize_pem()).unwrap();
        files
    }

    /// Path to one file.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
