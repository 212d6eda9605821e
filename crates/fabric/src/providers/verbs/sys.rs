//! Libibverbs C layouts: the interface calls that this provider uses.
//!
//! Layouts follow symbol version `IBVERBS_1.1`, in force since 2007. A test compares each offset with
//! libibverbs' own headers where they are installed.

use std::ffi::{c_int, c_uint, c_void};

pub type PollCq = unsafe extern "C" fn(*mut Cq, c_int, *mut Completion) -> c_int;
pub type RequestNotification = unsafe extern "C" fn(*mut Cq, c_int) -> c_int;
pub type PostSrqRecv =
    unsafe extern "C" fn(*mut Srq, *mut RecvRequest, *mut *mut RecvRequest) -> c_int;
pub type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendRequest, *mut *mut SendRequest) -> c_int;

/// Context functions that are reached by a table instead of a symbol.
#[repr(C)]
pub struct ContextOps {
    _queries: [*mut c_void; 11],
    pub poll_cq: PollCq,
    pub req_notify_cq: RequestNotification,
    _queues: [*mut c_void; 7],
    pub post_srq_recv: PostSrqRecv,
    _pairs: [*mut c_void; 4],
    pub post_send: PostSend,
}

/// Context functions that this provider calls.
#[derive(Clone, Copy)]
pub struct DataPath {
    pub poll_cq: PollCq,
    pub req_notify_cq: RequestNotification,
    pub post_srq_recv: PostSrqRecv,
    pub post_send: PostSend,
}

#[repr(C)]
pub struct Context {
    pub device: *mut c_void,
    pub ops: ContextOps,
    _rest_of_ops: [*mut c_void; 6],
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    mutex: libc::pthread_mutex_t,
    /// All ones: it is the last field in a [`VerbsContext`].
    pub abi_compat: *mut c_void,
}

impl Context {
    /// Context with these functions, for a library twin.
    fn of(device: *mut c_void, path: DataPath, cmd_fd: c_int, async_fd: c_int) -> Context {
        let none = std::ptr::null_mut();
        let DataPath { poll_cq, req_notify_cq, post_srq_recv, post_send } = path;
        let ops = ContextOps {
            _queries: [none; 11],
            poll_cq,
            req_notify_cq,
            _queues: [none; 7],
            post_srq_recv,
            _pairs: [none; 4],
            post_send,
        };
        Context {
            device,
            ops,
            _rest_of_ops: [none; 6],
            cmd_fd,
            async_fd,
            num_comp_vectors: 1,
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            abi_compat: EXTENDED,
        }
    }
}

/// Marks a context that is the last field in a [`VerbsContext`].
const EXTENDED: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);

pub type AdviseMr = unsafe extern "C" fn(*mut Pd, c_uint, u32, *mut Sge, u32) -> c_int;
pub type QueryDeviceEx =
    unsafe extern "C" fn(*mut Context, *const c_void, *mut DeviceAttrEx, usize) -> c_int;

/// Context behind the functions that libibverbs has added to it, the latest first.
#[repr(C)]
pub struct VerbsContext {
    advise_mr: Option<AdviseMr>,
    _later: [*mut c_void; 25],
    query_device_ex: Option<QueryDeviceEx>,
    _earlier: [*mut c_void; 10],
    _placeholder: u64,
    /// Whole size in bytes in the library's version.
    sz: usize,
    pub context: Context,
}

impl VerbsContext {
    /// Context with these functions, for a library twin.
    pub fn of(
        device: *mut c_void,
        path: DataPath,
        (query_device_ex, advise_mr): (QueryDeviceEx, AdviseMr),
        descriptors: (c_int, c_int),
    ) -> VerbsContext {
        let none = std::ptr::null_mut();
        VerbsContext {
            advise_mr: Some(advise_mr),
            _later: [none; 25],
            query_device_ex: Some(query_device_ex),
            _earlier: [none; 10],
            _placeholder: 0,
            sz: size_of::<VerbsContext>(),
            context: Context::of(device, path, descriptors.0, descriptors.1),
        }
    }

    /// The whole in which a context is the last field.
    pub fn around(context: *mut Context) -> *mut VerbsContext {
        context.wrapping_byte_sub(std::mem::offset_of!(VerbsContext, context)).cast()
    }

    /// Queries a device with extended attributes; `None` if the driver does not.
    ///
    /// # Safety
    /// The context is open.
    pub unsafe fn query_device_ex(context: *mut Context) -> Option<QueryDeviceEx> {
        let offset = std::mem::offset_of!(VerbsContext, query_device_ex);
        // SAFETY: by the caller's contract; the library's version has the field.
        unsafe { Self::has(context, offset).then(|| (*Self::around(context)).query_device_ex) }
            .flatten()
    }

