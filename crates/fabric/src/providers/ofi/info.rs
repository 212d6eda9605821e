//! Libfabric offers: providers, NICs, and the demands that each makes on the caller.

use super::library::{Library, check};
use super::{signals, sys};
use std::ffi::{CStr, CString, c_char};
use std::net::IpAddr;
use std::ptr::{NonNull, null, null_mut};

/// Libfabric provider, by the name in `fi_info`; `efa-direct` is the fabric with that name from provider
/// `efa`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfiProvider {
    name: String,
}

impl OfiProvider {
    /// Provider with this name.
    pub fn new(name: impl Into<String>) -> OfiProvider {
        OfiProvider { name: name.into() }
    }

    /// Name for users.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name within libfabric.
    fn provider(&self) -> &str {
        if self.name == "efa-direct" { "efa" } else { &self.name }
    }

    pub(super) fn is_efa(&self) -> bool {
        self.provider() == "efa"
    }

    fn is_efa_direct(&self) -> bool {
        self.name == "efa-direct"
    }

    /// True if endpoints have IP addresses.
    pub(super) fn is_ip(&self) -> bool {
        self.name.starts_with("tcp") || self.name.starts_with("verbs")
    }

    /// True if it reaches only ranks on the same host.
    pub(super) fn is_single_host(&self) -> bool {
        self.name.starts_with("shm")
    }
}

/// Offer: one NIC over one provider.
pub struct Info(NonNull<sys::Info>);

// SAFETY: it is immutable after construction, with a single owner.
unsafe impl Send for Info {}
// SAFETY: as above.
unsafe impl Sync for Info {}

impl Drop for Info {
    fn drop(&mut self) {
        if let Ok(library) = Library::get() {
            // SAFETY: it came from the library's `fi_dupinfo` and is freed once.
            unsafe { (library.freeinfo)(self.0.as_ptr()) };
        }
    }
}

impl Clone for Info {
    fn clone(&self) -> Info {
        // SAFETY: it is valid.
        unsafe { Info::copy(self.raw()) }.expect("the library has memory for a copy")
    }
}

/// Library string; empty for a null pointer.
///
/// # Safety
/// The pointer is null or a valid string.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: valid by the caller's contract.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

impl Info {
    /// Copies one offer, without the ones linked behind it. `None` if the library is out of memory.
    ///
    /// # Safety
    /// The pointer is valid, or null for an empty offer.
    unsafe fn copy(raw: *const sys::Info) -> Option<Info> {
        let library = Library::get().ok()?;
        // SAFETY: valid by the caller's contract; the library makes an empty one from null.
        NonNull::new(unsafe { (library.dupinfo)(raw) }).map(Info)
    }

    /// Sets the name for endpoints made from it.
    pub fn name_endpoints(&mut self, name: &CStr) {
        // SAFETY: the library allocates and frees addresses with malloc and free.
        unsafe {
            let info = self.0.as_mut();
            libc::free(info.src_addr);
            info.src_addr = libc::strdup(name.as_ptr()).cast();
            info.src_addrlen = name.count_bytes() + 1;
        }
    }

    pub fn raw(&self) -> *mut sys::Info {
        self.0.as_ptr()
    }

    fn info(&self) -> &sys::Info {
        // SAFETY: it is valid as long as this value lives.
        unsafe { self.0.as_ref() }
    }

    fn domain(&self) -> &sys::DomainAttr {
        // SAFETY: every offer from the library is complete.
        unsafe { &*self.info().domain_attr }
    }

    fn transmit(&self) -> &sys::TxAttr {
        // SAFETY: as above.
        unsafe { &*self.info().tx_attr }
    }

    fn receive(&self) -> &sys::RxAttr {
        // SAFETY: as above.
        unsafe { &*self.info().rx_attr }
    }

    fn endpoint(&self) -> &sys::EpAttr {
        // SAFETY: as above.
        unsafe { &*self.info().ep_attr }
    }

    fn fabric(&self) -> &sys::FabricAttr {
        // SAFETY: as above.
        unsafe { &*self.info().fabric_attr }
    }

    /// Provider name within libfabric, such as `tcp;ofi_rxm`.
    pub fn provider(&self) -> String {
        // SAFETY: a string from the library.
        unsafe { text(self.fabric().prov_name) }
    }

    /// Fabric name: a network, or `efa-direct`.
    pub fn fabric_name(&self) -> String {
        // SAFETY: a string from the library.
        unsafe { text(self.fabric().name) }
    }

