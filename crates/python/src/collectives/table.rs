//! C table functions, as `python/weft/torch/shim/weft.h` declares and describes them.

use super::operations::{Operations, Segment};
use super::status::{Failure, Status, guarded, last_error};
use crate::fork;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::slice;
use std::time::Duration;
use weft_collectives::{Call, Collective, Element, Rank, Reduction, Scale};

/// Header version.
const ABI: u32 = 2;
const ANY_RANK: u32 = u32::MAX;

/// `weft_call`.
#[repr(C)]
struct CCall {
    kind: u32,
    element: u32,
    reduction: u32,
    scale: u32,
    factor: f64,
    root: u32,
    elements: u64,
    input: *const u8,
    output: *mut u8,
}

/// `weft_table`.
#[repr(C)]
struct Table {
    abi: u32,
    rank: u32,
    ranks: u32,
    start: unsafe extern "C" fn(*const Context, *const CCall, *mut u64) -> i32,
    run: unsafe extern "C" fn(*const Context, *const CCall, u64, *mut u64) -> i32,
    exchange: unsafe extern "C" fn(*const Context, *const Segment, *const Segment, *mut u64) -> i32,
    send: unsafe extern "C" fn(*const Context, u32, u64, *mut u8, u64, *mut u64) -> i32,
    receive: unsafe extern "C" fn(*const Context, u32, u64, *mut u8, u64, *mut u64) -> i32,
    is_done: unsafe extern "C" fn(*const Context, u64) -> i32,
    wait: unsafe extern "C" fn(*const Context, u64, u64, *mut u32) -> i32,
    last_error: unsafe extern "C" fn(*mut c_char, usize) -> usize,
    poison: unsafe extern "C" fn(*const Context, *const c_char),
    end_waits: unsafe extern "C" fn(*const Context),
    close: unsafe extern "C" fn(*const Context),
    release: unsafe extern "C" fn(*mut Context),
}

/// First argument to all functions, and the table itself.
pub struct Context {
    table: Table,
    operations: Operations,
}

/// Table and context addresses, which live until the function `release`.
pub fn lend(operations: Operations) -> (usize, usize) {
    let table = Table {
        abi: ABI,
        rank: operations.rank,
        ranks: operations.ranks,
        start,
        run,
        exchange,
        send,
        receive,
        is_done,
        wait,
        last_error: copy_last_error,
        poison,
        end_waits,
        close,
        release,
    };
    let context = Box::into_raw(Box::new(Context { table, operations }));
    // SAFETY: just allocated; a field's address, without a reference.
    let table = unsafe { &raw const (*context).table };
    (table as usize, context as usize)
}

/// # Safety
/// A live context, and a call whose memory is valid as `weft.h` requires.
unsafe extern "C" fn start(context: *const Context, call: *const CCall, id: *mut u64) -> i32 {
    guarded(|| {
        // SAFETY: by this function's contract.
        let (context, call) = unsafe { (&*context, &*call) };
        let call = to_call(call)?;
        // SAFETY: the caller keeps the memory valid until the operation is done or the group closed.
        let started = unsafe { context.operations.start(&call) }?;
        // SAFETY: valid for a write, by this function's contract.
        unsafe { *id = started };
        Ok(())
    })
}

/// # Safety
/// Same as [`start`].
unsafe extern "C" fn run(
    context: *const Context,
    call: *const CCall,
    timeout_ns: u64,
    id: *mut u64,
) -> i32 {
    let mut left = None;
    let status = guarded(|| {
        // SAFETY: by this function's contract.
        let (context, call) = unsafe { (&*context, &*call) };
        let call = to_call(call)?;
        // SAFETY: the caller keeps the memory valid until the operation is done or the group closed.
        left = unsafe { context.operations.run(&call, Duration::from_nanos(timeout_ns)) }?;
        Ok(())
    });
    // SAFETY: valid for a write, by this function's contract.
    unsafe { *id = left.unwrap_or(0) };
    if left.is_some() { Status::Timeout as i32 } else { status }
}

/// # Safety
/// A live context, and lists with one segment for each rank, valid as `weft.h` requires.
unsafe extern "C" fn exchange(
    context: *const Context,
    sends: *const Segment,
    receives: *const Segment,
    id: *mut u64,
) -> i32 {
    guarded(|| {
        // SAFETY: by this function's contract.
        let operations = unsafe { &(*context).operations };
        let ranks = operations.ranks as usize;
        // SAFETY: by this function's contract.
        let (sends, receives) = unsafe {
            (slice::from_raw_parts(sends, ranks), slice::from_raw_parts(receives, ranks))
        };
        // SAFETY: the caller keeps the memory valid until the operation is done or the group closed.
        let started = unsafe { operations.exchange(sends, receives) }?;
        // SAFETY: valid for a write, by this function's contract.
        unsafe { *id = started };
        Ok(())
    })
}

/// # Safety
/// A live context, and memory that is valid as `weft.h` requires.
unsafe extern "C" fn send(
    context: *const Context,
    peer: u32,
    tag: u64,
    data: *mut u8,
    bytes: u64,
    id: *mut u64,
) -> i32 {
    guarded(|| {
        // SAFETY: by this function's contract.
        let operations = unsafe { &(*context).operations };
        // SAFETY: the caller keeps the memory valid until the operation is done or the group closed.
        let started = unsafe { operations.send(peer, tag, Segment { data, bytes }) }?;
        // SAFETY: valid for a write, by this function's contract.
        unsafe { *id = started };
        Ok(())
    })
}

