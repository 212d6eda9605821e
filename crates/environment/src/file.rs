//! Bounded reads from files that users name.
//!
//! A device or a pipe can be read without end, and opening a pipe waits for a writer: only regular files are read.
//! Files in `/proc` and `/sys` are regular ones without a length, so the limit holds while reading, too; one without
//! data (`/proc/kmsg`) is an error instead of a wait.

use rustix::fs::OFlags;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Read as _, Result};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens a regular file for reading, without a wait.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] for anything but a regular file; the system's error.
pub fn open(path: &Path) -> Result<File> {
    // Opening some devices has effects, so the type is checked before; and once more after, since the path may
    // name another file by then.
    check_type(&std::fs::metadata(path)?)?;
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    check_type(&file.metadata()?)?;
    Ok(file)
}

/// A regular file's contents, at most `limit` bytes.
///
/// # Errors
/// As [`open`]; [`ErrorKind::FileTooLarge`] beyond the limit.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    let length = file.metadata()?.len();
    if length > limit {
        let problem = format!("it has {length} bytes, at most {limit} are read");
        return Err(Error::new(ErrorKind::FileTooLarge, problem));
    }
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        let problem = format!("it has more than {limit} bytes");
        return Err(Error::new(ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

/// [`read`] for UTF-8.
///
/// # Errors
/// As [`read`]; [`ErrorKind::InvalidData`] for other bytes.
pub fn read_text(path: &Path, limit: u64) -> Result<String> {
    let refuse = |_| Error::new(ErrorKind::InvalidData, "it is not UTF-8");
    String::from_utf8(read(path, limit)?).map_err(refuse)
}

fn check_type(metadata: &Metadata) -> Result<()> {
    if metadata.is_file() {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::InvalidInput, "it is not a regular file"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "isolated miri reads no files")]
    fn only_regular_files_up_to_the_limit_are_read() {
        let folder = std::env::temp_dir().join(format!("weft-file-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("file");
        std::fs::write(&path, "four").unwrap();
        assert_eq!(read_text(&path, 4).unwrap(), "four");
        assert_eq!(read(&path, 3).unwrap_err().kind(), ErrorKind::FileTooLarge);
        std::fs::write(&path, b"\xff").unwrap();
        assert_eq!(read_text(&path, 4).unwrap_err().kind(), ErrorKind::InvalidData);
        let fifo = folder.join("fifo");
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for path in [&fifo, &folder, Path::new("/dev/zero")] {
            assert_eq!(read(path, 4).unwrap_err().kind(), ErrorKind::InvalidInput, "{path:?}");
        }
        // `stat` reports length 0.
        assert_eq!(
            read(Path::new("/proc/self/maps"), 9).unwrap_err().kind(),
            ErrorKind::FileTooLarge
        );
        std::fs::remove_dir_all(folder).unwrap();
    }
}