    /// Domain name: a NIC.
    pub fn domain_name(&self) -> String {
        // SAFETY: a string from the library.
        unsafe { text(self.domain().name) }
    }

    /// Address format.
    pub fn address_format(&self) -> u32 {
        self.info().addr_format
    }

    /// Maximum bytes in one write.
    pub fn max_message(&self) -> u64 {
        self.endpoint().max_msg_size as u64
    }

    /// Maximum ranges in one write, at both ends.
    pub fn max_ranges(&self) -> u32 {
        let transmit = self.transmit();
        transmit.iov_limit.min(transmit.rma_iov_limit).clamp(1, 4096) as u32
    }

    /// Maximum writes in flight.
    pub fn transmit_size(&self) -> usize {
        self.transmit().size
    }

    /// Maximum bytes that the provider copies inside a write call.
    pub fn inject_size(&self) -> usize {
        self.transmit().inject_size
    }

    /// Maximum posted receives.
    pub fn receive_size(&self) -> usize {
        self.receive().size
    }

    /// Immediate data bytes in an arrival.
    pub fn immediate_bytes(&self) -> usize {
        self.domain().cq_data_size
    }

    /// True if an arrival's length is the payload's. Libfabric 1.17 reports 0 over `tcp;ofi_rxm`, and 1.19 over
    /// `efa`.
    pub fn reports_lengths(&self) -> bool {
        Library::get().is_ok_and(|library| library.version() >= (1, 20))
    }

    /// Key length in bytes.
    pub fn key_size(&self) -> usize {
        self.domain().mr_key_size
    }

    fn memory_mode(&self, bit: i32) -> bool {
        self.domain().mr_mode & bit != 0
    }

    /// True if peers address memory by virtual address instead of offset.
    pub fn uses_addresses(&self) -> bool {
        self.memory_mode(sys::FI_MR_VIRT_ADDR)
    }

    /// True if sources in host memory must be registered.
    pub fn registers_sources(&self) -> bool {
        self.memory_mode(sys::FI_MR_LOCAL)
    }

    /// True if sources in CUDA device memory must be registered.
    pub fn registers_device_sources(&self) -> bool {
        self.memory_mode(sys::FI_MR_LOCAL) || self.reaches_devices()
    }

    /// True if CUDA device memory can be registered.
    pub fn reaches_devices(&self) -> bool {
        self.info().caps & sys::FI_HMEM != 0
    }

    /// True if arrivals name the sender, where the provider can.
    pub fn names_senders(&self) -> bool {
        self.info().caps & sys::FI_SOURCE != 0
    }

    /// True if each immediate consumes a posted receive.
    pub fn consumes_receives(&self) -> bool {
        (self.info().mode | self.receive().mode) & sys::FI_RX_CQ_DATA != 0
    }

    /// True if writes progress without calls into the library.
    pub fn progresses_by_itself(&self) -> bool {
        self.domain().data_progress == sys::FI_PROGRESS_AUTO
    }
}

/// A provider's offers, one for each NIC, in the order in which the provider prefers them. `source`:
/// address that endpoints listen on, for IP providers. `optional`: capabilities used where available,
/// among [`sys::FI_HMEM`] and [`sys::FI_SOURCE`].
///
/// # Errors
/// Reason why the provider cannot be used here. There is no fallback to another provider.
pub fn offers(provider: &OfiProvider, source: IpAddr, optional: u64) -> Result<Vec<Info>, String> {
    let library = Library::get()?;
    if provider.is_efa() && library.version() < (1, 21) {
        let ((major, minor), path) = (library.version(), library.path().display());
        return Err(format!(
            "{path} is libfabric {major}.{minor}: provider efa needs 1.21 or later; install EFA's software, \
             or name its library in {}",
            super::library::PATH
        ));
    }
    let mut found = Vec::new();
    let tries = [optional, optional & sys::FI_HMEM, optional & sys::FI_SOURCE, 0];
    for (index, capabilities) in tries.iter().enumerate() {
        if found.is_empty() && !tries[..index].contains(capabilities) {
            found = query(library, provider, source, *capabilities)?;
        }
    }
    let mut seen = Vec::new();
    found.retain(|info| {
        let domain = info.domain_name();
        let is_fabric =
            !provider.is_efa() || (info.fabric_name() == "efa-direct") == provider.is_efa_direct();
        let is_new = !seen.contains(&domain);
        seen.push(domain);
        info.provider() == provider.provider() && is_fabric && is_new
    });
    if found.is_empty() {
        let ((major, minor), path) = (library.version(), library.path().display());
        let name = provider.name();
        let why = if provider.is_ip() { format!(" from {source}") } else { String::new() };
        return Err(format!(
            "libfabric {major}.{minor} ({path}) offers no reliable datagram endpoint with remote writes \
             and immediate data by provider {name}{why}; \
             `weft doctor` lists its offers; name one in WEFT_OFI_PROVIDER"
        ));
    }
    Ok(found)
}

