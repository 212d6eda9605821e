//! Twin calls: the table with all calls, and the calls on devices.

use super::super::library::{Library, RawDevice};
use super::super::sys;
use super::data_path::DATA_PATH;
use super::errors::{event_text, set_error, status_text};
use super::network::network;
use super::nic_info::{NicInfo, opened};
use super::objects::{
    ack_cq_events, advise_mr, alloc_pd, create_comp_channel, create_cq, create_qp, create_srq,
    dealloc_pd, dereg_mr, destroy_comp_channel, destroy_cq, destroy_qp, destroy_srq, get_cq_event,
    modify_qp, reg_dmabuf_mr, reg_mr_iova2,
};
use super::queues::{OpenContext, clear, close, new_descriptor};
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::{Arc, LazyLock};

pub fn library() -> &'static Library {
    static LIBRARY: LazyLock<Library> = LazyLock::new(|| Library {
        get_device_list,
        free_device_list,
        get_device_name,
        open_device,
        close_device,
        query_device,
        query_port,
        query_gid_ex,
        get_async_event,
        ack_async_event,
        alloc_pd,
        dealloc_pd,
        reg_mr_iova2,
        reg_dmabuf_mr: Some(reg_dmabuf_mr),
        dereg_mr,
        create_comp_channel,
        destroy_comp_channel,
        create_cq,
        destroy_cq,
        get_cq_event,
        ack_cq_events,
        create_srq,
        destroy_srq,
        create_qp,
        modify_qp,
        destroy_qp,
        wc_status_str,
        event_type_str,
        copies_at_fork: false,
        path: PathBuf::from("twin"),
    });
    &LIBRARY
}

// Handles are boxes that hold the library's structures, with object numbers in the network. Every
// function is called with live handles from this twin, as libibverbs demands.

/// NIC list, ended by null.
unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut RawDevice {
    let network = network();
    let listed = network.nics.values().filter(|nic| nic.is_listed);
    let mut list: Vec<RawDevice> =
        listed.map(|nic| Arc::into_raw(nic.info.clone()).cast_mut().cast()).collect();
    // SAFETY: the caller gave a place for the number.
    unsafe { *count = list.len() as c_int };
    list.push(null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

unsafe extern "C" fn free_device_list(list: *mut RawDevice) {
    let mut length = 0;
    // SAFETY: a list made above, which is freed once.
    unsafe {
        while !(*list.add(length)).is_null() {
            drop(Arc::from_raw((*list.add(length)).cast::<NicInfo>()));
            length += 1;
        }
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, length + 1)));
    }
}

unsafe extern "C" fn get_device_name(device: RawDevice) -> *const c_char {
    // SAFETY: a device from a list.
    unsafe { (*device.cast::<NicInfo>()).name.as_ptr() }
}

unsafe extern "C" fn open_device(device: RawDevice) -> *mut sys::Context {
    let mut network = network();
    let number = network.issue();
    let descriptor = new_descriptor();
    let info = device.cast::<NicInfo>().cast_const();
    // SAFETY: a device from a list; the context keeps it.
    let nic = unsafe {
        Arc::increment_strong_count(info);
        (*info).number
    };
    network.contexts.insert(number, OpenContext { nic, descriptor, events: VecDeque::new() });
    let calls = (query_device_ex as sys::QueryDeviceEx, advise_mr as sys::AdviseMr);
    let descriptors = (number as c_int, descriptor);
    let whole =
        Box::into_raw(Box::new(sys::VerbsContext::of(device, DATA_PATH, calls, descriptors)));
    // SAFETY: the whole was just made.
    unsafe { &raw mut (*whole).context }
}

unsafe extern "C" fn close_device(context: *mut sys::Context) -> c_int {
    let mut network = network();
    // SAFETY: a context made above, which is closed once.
    let (context, info) = unsafe {
        let whole = Box::from_raw(sys::VerbsContext::around(context));
        let info = Arc::from_raw(whole.context.device.cast::<NicInfo>().cast_const());
        (whole.context, info)
    };
    close(context.async_fd);
    network.contexts.remove(&(context.cmd_fd as u32));
    let is_open = network.contexts.values().any(|context| context.nic == info.number);
    if !is_open && network.nics.get(&info.number).is_some_and(|nic| !nic.is_listed) {
        network.nics.remove(&info.number);
    }
    0
}

