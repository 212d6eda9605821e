//! How endpoints hang on a switch.

use crate::builder::NetworkBuilder;
use crate::error::Result;
use crate::network::{LinkSpec, NodeId, counted};

/// How endpoints hang on a port of a switch: alone, or several GPUs behind one NIC.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attach {
    /// GPUs that share the NIC of a port. 1 is a NIC for each GPU, and then the endpoint stands on the
    /// port itself. More are the single-NIC baseline of EFLOPS: each GPU has a link to its host, and
    /// the host has the port.
    pub gpus_per_nic: u32,
    /// The link from a GPU to its host, where NICs are shared.
    pub pcie: LinkSpec,
}

impl Default for Attach {
    /// A NIC for each GPU; PCIe 3 x16 (15.75 GB/s) otherwise.
    fn default() -> Attach {
        Attach { gpus_per_nic: 1, pcie: LinkSpec::new(126.0, 0.5) }
    }
}

impl Attach {
    pub(super) fn check(&self) -> Result<()> {
        counted("gpus_per_nic", self.gpus_per_nic)
    }

    /// Puts on a switch's port what stands there.
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
