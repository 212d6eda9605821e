//! A rank with a running proxy, and kernels on the CPU that push into its ring.
#![allow(dead_code)] // Each test uses only some items.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use weft_fabric::{
    Communicator, CounterConfig, CounterId, Rank, Region, RemoteRegion, Time, clock,
};
use weft_gpu::proxy::{
    Command, CommandFields, MappedRing, Place, Proxy, ProxyConfig, ProxyOptions, RingWriter,
    SLOT_WORDS, Target, Template, TemplateMember, Window, WordConfig,
};
use weft_gpu::table::Table;
use weft_gpu::{Domain, Error, MemoryLocation};

pub const PATIENCE: Duration = Duration::from_secs(60);
pub const BYTES: u64 = 1 << 16;
/// A word that kernels hold, and one that they do not.
pub const HELD: u32 = 0;
pub const FREE: u32 = 1;
/// Members in the template, all at the next rank, and the longest put to each.
pub const MEMBERS: u64 = 5;
pub const MEMBER_BYTES: u64 = 4096;

/// A rank with a running proxy and a window for sources, one for destinations.
pub struct Station {
    pub communicator: Arc<Communicator>,
    pub domain: Arc<Domain>,
    pub proxy: Proxy,
    pub outbox: Region,
    pub inbox: Region,
    pub counter: CounterId,
}

/// Kernel on the CPU, which knows only the table.
pub struct Kernel {
    pub table: *const Table,
}

// SAFETY: the table and all that it leads to is accessed by atomics only, apart from fields that do not change.
unsafe impl Sync for Kernel {}

impl Kernel {
    pub fn fields(&self) -> Table {
        // SAFETY: the domain's table, which outlives the kernel; the ticket in the copy is not used.
        unsafe { self.table.read_volatile() }
    }

    pub fn atomic(address: u64) -> &'static AtomicU32 {
        let word = std::ptr::with_exposed_provenance_mut::<u32>(address as usize);
        // SAFETY: a word in the proxy's memory, which outlives the kernels, accessed by atomics only.
        unsafe { AtomicU32::from_ptr(word) }
    }

    pub fn count(address: u64) -> &'static AtomicU64 {
        let count = std::ptr::with_exposed_provenance_mut::<u64>(address as usize);
        // SAFETY: a count in the proxy's memory or in the table, both of which outlive the kernels.
        unsafe { AtomicU64::from_ptr(count) }
    }

    pub fn ticket(&self) -> &'static AtomicU64 {
        Kernel::count(self.table as u64 + std::mem::offset_of!(Table, ticket) as u64)
    }

    pub fn ring(&self) -> MappedRing<'static> {
        let fields = self.fields();
        let first =
            std::ptr::with_exposed_provenance::<[AtomicU32; SLOT_WORDS]>(fields.ring as usize);
        // SAFETY: the proxy's slots, which outlive the kernels and are accessed by atomics only.
        let slots = unsafe { std::slice::from_raw_parts(first, fields.slots as usize) };
        MappedRing { slots, released: Kernel::count(fields.released) }
    }

    pub fn push(&self, command: Command) {
        self.push_fields(&command.fields());
    }

    pub fn push_fields(&self, fields: &CommandFields) {
        let ticket = self.ticket().fetch_add(1, Ordering::Relaxed);
        let writer = RingWriter::new(self.ring());
        let begin = clock::now();
        while !writer.push(ticket, fields) {
            assert!(clock::now().since(begin) < PATIENCE, "no room for ticket {ticket}");
            std::thread::yield_now();
        }
    }

    pub fn word(&self, source: u32, word: u32) -> u32 {
        let fields = self.fields();
        let position = u64::from(source * fields.words_each + word);
        Kernel::atomic(fields.words + 4 * position).load(Ordering::Acquire)
    }

    pub fn wait(&self, source: u32, word: u32, rounds: u32) {
        let begin = clock::now();
        while self.word(source, word) < rounds {
            assert!(clock::now().since(begin) < PATIENCE, "word {word} from {source}: {rounds}");
            std::thread::yield_now();
        }
    }
}

