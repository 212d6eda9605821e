//! Processor time quotas: limits on the control groups in which a process runs.
//!
//! Sets of cores do not show them. All processes in a control group share one quota, so a quota carries
//! the group's identity.

use crate::bytes::Reader;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Maximum quotas for a process: levels of nested control groups.
const MAX_QUOTAS: usize = 16;
/// Mount point for control groups.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Control group quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuQuota {
    /// Inode number of the group's directory: the same in all containers on a host.
    pub group: u64,
    /// Processor time, in thousandths of a core; for example, 1500 is a core and a half.
    pub millicores: u32,
}

impl CpuQuota {
    /// Quotas that limit this process.
    pub(crate) fn of_process() -> Vec<CpuQuota> {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        CpuQuota::in_groups(Path::new(CGROUPS), &groups)
    }

    /// Quotas on the groups that `/proc/self/cgroup` lists, and on enclosing groups, below this mount.
    fn in_groups(mount: &Path, groups: &str) -> Vec<CpuQuota> {
        let mut quotas = Vec::new();
        for line in groups.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            let mount = match controllers {
                "" => mount.to_path_buf(),
                _ if controllers.split(',').any(|name| name == "cpu") => mount.join("cpu"),
                _ => continue,
            };
            // A container may see a path in another mount: then only the container's mount exists here.
            let group = mount.join(path.trim_start_matches('/'));
            let around = group.ancestors().take_while(|each| each.starts_with(&mount));
            quotas.extend(around.filter_map(CpuQuota::of_group));
        }
        quotas.truncate(MAX_QUOTAS);
        quotas
    }

    /// Quota on the group with this directory, if it has one.
    fn of_group(directory: &Path) -> Option<CpuQuota> {
        let read = |name: &str| -> Option<String> { fs::read_to_string(directory.join(name)).ok() };
        let (quota, period) = match read("cpu.max") {
            Some(text) => {
                let (quota, period) = text.trim().split_once(' ')?;
                (quota.to_owned(), period.to_owned())
            }
            None => (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?),
        };
        // "max", and -1 in the older interface, are no numbers.
        let (quota, period) = (quota.trim().parse::<u64>().ok()?, period.trim().parse().ok()?);
        let millicores = quota.saturating_mul(1000).checked_div(period)?;
        let group = fs::metadata(PathBuf::from(directory)).ok()?.ino();
        Some(CpuQuota { group, millicores: u32::try_from(millicores).unwrap_or(u32::MAX) })
    }

    /// Encodes quotas as bytes.
    pub(crate) fn encode_all(quotas: &[CpuQuota]) -> Vec<u8> {
        let bytes = |quota: &CpuQuota| {
            let group = quota.group.to_le_bytes().into_iter();
            group.chain(quota.millicores.to_le_bytes()).collect::<Vec<u8>>()
        };
        quotas.iter().flat_map(bytes).collect()
    }

    /// Decodes a peer's quotas.
    pub(crate) fn decode_all(bytes: &[u8]) -> Vec<CpuQuota> {
        let mut reader = Reader::new(bytes);
        let next = || Some(CpuQuota { group: reader.u64()?, millicores: reader.u32()? });
        std::iter::from_fn(next).take(MAX_QUOTAS).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Empty directory for a test, removed on drop.
    struct Mount(PathBuf);

    impl Mount {
        fn new(name: &str) -> Mount {
            let directory = format!("weft-{name}-{}", std::process::id());
            let mount = Mount(std::env::temp_dir().join(directory));
            fs::create_dir_all(&mount.0).unwrap();
            mount
        }

        fn path(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Mount {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "isolated miri has no files")]
    fn quotas_of_a_group_and_of_those_around_it_are_found() {
        let mount = Mount::new("quotas");
        let inner = mount.path().join("job/step");
        fs::create_dir_all(&inner).unwrap();
        fs::write(mount.path().join("job/cpu.max"), "150000 100000\n").unwrap();
        fs::write(inner.join("cpu.max"), "max 100000\n").unwrap();
        let found = CpuQuota::in_groups(mount.path(), "0::/job/step\n");
        let group = fs::metadata(mount.path().join("job")).unwrap().ino();
        assert_eq!(found, [CpuQuota { group, millicores: 1500 }]);
        // A path in another namespace: only the mount itself is visible.
        fs::write(mount.path().join("cpu.max"), "50000 100000\n").unwrap();
        let found = CpuQuota::in_groups(mount.path(), "0::/elsewhere/pod\n");
        assert_eq!(found.iter().map(|quota| quota.millicores).collect::<Vec<_>>(), [500]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "isolated miri has no files")]
    fn quotas_of_the_older_interface_are_found() {
        let mount = Mount::new("older-quotas");
        let group = mount.path().join("cpu/job");
        fs::create_dir_all(&group).unwrap();
        fs::write(mount.path().join("cpu/cpu.cfs_quota_us"), "-1\n").unwrap();
        fs::write(mount.path().join("cpu/cpu.cfs_period_us"), "100000\n").unwrap();
        fs::write(group.join("cpu.cfs_quota_us"), "200000\n").unwrap();
        fs::write(group.join("cpu.cfs_period_us"), "50000\n").unwrap();
        let groups = "5:memory:/job\n4:cpu,cpuacct:/job\n";
        let found = CpuQuota::in_groups(mount.path(), groups);
        assert_eq!(found.iter().map(|quota| quota.millicores).collect::<Vec<_>>(), [4000]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "isolated miri has no files")]
    fn damaged_groups_have_no_quota() {
        assert!(CpuQuota::in_groups(Path::new("/absent"), "0::/a\nx\n:\n1:cpu:/b\n").is_empty());
    }

    #[test]
    fn quotas_round_trip() {
        let quotas = [1, 2].map(|group| CpuQuota { group, millicores: 700 });
        assert_eq!(CpuQuota::decode_all(&CpuQuota::encode_all(&quotas)), quotas);
        assert_eq!(CpuQuota::decode_all(&[1; 13]).len(), 1);
        assert_eq!(CpuQuota::decode_all(&[0; 12 * 100]).len(), MAX_QUOTAS);
    }
}