/// The library's offers for a provider with these optional capabilities.
fn query(
    library: &Library,
    provider: &OfiProvider,
    source: IpAddr,
    optional: u64,
) -> Result<Vec<Info>, String> {
    // SAFETY: null makes an empty one.
    let hints = unsafe { Info::copy(null()) }.ok_or("fi_dupinfo: out of memory")?;
    let name = CString::new(provider.provider()).map_err(|_| "provider name with a zero byte")?;
    let fabric = CString::new(provider.name()).map_err(|_| "provider name with a zero byte")?;
    let node = CString::new(source.to_string()).unwrap_or_default();
    let by_address = provider.is_ip() && !source.is_unspecified();
    let mut found = null_mut();
    // SAFETY: an empty offer from the library is complete. The two strings are lent for the call only:
    // they are removed before the hints are freed.
    let result = unsafe {
        let hint = &mut *hints.raw();
        hint.caps = sys::FI_MSG | sys::FI_RMA | sys::FI_WRITE | sys::FI_REMOTE_WRITE | optional;
        hint.mode = sys::FI_CONTEXT | sys::FI_CONTEXT2;
        if provider.is_efa_direct() {
            hint.mode |= sys::FI_RX_CQ_DATA;
            (*hint.fabric_attr).name = fabric.as_ptr().cast_mut();
        }
        (*hint.ep_attr).kind = sys::FI_EP_RDM;
        let domain = &mut *hint.domain_attr;
        domain.threading = sys::FI_THREAD_SAFE;
        domain.cq_data_size = size_of::<u32>();
        domain.mr_mode = sys::FI_MR_LOCAL
            | sys::FI_MR_VIRT_ADDR
            | sys::FI_MR_ALLOCATED
            | sys::FI_MR_PROV_KEY
            | if optional & sys::FI_HMEM != 0 { sys::FI_MR_HMEM } else { 0 };
        (*hint.fabric_attr).prov_name = name.as_ptr().cast_mut();
        let (node, flags) = if by_address { (node.as_ptr(), sys::FI_SOURCE) } else { (null(), 0) };
        let (api, hints) = (library.api(), hints.raw());
        // The first call loads providers.
        let result = signals::preserving_actions(|| {
            (library.getinfo)(api, node, null(), flags, hints, &mut found)
        });
        (*hint.fabric_attr).prov_name = null_mut();
        (*hint.fabric_attr).name = null_mut();
        result
    };
    if result == -sys::FI_ENODATA {
        return Ok(Vec::new());
    }
    check("fi_getinfo", result)?;
    Ok(copies(library, found))
}

/// Providers in the library, with or without NICs.
///
/// # Errors
/// Reason why the library is missing.
pub fn built_in() -> Result<Vec<String>, String> {
    let library = Library::get()?;
    let mut found = null_mut();
    let (api, flags) = (library.api(), sys::FI_PROV_ATTR_ONLY);
    // SAFETY: hints may be null.
    let result = signals::preserving_actions(|| unsafe {
        (library.getinfo)(api, null(), null(), flags, null(), &mut found)
    });
    check("fi_getinfo", result)?;
    let mut names: Vec<String> = copies(library, found).iter().map(Info::provider).collect();
    names.dedup();
    Ok(names)
}

/// Copies the offers in a list, and frees it.
fn copies(library: &Library, found: *mut sys::Info) -> Vec<Info> {
    let mut offers = Vec::new();
    let mut next = found;
    while !next.is_null() {
        // SAFETY: a valid list of the library.
        unsafe {
            offers.extend(Info::copy(next));
            next = (*next).next;
        }
    }
    // SAFETY: the list came from the library and is freed once; copies do not share with it.
    unsafe { (library.freeinfo)(found) };
    offers
}
