//! Libfabric C layouts: the part of the API that this provider calls.
//!
//! Layouts follow `FABRIC_1.3`, the newest symbol version in libfabric 1.17. Later libraries keep that
//! version and add fields behind the ones declared here. A test compares each offset with libfabric's own
//! headers where they are installed.

use std::ffi::{c_char, c_int, c_void};

/// Address in an address vector.
pub type Address = u64;

pub const FI_MSG: u64 = 1 << 1;
pub const FI_RMA: u64 = 1 << 2;
pub const FI_WRITE: u64 = 1 << 9;
pub const FI_RECV: u64 = 1 << 10;
pub const FI_TRANSMIT: u64 = 1 << 11;
pub const FI_REMOTE_WRITE: u64 = 1 << 13;
pub const FI_REMOTE_CQ_DATA: u64 = 1 << 17;
pub const FI_COMPLETION: u64 = 1 << 24;
pub const FI_DELIVERY_COMPLETE: u64 = 1 << 28;
pub const FI_HMEM: u64 = 1 << 47;
pub const FI_SOURCE: u64 = 1 << 57;
/// `fi_getinfo` flag: only provider names.
pub const FI_PROV_ATTR_ONLY: u64 = 1 << 54;

/// Mode bits: demands that a provider makes on the caller.
pub const FI_CONTEXT: u64 = 1 << 59;
pub const FI_CONTEXT2: u64 = 1 << 52;
pub const FI_RX_CQ_DATA: u64 = 1 << 56;

pub const FI_MR_LOCAL: c_int = 1 << 2;
pub const FI_MR_VIRT_ADDR: c_int = 1 << 4;
pub const FI_MR_ALLOCATED: c_int = 1 << 5;
pub const FI_MR_PROV_KEY: c_int = 1 << 6;
pub const FI_MR_HMEM: c_int = 1 << 10;

pub const FI_EP_RDM: u32 = 3;
pub const FI_THREAD_SAFE: u32 = 1;
pub const FI_PROGRESS_AUTO: u32 = 1;
pub const FI_AV_TABLE: u32 = 2;
pub const FI_CQ_FORMAT_DATA: u32 = 3;
pub const FI_WAIT_NONE: u32 = 0;
pub const FI_WAIT_FD: u32 = 3;
pub const FI_GETWAIT: c_int = 5;
pub const FI_ENABLE: c_int = 6;
pub const FI_HMEM_CUDA: u32 = 1;

pub const FI_EAGAIN: isize = 11;
pub const FI_ENOMEM: c_int = 12;
pub const FI_ENODATA: c_int = 61;
pub const FI_EAVAIL: isize = 259;

/// Endpoint options that permit CUDA calls (libfabric 1.18) and shared memory (1.21).
pub const FI_OPT_CUDA_API_PERMITTED: c_int = 10;
pub const FI_OPT_SHARED_MEMORY_PERMITTED: c_int = 11;

/// EFA endpoint options: unsolicited receives for RDMA writes (libfabric 2.3), retries while a receiver
/// is not ready.
pub const FI_OPT_ENDPOINT: c_int = 0;
pub const FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV: c_int = -(0xefa << 16) + 8;
pub const FI_OPT_EFA_RNR_RETRY: c_int = -(0xefa << 16);

/// Major and minor version in one number.
pub const fn version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

#[repr(C)]
pub struct Info {
    pub next: *mut Info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut Fid,
    pub tx_attr: *mut TxAttr,
    pub rx_attr: *mut RxAttr,
    pub ep_attr: *mut EpAttr,
    pub domain_attr: *mut DomainAttr,
    pub fabric_attr: *mut FabricAttr,
    pub nic: *mut c_void,
}

#[repr(C)]
pub struct TxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
    pub tclass: u32,
}

#[repr(C)]
pub struct RxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub total_buffered_recv: usize,
    pub size: usize,
    pub iov_limit: usize,
}

#[repr(C)]
pub struct EpAttr {
    pub kind: u32,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
    pub msg_prefix_size: usize,
}

