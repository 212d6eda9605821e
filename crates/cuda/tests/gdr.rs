//! Words in "GPU memory" that the host maps, over a stand-in for libgdrapi and host memory.
#![cfg(target_arch = "x86_64")]

#[path = "common/gdrapi.rs"]
mod gdrapi;

use gdrapi::Gdrapi;
use std::path::Path;
use weft_cuda::Error;
use weft_cuda::gdr::{Gdr, MappedWords, PAGE_BYTES};

/// A GPU's page.
#[repr(C, align(65536))]
struct Page([u32; PAGE_BYTES / 4]);

fn pages(count: usize) -> Box<[Page]> {
    (0..count).map(|_| Page([0; PAGE_BYTES / 4])).collect()
}

fn map(library: &Gdrapi, pages: &mut [Page], words: usize) -> Result<MappedWords, Error> {
    let address = pages.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: the pages outlive the mapping in each test, which reads them only after a store.
    unsafe { MappedWords::map(Gdr::open_at(&library.library())?, address, words) }
}

fn read(pages: &[Page], at: usize) -> u32 {
    let words = pages.as_ptr().cast::<u32>();
    // SAFETY: within the pages; volatile, since the mapping stores there.
    unsafe { words.add(at).read_volatile() }
}

const MADE: [&str; 4] = ["gdr_open", "gdr_pin_buffer", "gdr_map", "gdr_get_info"];
const GIVEN_BACK: [&str; 3] = ["gdr_unmap", "gdr_unpin_buffer", "gdr_close"];

#[test]
fn words_are_stored_in_the_memory_and_given_back_in_order() {
    let (library, mut pages) = (Gdrapi::compile(&[]), pages(2));
    let count = PAGE_BYTES / 4 + 1;
    let words = map(&library, &mut pages, count).unwrap();
    assert_eq!(words.len(), count);
    for (at, value) in [(0, 1), (1, u32::MAX), (count - 1, 3), (1, 4)] {
        words.set(at, value);
        assert_eq!(read(&pages, at), value);
    }
    let beyond = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| words.set(count, 1)));
    assert!(beyond.is_err());
    assert_eq!(library.calls(), MADE);
    drop(words);
    assert_eq!(library.calls(), [&MADE[..], &GIVEN_BACK].concat());
    assert_eq!([0, 1, 2, count - 1, count].map(|at| read(&pages, at)), [1, 4, 0, 3, 0]);
}

#[test]
fn a_mapping_that_begins_before_the_memory_is_understood() {
    let library = Gdrapi::compile(&["SHIFT=65536", "MAPPED_BYTES=131072"]);
    let mut pages = pages(2);
    let words = map(&library, &mut pages[1..], 4).unwrap();
    words.set(3, 9);
    drop(words);
    assert_eq!((read(&pages, 3), read(&pages, PAGE_BYTES / 4 + 3)), (0, 9));
}

#[test]
fn each_failed_call_is_named_and_what_was_made_is_given_back() {
    for (function, made, given_back) in
        [("gdr_pin_buffer", 2, 2), ("gdr_map", 3, 1), ("gdr_get_info", 4, 0)]
    {
        let library = Gdrapi::compile(&[&format!("FAIL=\"{function}\"")]);
        let error = map(&library, &mut pages(1), 4).unwrap_err();
        assert!(
            matches!(&error, Error::Call { call, code: 12, .. } if *call == function),
            "{error}"
        );
        assert_eq!(
            library.calls(),
            [&MADE[..made], &GIVEN_BACK[given_back..]].concat(),
            "{function}"
        );
    }
}

#[test]
fn what_cannot_be_mapped_is_refused() {
    let library = Gdrapi::compile(&["MAPPED_BYTES=8"]);
    let error = map(&library, &mut pages(1), 3).unwrap_err().to_string();
    assert!(error.ends_with("cannot be mapped by GDRCopy: GDRCopy mapped other memory"), "{error}");
    assert!(map(&library, &mut pages(1), 2).is_ok());
    assert!(matches!(map(&library, &mut pages(1), 0), Err(Error::Size { bytes: 0, .. })));
    let library = Gdrapi::compile(&["SHIFT=-65536"]);
    assert!(matches!(map(&library, &mut pages(2), 2), Err(Error::NotMapped { .. })));
    let gdr = Gdr::open_at(&library.library()).unwrap();
    let pages = pages(1);
    let address = pages.as_ptr().expose_provenance() as u64 + 4096;
    // SAFETY: it is refused.
    let error = unsafe { MappedWords::map(gdr, address, 1) }.unwrap_err().to_string();
    assert!(error.ends_with("expected a multiple of 64 KiB"), "{error}");
}

#[test]
fn the_driver_and_the_library_are_told_apart() {
    let library = Gdrapi::compile(&["FAIL=\"gdr_open\""]);
    let error = Gdr::open_at(&library.library()).unwrap_err();
    assert!(matches!(error, Error::NoGdrDriver { .. }), "{error}");
    if !Path::new("/dev/gdrdrv").exists() {
        let text = error.to_string();
        assert!(
            text.starts_with("GDRCopy's driver (/dev/gdrdrv) cannot be opened (no such device)"),
            "{text}"
        );
    }
    let error = Gdr::open_at(Path::new("/absent/libgdrapi.so.2")).unwrap_err().to_string();
    assert!(error.contains("/absent/libgdrapi.so.2: No such file"), "{error}");
    assert!(error.ends_with("or name it: WEFT_LIBGDRAPI"), "{error}");
    // The C library is no libgdrapi.
    for other in ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6"].map(Path::new) {
        if other.exists() {
            let error = Gdr::open_at(other).unwrap_err();
            assert!(matches!(error, Error::TooOld { function: "gdr_close", .. }), "{error}");
        }
    }
}

#[test]
fn a_forked_child_gives_nothing_back() {
    let (library, mut pages) = (Gdrapi::compile(&[]), pages(1));
    let words = map(&library, &mut pages, 4).unwrap();
    // SAFETY: the child drops the mapping, which takes no lock there, and exits.
    match unsafe { libc::fork() } {
        0 => {
            drop(words);
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) }
        }
        child => {
            assert!(child > 0);
            let mut status = 0;
            // SAFETY: waits for the child, and writes one integer.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!((status, library.calls()), (0, MADE.map(str::to_owned).to_vec()));
            words.set(0, 5);
            drop(words);
            assert_eq!(library.calls().len(), 7);
        }
    }
}
