//! Device header list.

#[path = "common/folder.rs"]
mod folder;

#[test]
#[cfg_attr(miri, ignore = "isolated miri reads no files")]
fn every_header_of_the_folder_is_listed() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
    folder::lists_all_of(folder, weft_gpu::kernels::HEADERS);
}