impl Station {
    pub fn new(communicator: Communicator, options: ProxyOptions) -> Station {
        let communicator = Arc::new(communicator);
        let outbox = communicator.engine().alloc(BYTES as usize).unwrap();
        let inbox = communicator.engine().alloc(BYTES as usize).unwrap();
        let shape = CounterConfig { window: 16, ..CounterConfig::default() };
        let counters = [HELD, FREE].map(|_| communicator.engine().counter_with(shape).unwrap());
        let shared = communicator.share(&[(&inbox, 0..BYTES)], &counters, soon()).unwrap();
        let theirs: Vec<Option<RemoteRegion>> =
            shared.iter().map(|regions| regions.first().copied()).collect();
        let next = Rank((communicator.rank().0 + 1) % communicator.world_size());
        let config = ProxyConfig {
            words: vec![
                WordConfig { counter: counters[0], hold: true },
                WordConfig { counter: counters[1], hold: false },
            ],
            windows: vec![Window { source: Some((outbox.key(), BYTES)), destinations: theirs }],
            templates: vec![template(next)],
            list_lengths: MEMBERS as u32,
            max_put_bytes: BYTES,
            ..ProxyConfig::default()
        };
        let domain = Domain::local_group(&[MemoryLocation::Twin]).unwrap().remove(0);
        let proxy = Proxy::start(domain.clone(), communicator.clone(), config, options).unwrap();
        let station = Station { communicator, domain, proxy, outbox, inbox, counter: counters[1] };
        station.meet();
        station
    }

    pub fn kernel(&self) -> Kernel {
        Kernel { table: std::ptr::with_exposed_provenance(self.domain.table() as usize) }
    }

    pub fn peer(&self) -> Rank {
        Rank(1 - self.communicator.rank().0)
    }

    pub fn put(&self, word: u32, at: u64, length: u64) -> Command {
        self.put_to(self.peer(), word, (at, at), length)
    }

    /// `at`: offsets in the source and the destination.
    pub fn put_to(&self, peer: Rank, word: u32, at: (u64, u64), length: u64) -> Command {
        let [source, destination] = [at.0, at.1].map(|offset| Place { window: 0, offset });
        let target = Target { word, hold: word == HELD };
        Command::Put { peer, target, source, destination, length }
    }

    /// Word in a window.
    pub fn at(region: &Region, at: u64) -> &'static AtomicU32 {
        Kernel::atomic(region.memory().address() + at)
    }

    pub fn close(&self) {
        self.proxy.drain(soon(), &mut || false).unwrap();
        self.meet();
        self.proxy.stop().unwrap();
    }

    /// Waits until kernels' waits end, which is set behind the error.
    pub fn wait_for_abort(&self) {
        let begin = clock::now();
        while !self.domain.failures().watch().is_aborted() {
            assert!(clock::now().since(begin) < PATIENCE, "kernels wait on");
            std::thread::yield_now();
        }
    }

    pub fn meet(&self) {
        let communicator = &self.communicator;
        communicator.barrier(&mut communicator.wait_options(soon(), &mut || false)).unwrap();
    }
}

/// Members side by side.
fn template(peer: Rank) -> Template {
    let member =
        |offset| TemplateMember { peer, source_offset: offset, destination_offset: offset };
    Template { members: (0..MEMBERS).map(|member| member * MEMBER_BYTES).map(member).collect() }
}

pub fn soon() -> Time {
    clock::now().after(PATIENCE)
}

/// The error by which a proxy ends.
pub fn failure(station: &Station) -> Error {
    let begin = clock::now();
    loop {
        if let Err(error) = station.proxy.check() {
            return error;
        }
        assert!(clock::now().since(begin) < PATIENCE, "no error");
        std::thread::yield_now();
    }
}