#[repr(C)]
pub struct DomainAttr {
    pub domain: *mut Domain,
    pub name: *mut c_char,
    pub threading: u32,
    pub control_progress: u32,
    pub data_progress: u32,
    pub resource_mgmt: u32,
    pub av_type: u32,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
    pub cq_cnt: usize,
    pub ep_cnt: usize,
}

#[repr(C)]
pub struct FabricAttr {
    pub fabric: *mut Fabric,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

/// Header in every libfabric object.
#[repr(C)]
pub struct Fid {
    pub class: usize,
    pub context: *mut c_void,
    pub ops: *mut Ops,
}

#[repr(C)]
pub struct Ops {
    pub size: usize,
    pub close: unsafe extern "C" fn(*mut Fid) -> c_int,
    pub bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
    pub control: unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int,
}

#[repr(C)]
pub struct Fabric {
    pub fid: Fid,
    pub ops: *mut FabricOps,
    pub api_version: u32,
}

#[repr(C)]
pub struct FabricOps {
    pub size: usize,
    pub domain:
        unsafe extern "C" fn(*mut Fabric, *mut Info, *mut *mut Domain, *mut c_void) -> c_int,
    pub passive_ep: *mut c_void,
    pub eq_open: *mut c_void,
    pub wait_open: *mut c_void,
    pub trywait: unsafe extern "C" fn(*mut Fabric, *mut *mut Fid, c_int) -> c_int,
}

#[repr(C)]
pub struct Domain {
    pub fid: Fid,
    pub ops: *mut DomainOps,
    pub mr: *mut MrOps,
}

#[repr(C)]
pub struct DomainOps {
    pub size: usize,
    pub av_open: unsafe extern "C" fn(*mut Domain, *mut AvAttr, *mut *mut Av, *mut c_void) -> c_int,
    pub cq_open: unsafe extern "C" fn(*mut Domain, *mut CqAttr, *mut *mut Cq, *mut c_void) -> c_int,
    pub endpoint: unsafe extern "C" fn(*mut Domain, *mut Info, *mut *mut Ep, *mut c_void) -> c_int,
}

#[repr(C)]
pub struct MrOps {
    pub size: usize,
    pub reg: *mut c_void,
    pub regv: *mut c_void,
    pub regattr: unsafe extern "C" fn(*mut Fid, *const MrAttr, u64, *mut *mut Mr) -> c_int,
}

#[repr(C)]
pub struct AvAttr {
    pub kind: u32,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

#[repr(C)]
pub struct CqAttr {
    pub size: usize,
    pub flags: u64,
    pub format: u32,
    pub wait_obj: u32,
    pub signaling_vector: c_int,
    pub wait_cond: u32,
    pub wait_set: *mut c_void,
}

#[repr(C)]
pub struct MrAttr {
    pub mr_iov: *const libc::iovec,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
    pub iface: u32,
    /// CUDA: device ordinal.
    pub device: u64,
    /// Behind the `FABRIC_1.3` fields: later providers read more fields, all zero.
    pub later: [u64; 4],
}

#[repr(C)]
pub struct Av {
    pub fid: Fid,
    pub ops: *mut AvOps,
}

#[repr(C)]
pub struct AvOps {
    pub size: usize,
    pub insert: unsafe extern "C" fn(
        *mut Av,
        *const c_void,
        usize,
        *mut Address,
        u64,
        *mut c_void,
    ) -> c_int,
}

#[repr(C)]
pub struct Cq {
    pub fid: Fid,
    pub ops: *mut CqOps,
}

/// Queue, entries, and how many there is room for.
pub type ReadFunction = unsafe extern "C" fn(*mut Cq, *mut CqEntry, usize) -> isize;

#[repr(C)]
pub struct CqOps {
    pub size: usize,
    pub read: ReadFunction,
    pub readfrom: unsafe extern "C" fn(*mut Cq, *mut CqEntry, usize, *mut Address) -> isize,
    pub readerr: unsafe extern "C" fn(*mut Cq, *mut CqError, u64) -> isize,
    pub sread: *mut c_void,
    pub sreadfrom: *mut c_void,
    pub signal: *mut c_void,
    pub strerror:
        unsafe extern "C" fn(*mut Cq, c_int, *const c_void, *mut c_char, usize) -> *const c_char,
}

/// `fi_cq_data_entry`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CqEntry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
}

/// `fi_cq_err_entry`.
#[repr(C)]
pub struct CqError {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
    /// Behind the `FABRIC_1.3` fields: later libraries write here.
    pub later: [u64; 4],
}

#[repr(C)]
pub struct Ep {
    pub fid: Fid,
    pub ops: *mut EpOps,
    pub cm: *mut CmOps,
    pub msg: *mut MsgOps,
    pub rma: *mut RmaOps,
}

#[repr(C)]
pub struct EpOps {
    pub size: usize,
    pub cancel: unsafe extern "C" fn(*mut Fid, *mut c_void) -> isize,
    pub getopt: *mut c_void,
    pub setopt: unsafe extern "C" fn(*mut Fid, c_int, c_int, *const c_void, usize) -> c_int,
}

#[repr(C)]
pub struct CmOps {
    pub size: usize,
    pub setname: *mut c_void,
    pub getname: unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int,
}

#[repr(C)]
pub struct MsgOps {
    pub size: usize,
    pub recv: unsafe extern "C" fn(
        *mut Ep,
        *mut c_void,
        usize,
        *mut c_void,
        Address,
        *mut c_void,
    ) -> isize,
}

pub type WriteFunction = unsafe extern "C" fn(*mut Ep, *const RmaMessage, u64) -> isize;

#[repr(C)]
pub struct RmaOps {
    pub size: usize,
    pub read: *mut c_void,
    pub readv: *mut c_void,
    pub readmsg: *mut c_void,
    pub write: *mut c_void,
    pub writev: *mut c_void,
    pub writemsg: WriteFunction,
    pub inject: *mut c_void,
    pub writedata: *mut c_void,
    /// Endpoint, source, length, immediate, address, destination, key.
    pub injectdata:
        unsafe extern "C" fn(*mut Ep, *const c_void, usize, u64, Address, u64, u64) -> isize,
}

/// `fi_msg_rma`.
#[repr(C)]
pub struct RmaMessage {
    pub msg_iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: Address,
    pub rma_iov: *const RmaRange,
    pub rma_iov_count: usize,
    pub context: *mut c_void,
    pub data: u64,
}

/// `fi_rma_iov`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RmaRange {
    pub addr: u64,
    pub len: usize,
    pub key: u64,
}

