//! Endpoint attachment to a switch port.

use crate::builder::NetworkBuilder;
use crate::error::Result;
use crate::network::{LinkSpec, NodeId, counted};

/// Endpoints on one switch port: a single GPU with a NIC, or several GPUs that share a NIC.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attachment {
    /// GPUs that share a port's NIC. With 1, the endpoint itself is cabled to the port. With more (the single-NIC
    /// baseline in EFLOPS), each GPU has a link to its host, and the host is cabled to the port.
    pub gpus_per_nic: u32,
    /// Link from a GPU to the host, where NICs are shared.
    pub pcie: LinkSpec,
}

impl Default for Attachment {
    /// One NIC per GPU; PCIe 3 x16 (15.75 GB/s) where NICs are shared.
    fn default() -> Attachment {
        Attachment { gpus_per_nic: 1, pcie: LinkSpec::new(126.0, 0.5) }
    }
}

impl Attachment {
    pub(super) fn check(&self) -> Result<()> {
        counted("gpus_per_nic", self.gpus_per_nic)
    }

    /// Adds the endpoints on a switch port.
    pub(super) fn add(
        &self,
        network: &mut NetworkBuilder,
        switch: NodeId,
        name: &str,
        host: Option<&str>,
        spec: LinkSpec,
    ) -> Result<()> {
        if self.gpus_per_nic == 1 {
            let endpoint = network.endpoint(name, host)?;
            network.cable(endpoint, switch, spec)?;
            return Ok(());
        }
        let node = network.host(name)?;
        network.cable(node, switch, spec)?;
        for gpu in 0..self.gpus_per_nic {
            let endpoint =
                network.endpoint(format!("{name}.gpu{gpu}"), Some(host.unwrap_or(name)))?;
            network.cable(endpoint, node, self.pcie)?;
        }
        Ok(())
    }
}