    /// Gives advice on registered memory; `None` if the driver takes none.
    ///
    /// # Safety
    /// The context is open.
    pub unsafe fn advise_mr(context: *mut Context) -> Option<AdviseMr> {
        let offset = std::mem::offset_of!(VerbsContext, advise_mr);
        // SAFETY: by the caller's contract; the library's version has the field.
        unsafe { Self::has(context, offset).then(|| (*Self::around(context)).advise_mr) }.flatten()
    }

    /// True if the library's version has the field at an offset.
    ///
    /// # Safety
    /// The context is open.
    unsafe fn has(context: *mut Context, offset: usize) -> bool {
        // SAFETY: by the caller's contract; an extended context is the last field in a whole with a size.
        unsafe {
            (*context).abi_compat == EXTENDED
                && (*Self::around(context)).sz >= size_of::<VerbsContext>() - offset
        }
    }
}

#[repr(C)]
pub struct Pd {
    pub context: *mut Context,
    pub handle: u32,
}

#[repr(C)]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub struct CompletionChannel {
    pub context: *mut Context,
    pub fd: c_int,
    pub refcnt: c_int,
}

#[repr(C)]
pub struct Cq {
    pub context: *mut Context,
    pub channel: *mut CompletionChannel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
}

#[repr(C)]
pub struct Srq {
    pub context: *mut Context,
    pub srq_context: *mut c_void,
    pub pd: *mut Pd,
    pub handle: u32,
}