#[repr(C)]
pub struct Mr {
    pub fid: Fid,
    pub mem_desc: *mut c_void,
    pub key: u64,
}

/// C expressions with the values here: all field offsets, sizes, constants. A test compares them with a C
/// compiler.
pub fn layout() -> Vec<(String, u64)> {
    let mut lines = Vec::new();
    macro_rules! offsets {
        ($($here:ident $there:ident: $($field:ident $(as $name:ident)?),*;)*) => {$($(
            let _name = stringify!($field);
            $(let _name = stringify!($name);)?
            let expression = format!("offsetof(struct {}, {_name})", stringify!($there));
            lines.push((expression, std::mem::offset_of!($here, $field) as u64));
        )*)*};
    }
    offsets! {
        Info fi_info: next, caps, mode, addr_format, src_addrlen, dest_addrlen, src_addr, dest_addr, handle, tx_attr, rx_attr, ep_attr, domain_attr, fabric_attr, nic;
        TxAttr fi_tx_attr: caps, mode, op_flags, msg_order, comp_order, inject_size, size, iov_limit, rma_iov_limit, tclass;
        RxAttr fi_rx_attr: caps, mode, op_flags, msg_order, comp_order, total_buffered_recv, size, iov_limit;
        EpAttr fi_ep_attr: kind as type, protocol, protocol_version, max_msg_size, msg_prefix_size;
        DomainAttr fi_domain_attr: domain, name, threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode, mr_key_size, cq_data_size, cq_cnt, ep_cnt;
        FabricAttr fi_fabric_attr: fabric, name, prov_name, prov_version, api_version;
        Fid fid: class as fclass, context, ops;
        Ops fi_ops: size, close, bind, control;
        Fabric fid_fabric: fid, ops, api_version;
        FabricOps fi_ops_fabric: size, domain, passive_ep, eq_open, wait_open, trywait;
        Domain fid_domain: fid, ops, mr;
        DomainOps fi_ops_domain: size, av_open, cq_open, endpoint;
        MrOps fi_ops_mr: size, reg, regv, regattr;
        AvAttr fi_av_attr: kind as type, rx_ctx_bits, count, ep_per_node, name, map_addr, flags;
        CqAttr fi_cq_attr: size, flags, format, wait_obj, signaling_vector, wait_cond, wait_set;
        MrAttr fi_mr_attr: mr_iov, iov_count, access, offset, requested_key, context, auth_key_size, auth_key, iface, device;
        Av fid_av: fid, ops;
        AvOps fi_ops_av: size, insert;
        Cq fid_cq: fid, ops;
        CqOps fi_ops_cq: size, read, readfrom, readerr, sread, sreadfrom, signal, strerror;
        CqEntry fi_cq_data_entry: op_context, flags, len, buf, data;
        CqError fi_cq_err_entry: op_context, flags, len, buf, data, tag, olen, err, prov_errno, err_data, err_data_size;
        Ep fid_ep: fid, ops, cm, msg, rma;
        EpOps fi_ops_ep: size, cancel, getopt, setopt;
        CmOps fi_ops_cm: size, setname, getname;
        MsgOps fi_ops_msg: size, recv;
        RmaOps fi_ops_rma: size, read, readv, readmsg, write, writev, writemsg, inject, writedata, injectdata;
        RmaMessage fi_msg_rma: msg_iov, desc, iov_count, addr, rma_iov, rma_iov_count, context, data;
        RmaRange fi_rma_iov: addr, len, key;
        Mr fid_mr: fid, mem_desc, key;
    }
    macro_rules! constants {
        ($($name:ident),*) => {$(
            lines.push((stringify!($name).to_owned(), $name as u64));
        )*};
    }
    constants! {
        FI_MSG, FI_RMA, FI_WRITE, FI_RECV, FI_TRANSMIT, FI_REMOTE_WRITE, FI_REMOTE_CQ_DATA, FI_COMPLETION, FI_DELIVERY_COMPLETE, FI_HMEM, FI_SOURCE, FI_CONTEXT, FI_CONTEXT2, FI_RX_CQ_DATA, FI_MR_LOCAL, FI_MR_VIRT_ADDR, FI_MR_ALLOCATED, FI_MR_PROV_KEY, FI_MR_HMEM, FI_EP_RDM, FI_THREAD_SAFE, FI_PROGRESS_AUTO, FI_AV_TABLE, FI_CQ_FORMAT_DATA, FI_WAIT_NONE, FI_WAIT_FD, FI_GETWAIT, FI_ENABLE, FI_HMEM_CUDA, FI_EAGAIN, FI_ENOMEM, FI_ENODATA, FI_EAVAIL, FI_OPT_ENDPOINT
    }
    // Libfabric 1.17's headers end with the option before these two.
    let permissions = [FI_OPT_CUDA_API_PERMITTED, FI_OPT_SHARED_MEMORY_PERMITTED];
    lines.extend(
        (1..)
            .zip(permissions)
            .map(|(behind, option)| (format!("FI_OPT_XPU_TRIGGER + {behind}"), option as u64)),
    );
    let sizes = [
        ("fi_cq_data_entry", size_of::<CqEntry>()),
        ("fi_msg_rma", size_of::<RmaMessage>()),
        ("fi_rma_iov", size_of::<RmaRange>()),
    ];
    lines.extend(sizes.map(|(name, size)| (format!("sizeof(struct {name})"), size as u64)));
    lines
}
