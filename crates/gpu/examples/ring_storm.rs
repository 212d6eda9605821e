//! Check that 16-byte stores to pinned memory arrive whole: kernels push commands whose words all depend on one number,
//! and the host compares each word, while copies cross PCIe in both directions.
//!
//!     cargo run --release -p weft-gpu --example ring_storm -- [COMMANDS] [--cpu]
//!
//! Prints one JSON line for each GPU. `torn` counts commands with words from different numbers; `count` and the sum of
//! all numbers show that each command came exactly once. With `--cpu` threads on the CPU push, which tests this program.
//! Exit status 1 if a command was torn or lost.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use weft_cuda::{
    Context, Device, DeviceMemory, Module, PinnedMemory, Start, Stream, copy_async, driver,
    set_bytes_async,
};
use weft_gpu::jit::{self, Cache, CompileRequest};
use weft_gpu::proxy::{CommandFields, MappedRing, RingReader, RingWriter, SLOT_WORDS};
use weft_gpu::table::Table;

const SLOTS: usize = 1024;
/// Warps that push, in blocks with eight.
const WARPS: u64 = 512;
/// Threads that push with `--cpu`.
const THREADS: u64 = 4;
/// Bytes for each copy beside the commands.
const COPY: usize = 1 << 20;
/// Time without a command until the program gives up.
const PATIENCE: Duration = Duration::from_secs(10);

const SOURCE: &str = r#"
#include "weft/proxy.cuh"

using namespace weft;

struct Storm { u64 table, each; };

__device__ u64 mix(u64 x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

extern "C" __global__ void storm(const Storm storm) {
    Table *table = reinterpret_cast<Table *>(storm.table);
    const Watch watch{table, reinterpret_cast<Record *>(table->record), reinterpret_cast<const u32 *>(table->abort), 0, 0, 64};
    const u64 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    for (u64 number = warp * storm.each; number < (warp + 1) * storm.each; ++number) {
        const u64 a = mix(number * 4), b = mix(number * 4 + 1), c = mix(number * 4 + 2), d = mix(number * 4 + 3);
        Command command;
        command.head = static_cast<u32>(number);
        command.length = a, command.source = b, command.destination = c;
        command.source_window = d & 0xffff, command.destination_window = d >> 16 & 0xffff, command.word = d >> 32;
        command.count = a ^ b, command.list = b ^ c;
        if (!push(watch, command)) return;
    }
}
"#;

/// Kernel argument.
#[repr(C)]
struct Storm {
    table: u64,
    each: u64,
}

fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Number in a command.
fn number_of(fields: &CommandFields) -> u32 {
    u32::from(fields.kind) | u32::from(fields.flags) << 8 | u32::from(fields.peer) << 16
}

/// Command with this number.
fn command(number: u64) -> CommandFields {
    let [a, b, c, d] = [0, 1, 2, 3].map(|part| mix(number * 4 + part));
    CommandFields {
        kind: number as u8,
        flags: (number >> 8) as u8,
        peer: (number >> 16) as u16,
        length: a,
        source_window: d as u16,
        destination_window: (d >> 16) as u16,
        word: (d >> 32) as u32,
        reserved: 0,
        source_offset: b,
        count: (a ^ b) as u32,
        destination_offset: c,
        list: (b ^ c) as u32,
    }
}

/// The reader's result.
#[derive(Default)]
struct Found {
    count: u64,
    torn: u64,
    sum: u64,
    seconds: f64,
}

/// Takes `commands` commands, or fewer after 10 s without one.
fn read(ring: MappedRing<'_>, commands: u64) -> Found {
    let (mut reader, mut found) = (RingReader::new(ring), Found::default());
    let begin = Instant::now();
    let mut last = begin;
    while found.count < commands {
        let taken = reader.take(|_, fields| {
            let number = number_of(fields);
            (number, *fields == command(number.into()))
        });
        match taken {
            Ok(Some((number, is_whole))) => {
                found.count += 1;
                found.sum += u64::from(number);
                found.torn += u64::from(!is_whole);
                if found.count.is_multiple_of(1024) {
                    last = Instant::now();
                }
            }
            Ok(None) if last.elapsed() > PATIENCE => break,
            Ok(None) => std::hint::spin_loop(),
            Err(error) => {
                eprintln!("{error}");
                break;
            }
        }
    }
    found.seconds = begin.elapsed().as_secs_f64();
    found
}

/// Prints a line; true if each command came once and whole.
fn report(place: &str, commands: u64, copied: u64, found: &Found) -> bool {
    let sum = commands * (commands - 1) / 2;
    let is_right = found.torn == 0 && found.count == commands && found.sum == sum;
    println!(
        "{{\"check\": \"ring storm\", \"ok\": {is_right}, \"place\": \"{place}\", \"commands\": {commands}, \
         \"count\": {}, \"torn\": {}, \"sum_is_right\": {}, \"slots\": {SLOTS}, \"copied_bytes\": {copied}, \
         \"seconds\": {:.3}}}",
        found.count,
        found.torn,
        found.sum == sum,
        found.seconds,
    );
    is_right
}

/// Threads on the CPU push.
fn on_cpu(commands: u64) -> bool {
    let slots: Vec<[AtomicU32; SLOT_WORDS]> =
        (0..SLOTS).map(|_| [const { AtomicU32::new(0) }; SLOT_WORDS]).collect();
    let (released, ticket) = (AtomicU64::new(0), AtomicU64::new(0));
    let ring = MappedRing { slots: &slots, released: &released };
    let found = std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let ticket = &ticket;
            scope.spawn(move || {
                let (writer, each) = (RingWriter::new(ring), commands / THREADS);
                for number in thread * each..(thread + 1) * each {
                    let own = ticket.fetch_add(1, Ordering::Relaxed);
                    while !writer.push(own, &command(number)) {
                        std::thread::yield_now();
                    }
                }
            });
        }
        read(ring, commands)
    });
    report("cpu", commands, 0, &found)
}