/// # Safety
/// A live context, and memory that is valid as `weft.h` requires.
unsafe extern "C" fn receive(
    context: *const Context,
    peer: u32,
    tag: u64,
    data: *mut u8,
    bytes: u64,
    id: *mut u64,
) -> i32 {
    guarded(|| {
        let from = (peer != ANY_RANK).then_some(peer);
        // SAFETY: by this function's contract.
        let operations = unsafe { &(*context).operations };
        // SAFETY: the caller keeps the memory valid until the operation is done or the group closed.
        let started = unsafe { operations.receive(from, tag, Segment { data, bytes }) }?;
        // SAFETY: valid for a write, by this function's contract.
        unsafe { *id = started };
        Ok(())
    })
}

/// # Safety
/// A live context.
unsafe extern "C" fn is_done(context: *const Context, id: u64) -> i32 {
    let mut done = false;
    guarded(|| {
        // SAFETY: by this function's contract.
        done = unsafe { &(*context).operations }.is_done(id)?;
        Ok(())
    });
    done.into()
}

/// # Safety
/// A live context; `from` is valid for a write.
unsafe extern "C" fn wait(
    context: *const Context,
    id: u64,
    timeout_ns: u64,
    from: *mut u32,
) -> i32 {
    guarded(|| {
        // SAFETY: by this function's contract.
        let operations = unsafe { &(*context).operations };
        if let Some(sender) = operations.wait(id, Duration::from_nanos(timeout_ns))? {
            // SAFETY: by this function's contract.
            unsafe { *from = sender };
        }
        Ok(())
    })
}

/// # Safety
/// `text` is valid for `capacity` bytes.
unsafe extern "C" fn copy_last_error(text: *mut c_char, capacity: usize) -> usize {
    last_error(|last| {
        let Some(most) = capacity.checked_sub(1) else { return 0 };
        let length = (0..=last.len().min(most)).rev().find(|&at| last.is_char_boundary(at));
        let length = length.unwrap_or(0);
        // SAFETY: `length` + 1 is at most the capacity.
        unsafe {
            ptr::copy_nonoverlapping(last.as_ptr(), text.cast(), length);
            *text.add(length) = 0;
        }
        length
    })
}

/// # Safety
/// A live context, and a string that ends with zero.
unsafe extern "C" fn poison(context: *const Context, text: *const c_char) {
    quietly(|| {
        // SAFETY: by this function's contract.
        let (operations, text) = unsafe { (&(*context).operations, CStr::from_ptr(text)) };
        operations.poison(text.to_string_lossy().into_owned());
    });
}

/// # Safety
/// A live context.
unsafe extern "C" fn end_waits(context: *const Context) {
    // SAFETY: by this function's contract.
    quietly(|| unsafe { &(*context).operations }.end_waits());
}

/// # Safety
/// A live context.
unsafe extern "C" fn close(context: *const Context) {
    // SAFETY: by this function's contract.
    quietly(|| unsafe { &(*context).operations }.close());
}

/// # Safety
/// A live context, which no thread uses during the call and after it.
unsafe extern "C" fn release(context: *mut Context) {
    if !fork::is_child() {
        // SAFETY: `lend` allocated it, and this is its last use.
        quietly(|| drop(unsafe { Box::from_raw(context) }));
    }
}

/// Runs a function that returns no error; a panic ends here.
fn quietly(work: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(work));
}

fn to_call(call: &CCall) -> Result<Call, Failure> {
    let invalid = |what: &str, value: u32| {
        Failure::invalid(format!("{what} {value}: expected one of weft.h"))
    };
    let collective = match call.kind {
        0 => Collective::AllReduce,
        1 => Collective::ReduceScatter,
        2 => Collective::AllGather,
        3 => Collective::Broadcast { root: Rank(call.root) },
        4 => Collective::AllToAll,
        other => return Err(invalid("collective", other)),
    };
    Ok(Call {
        collective,
        element: *ELEMENTS
            .get(call.element as usize)
            .ok_or_else(|| invalid("element", call.element))?,
        reduction: *REDUCTIONS
            .get(call.reduction as usize)
            .ok_or_else(|| invalid("reduction", call.reduction))?,
        scale: match call.scale {
            0 => Scale::None,
            1 => Scale::Average,
            2 => Scale::Before(call.factor),
            other => return Err(invalid("scale", other)),
        },
        elements: call.elements,
        input: call.input,
        output: call.output,
        algorithm: None,
    })
}

/// `enum weft_element`.
const ELEMENTS: [Element; 10] = [
    Element::U8,
    Element::I8,
    Element::I16,
    Element::I32,
    Element::I64,
    Element::F16,
    Element::Bf16,
    Element::F32,
    Element::F64,
    Element::Bool,
];

/// `enum weft_reduction`.
const REDUCTIONS: [Reduction; 7] = [
    Reduction::Sum,
    Reduction::Product,
    Reduction::Min,
    Reduction::Max,
    Reduction::And,
    Reduction::Or,
    Reduction::Xor,
];