unsafe extern "C" fn query_device(context: *mut sys::Context, to: *mut sys::DeviceAttr) -> c_int {
    // SAFETY: a live context, and a place for the attributes, which are numbers.
    unsafe {
        let config = &opened(context).0.config;
        let mut found: sys::DeviceAttr = std::mem::zeroed();
        found.fw_ver[..4].copy_from_slice(b"twin");
        found.max_cqe = config.max_cqe;
        found.max_qp_wr = config.max_qp_wr;
        (found.max_srq, found.max_srq_wr) = (i32::from(u16::MAX), config.max_srq_wr);
        (found.max_sge, found.max_srq_sge) = (4, 4);
        found.phys_port_cnt = config.ports.len() as u8;
        to.write(found);
    }
    0
}

unsafe extern "C" fn query_device_ex(
    context: *mut sys::Context,
    _input: *const c_void,
    to: *mut sys::DeviceAttrEx,
    _size: usize,
) -> c_int {
    // SAFETY: a live context, and a place for the attributes, which are numbers.
    unsafe {
        let mut found: sys::DeviceAttrEx = std::mem::zeroed();
        if opened(context).0.config.on_demand_paging {
            let (general_caps, rc_odp_caps) = (sys::IBV_ODP_SUPPORT, sys::IBV_ODP_SUPPORT_WRITE);
            found.odp_caps = sys::OdpCaps { general_caps, rc_odp_caps, ..sys::OdpCaps::default() };
        }
        let result = query_device(context, &mut found.orig_attr);
        to.write(found);
        result
    }
}

unsafe extern "C" fn query_port(
    context: *mut sys::Context,
    port: u8,
    to: *mut sys::PortAttr,
) -> c_int {
    // SAFETY: a live context.
    let (nic, _) = unsafe { opened(context) };
    let Some(found) = nic.config.ports.get(usize::from(port.wrapping_sub(1))) else {
        return libc::EINVAL;
    };
    let attributes = sys::PortAttr {
        state: if found.is_active { sys::IBV_PORT_ACTIVE } else { 1 },
        max_mtu: 5,
        active_mtu: 3,
        gid_tbl_len: 8,
        max_msg_sz: nic.config.max_message,
        lid: nic.lid(port),
        link_layer: if found.is_ethernet {
            sys::IBV_LINK_LAYER_ETHERNET
        } else {
            sys::IBV_LINK_LAYER_INFINIBAND
        },
        ..sys::PortAttr::default()
    };
    // SAFETY: a place for the attributes.
    unsafe { to.write(attributes) };
    0
}

unsafe extern "C" fn query_gid_ex(
    context: *mut sys::Context,
    port: u32,
    index: u32,
    to: *mut sys::GidEntry,
    _flags: u32,
    _size: usize,
) -> c_int {
    // SAFETY: a live context.
    let (nic, _) = unsafe { opened(context) };
    let Some(&(gid, gid_type)) = nic.gids(port as u8).get(index as usize) else {
        return libc::ENODATA;
    };
    let entry = sys::GidEntry { gid, gid_index: index, port_num: port, gid_type, ndev_ifindex: 0 };
    // SAFETY: a place for the entry.
    unsafe { to.write(entry) };
    0
}

unsafe extern "C" fn get_async_event(
    context: *mut sys::Context,
    to: *mut sys::AsyncEvent,
) -> c_int {
    // SAFETY: a live context.
    let (_, number) = unsafe { opened(context) };
    let mut network = network();
    let Some(context) = network.contexts.get_mut(&number) else { return -1 };
    let Some((event_type, element)) = context.events.pop_front() else {
        set_error(libc::EAGAIN);
        return -1;
    };
    if context.events.is_empty() {
        clear(context.descriptor);
    }
    let element = std::ptr::with_exposed_provenance_mut::<c_void>(element);
    // SAFETY: a place for the event.
    unsafe { to.write(sys::AsyncEvent { element, event_type }) };
    0
}

unsafe extern "C" fn ack_async_event(_event: *mut sys::AsyncEvent) {}

unsafe extern "C" fn wc_status_str(status: c_uint) -> *const c_char {
    status_text(status).as_ptr()
}

unsafe extern "C" fn event_type_str(kind: c_uint) -> *const c_char {
    event_text(kind).as_ptr()
}