#[repr(C)]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
    pub pd: *mut Pd,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: c_uint,
    pub qp_type: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceAttr {
    pub fw_ver: [u8; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    _pairs: [c_int; 7],
    _atomic: c_uint,
    _datagrams: [c_int; 9],
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// Device attributes, with the ones that libibverbs has added.
#[repr(C)]
pub struct DeviceAttrEx {
    pub orig_attr: DeviceAttr,
    pub comp_mask: u32,
    pub odp_caps: OdpCaps,
    _later: [u64; 17],
}

/// On-demand paging capabilities.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct OdpCaps {
    pub general_caps: u64,
    pub rc_odp_caps: u32,
    pub uc_odp_caps: u32,
    pub ud_odp_caps: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct PortAttr {
    pub state: c_uint,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct GidEntry {
    /// Aligned as the union with 64-bit halves.
    pub gid: Gid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

/// Global port identifier.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gid(pub [u8; 16]);

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpCapacity {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub cap: QpCapacity,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpAttr {
    pub qp_state: c_uint,
    pub cur_qp_state: c_uint,
    pub path_mtu: c_uint,
    pub path_mig_state: c_uint,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: QpCapacity,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

#[repr(C)]
pub struct SrqInitAttr {
    pub srq_context: *mut c_void,
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

/// Local range in a work request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// Send queue work request; in the union only the RDMA write fields have names.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SendRequest {
    pub wr_id: u64,
    pub next: *mut SendRequest,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: c_uint,
    pub send_flags: c_uint,
    /// Big-endian.
    pub imm_data: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    _unions: [u64; 9],
}

impl SendRequest {
    /// Empty request.
    pub const EMPTY: SendRequest = SendRequest {
        wr_id: 0,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
        opcode: 0,
        send_flags: 0,
        imm_data: 0,
        remote_addr: 0,
        rkey: 0,
        _unions: [0; 9],
    };
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct RecvRequest {
    pub wr_id: u64,
    pub next: *mut RecvRequest,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

/// Completion queue entry.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Completion {
    pub wr_id: u64,
    pub status: c_uint,
    pub opcode: c_uint,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// Big-endian.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct AsyncEvent {
    /// Queue, queue pair or port number, by the event kind.
    pub element: *mut c_void,
    pub event_type: c_uint,
}

pub const IBV_PORT_ACTIVE: c_uint = 4;
pub const IBV_LINK_LAYER_INFINIBAND: u8 = 1;
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;
pub const IBV_GID_TYPE_ROCE_V2: u32 = 2;
pub const IBV_ACCESS_LOCAL_WRITE: c_uint = 1;
pub const IBV_ACCESS_REMOTE_WRITE: c_uint = 1 << 1;
pub const IBV_ACCESS_ON_DEMAND: c_uint = 1 << 6;
pub const IBV_ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;
pub const IBV_ODP_SUPPORT: u64 = 1;
pub const IBV_ODP_SUPPORT_WRITE: u32 = 1 << 2;
pub const IBV_ADVISE_MR_ADVICE_PREFETCH: c_uint = 0;
pub const IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE: c_uint = 1;
pub const IBV_ADVISE_MR_FLAG_FLUSH: u32 = 1;
pub const IBV_QPT_RC: c_uint = 2;
pub const IBV_QPS_RESET: c_uint = 0;
pub const IBV_QPS_INIT: c_uint = 1;
pub const IBV_QPS_RTR: c_uint = 2;
pub const IBV_QPS_RTS: c_uint = 3;
pub const IBV_QP_STATE: c_uint = 1;
pub const IBV_QP_ACCESS_FLAGS: c_uint = 1 << 3;
pub const IBV_QP_PKEY_INDEX: c_uint = 1 << 4;
pub const IBV_QP_PORT: c_uint = 1 << 5;
pub const IBV_QP_AV: c_uint = 1 << 7;
pub const IBV_QP_PATH_MTU: c_uint = 1 << 8;
pub const IBV_QP_TIMEOUT: c_uint = 1 << 9;
pub const IBV_QP_RETRY_CNT: c_uint = 1 << 10;
pub const IBV_QP_RNR_RETRY: c_uint = 1 << 11;
pub const IBV_QP_RQ_PSN: c_uint = 1 << 12;
pub const IBV_QP_MAX_QP_RD_ATOMIC: c_uint = 1 << 13;
pub const IBV_QP_MIN_RNR_TIMER: c_uint = 1 << 15;
pub const IBV_QP_SQ_PSN: c_uint = 1 << 16;
pub const IBV_QP_MAX_DEST_RD_ATOMIC: c_uint = 1 << 17;
pub const IBV_QP_DEST_QPN: c_uint = 1 << 20;
pub const IBV_WR_RDMA_WRITE: c_uint = 0;
pub const IBV_WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
pub const IBV_SEND_SIGNALED: c_uint = 1 << 1;
pub const IBV_SEND_INLINE: c_uint = 1 << 3;
pub const IBV_WC_SUCCESS: c_uint = 0;
pub const IBV_WC_LOC_PROT_ERR: c_uint = 4;
pub const IBV_WC_WR_FLUSH_ERR: c_uint = 5;
pub const IBV_WC_REM_ACCESS_ERR: c_uint = 10;
pub const IBV_WC_RETRY_EXC_ERR: c_uint = 12;
pub const IBV_WC_RECV: c_uint = 1 << 7;
pub const IBV_WC_RECV_RDMA_WITH_IMM: c_uint = (1 << 7) + 1;
pub const IBV_WC_WITH_IMM: c_uint = 1 << 1;
pub const IBV_EVENT_CQ_ERR: c_uint = 0;
pub const IBV_EVENT_QP_FATAL: c_uint = 1;
pub const IBV_EVENT_QP_REQ_ERR: c_uint = 2;
pub const IBV_EVENT_QP_ACCESS_ERR: c_uint = 3;
pub const IBV_EVENT_DEVICE_FATAL: c_uint = 8;
pub const IBV_EVENT_PORT_ACTIVE: c_uint = 9;
pub const IBV_EVENT_PORT_ERR: c_uint = 10;
pub const IBV_EVENT_SRQ_ERR: c_uint = 14;
pub const IBV_EVENT_QP_LAST_WQE_REACHED: c_uint = 16;

/// C expressions with the values here: all field offsets, sizes, constants. A test compares them with a C
/// compiler.
pub fn layout() -> Vec<(String, u64)> {
    let mut lines = Vec::new();
    macro_rules! offsets {
        ($($here:ident $there:ident: $($field:ident $(as $($name:ident).+)?),*;)*) => {$($(
            let _name = stringify!($field).to_owned();
            $(let _name = [$(stringify!($name)),+].join(".");)?
            let expression = format!("offsetof(struct {}, {_name})", stringify!($there));
            lines.push((expression, std::mem::offset_of!($here, $field) as u64));
        )*)*};
    }
    offsets! {
        ContextOps ibv_context_ops: poll_cq, req_notify_cq, post_srq_recv, post_send;
        Context ibv_context: device, ops, cmd_fd, async_fd, num_comp_vectors, abi_compat;
        Pd ibv_pd: context, handle;
        Mr ibv_mr: context, pd, addr, length, handle, lkey, rkey;
        CompletionChannel ibv_comp_channel: context, fd, refcnt;
        Cq ibv_cq: context, channel, cq_context, handle, cqe;
        Srq ibv_srq: context, srq_context, pd, handle;
        Qp ibv_qp: context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type;
        DeviceAttr ibv_device_attr: fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id, hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge, max_pkeys, local_ca_ack_delay, phys_port_cnt;
        DeviceAttrEx ibv_device_attr_ex: orig_attr, comp_mask, odp_caps;
        OdpCaps ibv_odp_caps: general_caps, rc_odp_caps as per_transport_caps.rc_odp_caps, uc_odp_caps as per_transport_caps.uc_odp_caps, ud_odp_caps as per_transport_caps.ud_odp_caps;
        PortAttr ibv_port_attr: state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state, link_layer, flags, port_cap_flags2;
        GidEntry ibv_gid_entry: gid, gid_index, port_num, gid_type, ndev_ifindex;
        QpCapacity ibv_qp_cap: max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
        QpInitAttr ibv_qp_init_attr: qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all;
        GlobalRoute ibv_global_route: dgid, flow_label, sgid_index, hop_limit, traffic_class;
        AhAttr ibv_ah_attr: grh, dlid, sl, src_path_bits, static_rate, is_global, port_num;
        QpAttr ibv_qp_attr: qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit;
        SrqInitAttr ibv_srq_init_attr: srq_context, max_wr as attr.max_wr, max_sge as attr.max_sge, srq_limit as attr.srq_limit;
        Sge ibv_sge: addr, length, lkey;
        SendRequest ibv_send_wr: wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, remote_addr as wr.rdma.remote_addr, rkey as wr.rdma.rkey;
        RecvRequest ibv_recv_wr: wr_id, next, sg_list, num_sge;
        Completion ibv_wc: wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits;
        AsyncEvent ibv_async_event: element, event_type;
    }
    macro_rules! constants {
        ($($name:ident),*) => {$(
            lines.push((stringify!($name).to_owned(), $name as u64));
        )*};
    }
    constants! {
        IBV_PORT_ACTIVE, IBV_LINK_LAYER_INFINIBAND, IBV_LINK_LAYER_ETHERNET, IBV_GID_TYPE_ROCE_V2, IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_ON_DEMAND, IBV_ACCESS_RELAXED_ORDERING, IBV_ODP_SUPPORT, IBV_ODP_SUPPORT_WRITE, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_STATE, IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_AV, IBV_QP_PATH_MTU, IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_SQ_PSN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_DEST_QPN, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_SEND_SIGNALED, IBV_SEND_INLINE, IBV_WC_SUCCESS, IBV_WC_LOC_PROT_ERR, IBV_WC_WR_FLUSH_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_WITH_IMM, IBV_EVENT_CQ_ERR, IBV_EVENT_SRQ_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_QP_LAST_WQE_REACHED
    }
    let sizes = [
        ("ibv_context_ops", size_of::<ContextOps>() + 6 * size_of::<usize>()),
        ("ibv_context", size_of::<Context>()),
        ("ibv_device_attr", size_of::<DeviceAttr>()),
        ("ibv_device_attr_ex", size_of::<DeviceAttrEx>()),
        ("ibv_odp_caps", size_of::<OdpCaps>()),
        ("ibv_port_attr", size_of::<PortAttr>()),
        ("ibv_gid_entry", size_of::<GidEntry>()),
        ("ibv_qp_init_attr", size_of::<QpInitAttr>()),
        ("ibv_qp_attr", size_of::<QpAttr>()),
        ("ibv_srq_init_attr", size_of::<SrqInitAttr>()),
        ("ibv_sge", size_of::<Sge>()),
        ("ibv_send_wr", size_of::<SendRequest>()),
        ("ibv_recv_wr", size_of::<RecvRequest>()),
        ("ibv_wc", size_of::<Completion>()),
        ("ibv_async_event", size_of::<AsyncEvent>()),
    ];
    // A libibverbs version adds fields in front.
    let whole = std::mem::offset_of!(VerbsContext, context);
    let before = |field: &str, offset: usize| {
        let expression = format!(
            "offsetof(struct verbs_context, context) - offsetof(struct verbs_context, {field})"
        );
        (expression, (whole - offset) as u64)
    };
    lines.push(before("advise_mr", std::mem::offset_of!(VerbsContext, advise_mr)));
    lines.push(before("query_device_ex", std::mem::offset_of!(VerbsContext, query_device_ex)));
    lines.push(before("sz", std::mem::offset_of!(VerbsContext, sz)));
    lines.extend(sizes.map(|(name, size)| (format!("sizeof(struct {name})"), size as u64)));
    lines
}