/// Kernels push, and copies run beside them.
fn on_gpu(device: Device, commands: u64) -> weft_gpu::Result<bool> {
    let context = Context::primary(device)?;
    let files = [("storm.cu", SOURCE)];
    let arch = jit::architecture(device.compute_capability());
    let compiled = jit::cubin(&CompileRequest::kernel("storm.cu", &files, &arch), &Cache::none())?;
    let storm = Module::load(&context, &compiled.cubin)?.function("storm")?;
    let kernels = Stream::create(&context)?;

    let slot_bytes = SLOTS * SLOT_WORDS * 4;
    let host = PinnedMemory::alloc(&context, slot_bytes + 4096)?;
    // SAFETY: the allocation has these bytes, and nothing else accesses them yet.
    unsafe { std::ptr::write_bytes(host.host(), 0, host.len()) };
    let base = host.device_address();
    let [released, abort, record] = [0, 64, 128].map(|at| base + slot_bytes as u64 + at);
    // SAFETY: a table consists of integers.
    let mut table: Table = unsafe { std::mem::zeroed() };
    table.limit_ns = 60_000_000_000;
    (table.record, table.abort) = (record, abort);
    (table.ring, table.slots, table.released) = (base, SLOTS as u32, released);
    let staging = PinnedMemory::alloc(&context, size_of::<Table>())?;
    // SAFETY: the allocation begins at a page and has a table's bytes.
    unsafe { staging.host().cast::<Table>().write(table) };
    let placed = DeviceMemory::alloc(&context, size_of::<Table>())?;
    {
        let _bound = context.enter()?;
        let (to, from) = (placed.address(), staging.device_address());
        copy_async(to, from, size_of::<Table>(), kernels.stream())?;
    }
    kernels.synchronize()?;

    // SAFETY: pinned memory that lives until the kernel has ended, accessed by atomics only.
    let ring = unsafe {
        MappedRing {
            slots: std::slice::from_raw_parts(host.host().cast(), SLOTS),
            released: &*host.host().add(slot_bytes).cast::<AtomicU64>(),
        }
    };
    let storming = Storm { table: placed.address(), each: commands / WARPS };
    let (stop, copied) = (AtomicBool::new(false), AtomicU64::new(0));
    let found = std::thread::scope(|scope| -> weft_gpu::Result<Found> {
        let copies = scope.spawn(|| copy_until(&context, &stop, &copied));
        // SAFETY: the kernel's argument is a `Storm`; its table lives until the stream is synchronised.
        let launched = unsafe {
            let argument = (&raw const storming).cast();
            storm.launch(
                [WARPS as u32 / 8, 256, 0],
                Start::AfterPrevious,
                kernels.stream(),
                argument,
            )
        };
        let found = launched.is_ok().then(|| read(ring, commands));
        stop.store(true, Ordering::Relaxed);
        copies.join().expect("the copying thread ends")?;
        launched?;
        kernels.synchronize()?;
        Ok(found.unwrap_or_default())
    })?;
    Ok(report(&device.to_string(), commands, copied.load(Ordering::Relaxed), &found))
}

/// Copies in both directions until it is told to stop.
fn copy_until(
    context: &Arc<Context>,
    stop: &AtomicBool,
    copied: &AtomicU64,
) -> weft_gpu::Result<()> {
    let host = PinnedMemory::alloc(context, 2 * COPY)?;
    let gpu = DeviceMemory::alloc(context, 2 * COPY)?;
    let streams = [Stream::create(context)?, Stream::create(context)?];
    let _bound = context.enter()?;
    set_bytes_async(gpu.address(), 1, 2 * COPY, streams[0].stream())?;
    while !stop.load(Ordering::Relaxed) {
        copy_async(gpu.address(), host.device_address(), COPY, streams[0].stream())?;
        let there = host.device_address() + COPY as u64;
        copy_async(there, gpu.address() + COPY as u64, COPY, streams[1].stream())?;
        streams.iter().try_for_each(|stream| stream.synchronize())?;
        copied.fetch_add(2 * COPY as u64, Ordering::Relaxed);
    }
    Ok(())
}

/// All GPUs, one after the other.
fn on_gpus(commands: u64) -> weft_gpu::Result<bool> {
    let driver = driver()?;
    (0..driver.device_count()?)
        .try_fold(true, |all, device| Ok(on_gpu(driver.device(device)?, commands)? && all))
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let wanted = arguments.iter().find_map(|argument| argument.parse::<u64>().ok());
    // Numbers have 32 bits.
    let commands = wanted.unwrap_or(10_000_000).clamp(WARPS, 1 << 32) / WARPS * WARPS;
    let on_cpu = arguments.iter().any(|argument| argument == "--cpu").then(|| on_cpu(commands));
    match on_cpu.map_or_else(|| on_gpus(commands), Ok) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
