//! Links, paths, and the list with moving flows on each link.

use crate::error::{Error, Result};
use crate::types::{Link, LinkId, LinkUsage, NONE, PathId};

/// Link state, one cache line: each flow that starts or ends touches most fields.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct LinkState {
    pub(crate) bandwidth: f64,
    busy_since: f64,
    busy: f64,
    bytes: f64,
    /// Moving flow count.
    pub(crate) flows: u32,
    most_flows: u32,
    /// Head of the hop list.
    head: u32,
    /// Last solver round that added this link's rivals.
    pub(crate) seen: u32,
    /// Index among the links in the solver's attempt, if that entry names this link.
    pub(crate) place: u32,
    /// True if a flow has left it at this instant.
    pub(crate) touched: bool,
}

/// A flow on one link: node in the doubly linked list with that link's flows.
#[derive(Clone, Copy, Debug)]
struct Hop {
    previous: u32,
    next: u32,
}

/// Rate for a flow that shares no link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UncontendedRate {
    /// Minimum link bandwidth in bytes/s, and the link that has it.
    pub(crate) rate: f64,
    pub(crate) bottleneck: u32,
    /// True if a link already had a flow.
    pub(crate) contended: bool,
}

/// Links with flow lists. Hop `h` in flow `f` has the number `f << shift | h`.
#[derive(Clone, Debug)]
pub(crate) struct Links {
    pub(crate) state: Vec<LinkState>,
    latency: Vec<f64>,
    hops: Vec<Hop>,
    shift: u32,
}

impl Links {
    pub(crate) fn new(links: &[Link]) -> Result<Links> {
        if links.len() >= NONE as usize {
            return Err(Error::TooMany { what: "links", most: u64::from(NONE) });
        }
        for (number, link) in (0..).zip(links) {
            let id = LinkId(number);
            if !(link.bandwidth.is_finite() && link.bandwidth > 0.0) {
                return Err(Error::Bandwidth { link: id, bandwidth: link.bandwidth });
            }
            if !(link.latency.is_finite() && link.latency >= 0.0) {
                return Err(Error::Latency { link: id, latency: link.latency });
            }
        }
        let state = |link: &Link| LinkState {
            bandwidth: link.bandwidth,
            busy_since: 0.0,
            busy: 0.0,
            bytes: 0.0,
            flows: 0,
            most_flows: 0,
            head: NONE,
            seen: 0,
            place: 0,
            touched: false,
        };
        Ok(Links {
            state: links.iter().map(state).collect(),
            latency: links.iter().map(|link| link.latency).collect(),
            hops: Vec::new(),
            shift: 0,
        })
    }

    pub(crate) fn check(&self, link: LinkId) -> Result<usize> {
        if (link.0 as usize) < self.state.len() {
            return Ok(link.0 as usize);
        }
        Err(Error::UnknownLink { link, links: self.state.len() as u32 })
    }

    /// Maximum flow count, given the longest path.
    pub(crate) fn most_flows(&self) -> u64 {
        u64::from(NONE >> self.shift)
    }

    /// Adds a flow to the links on the path.
    #[inline]
    pub(crate) fn join(&mut self, flow: u32, path: &[u32], now: f64) -> UncontendedRate {
        let mut joined =
            UncontendedRate { rate: f64::INFINITY, bottleneck: NONE, contended: false };
        let first = (flow << self.shift) as usize;
        if first + path.len() > self.hops.len() {
            let flows = (flow as usize + 1).next_power_of_two();
            self.hops.resize(flows << self.shift, Hop { previous: NONE, next: NONE });
        }
        let (state, hops) = (&mut self.state[..], &mut self.hops[..]);
        for (hop, &number) in (first..).zip(path) {
            let link = &mut state[number as usize];
            if link.bandwidth < joined.rate {
                (joined.rate, joined.bottleneck) = (link.bandwidth, number);
            }
            link.flows += 1;
            link.most_flows = link.most_flows.max(link.flows);
            let next = std::mem::replace(&mut link.head, hop as u32);
            hops[hop] = Hop { previous: NONE, next };
            if next == NONE {
                link.busy_since = now;
            } else {
                joined.contended = true;
                hops[next as usize].previous = hop as u32;
            }
        }
        joined
    }

    /// Removes a flow from the links on its path and counts its `bytes`. Links with remaining flows are added to
    /// `touched`.
    #[inline]
    pub(crate) fn leave(
        &mut self,
        flow: u32,
        path: &[u32],
        now: f64,
        bytes: f64,
        touched: &mut Vec<u32>,
    ) {
        let first = (flow << self.shift) as usize;
        let (state, hops) = (&mut self.state[..], &mut self.hops[..]);
        for (hop, &number) in (first..).zip(path) {
            let link = &mut state[number as usize];
            link.bytes += bytes;
            link.flows -= 1;
            if link.flows == 0 {
                link.busy += now - link.busy_since;
                link.head = NONE;
                continue;
            }
            if !link.touched {
                link.touched = true;
                touched.push(number);
            }
            let Hop { previous, next } = hops[hop];
            match previous {
                NONE => link.head = next,
                _ => hops[previous as usize].next = next,
            }
            if next != NONE {
                hops[next as usize].previous = previous;
            }
        }
    }

    /// Flows on a link.
    #[inline]
    pub(crate) fn flows(&self, link: u32) -> impl Iterator<Item = u32> + '_ {
        let mut hop = self.state[link as usize].head;
        std::iter::from_fn(move || {
            if hop == NONE {
                return None;
            }
            let flow = hop >> self.shift;
            hop = self.hops[hop as usize].next;
            Some(flow)
        })
    }

    /// Link usage until now, without the bytes in its present flows.
    pub(crate) fn usage(&self, link: usize, now: f64) -> LinkUsage {
        let state = &self.state[link];
        let running = if state.flows > 0 { now - state.busy_since } else { 0.0 };
        LinkUsage { bytes: state.bytes, busy: state.busy + running, most_flows: state.most_flows }
    }

    /// Widens the hop numbers for paths of `length` links and rebuilds the lists for all `moving` flows.
    fn relink(&mut self, length: usize, moving: &[(u32, &[u32])]) {
        self.shift = length.next_power_of_two().trailing_zeros();
        self.hops.clear();
        for link in &mut self.state {
            link.head = NONE;
        }
        for &(flow, path) in moving {
            let first = (flow << self.shift) as usize;
            if first + path.len() > self.hops.len() {
                self.hops.resize(first + (1 << self.shift), Hop { previous: NONE, next: NONE });
            }
            for (hop, &link) in (first..).zip(path) {
                let next = std::mem::replace(&mut self.state[link as usize].head, hop as u32);
                self.hops[hop] = Hop { previous: NONE, next };
                if next != NONE {
                    self.hops[next as usize].previous = hop as u32;
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Path {
    first: u32,
    links: u32,
    latency: f64,
}

/// Interned paths.
#[derive(Clone, Debug, Default)]
pub(crate) struct Paths {
    paths: Vec<Path>,
    links: Vec<u32>,
    /// Hash table for paths by links: open addressing, a power of two slots, at most two thirds full; each slot has a
    /// path's hash and number.
    table: Vec<(u32, u32)>,
}

impl Paths {
    #[inline]
    pub(crate) fn links(&self, path: u32) -> &[u32] {
        let Path { first, links, .. } = self.paths[path as usize];
        &self.links[first as usize..(first + links) as usize]
    }

    /// Sum of the link latencies; true if it has links.
    #[inline]
    pub(crate) fn latency(&self, path: PathId) -> Result<(f64, bool)> {
        match self.paths.get(path.0 as usize) {
            Some(path) => Ok((path.latency, path.links > 0)),
            None => Err(Error::UnknownPath { path: path.0, paths: self.paths.len() as u32 }),
        }
    }

    /// Adds a path, or returns an equal path's number. `moving` returns the flows on links for a rebuild.
    pub(crate) fn add(
        &mut self,
        network: &mut Links,
        links: &[LinkId],
        moving: impl FnOnce() -> Vec<(u32, u32)>,
        most_jobs: u64,
    ) -> Result<PathId> {
        if self.paths.len() * 3 >= self.table.len() * 2 {
            self.grow_table();
        }
        let hash = hash_of(links.iter().map(|link| link.0));
        let mask = self.table.len() - 1;
        let mut slot = hash as usize & mask;
        while self.table[slot].1 != NONE {
            let (other, path) = self.table[slot];
            if other == hash && self.links(path).iter().eq(links.iter().map(|link| &link.0)) {
                return Ok(PathId(path));
            }
            slot = (slot + 1) & mask;
        }
        let mut latency = 0.0;
        for &link in links {
            latency += network.latency[network.check(link)?];
        }
        check_loop(links)?;
        if !latency.is_finite() {
            let link = links[links.len() - 1];
            return Err(Error::Latency { link, latency });
        }
        let (number, first) = (self.paths.len(), self.links.len());
        if number as u64 >= u64::from(NONE) || (first + links.len()) as u64 > u64::from(NONE) {
            return Err(Error::TooMany { what: "links on paths", most: u64::from(NONE) });
        }
        if links.len() > 1 << network.shift {
            let shift = links.len().next_power_of_two().trailing_zeros();
            if most_jobs > u64::from(NONE >> shift) {
                return Err(Error::TooMany {
                    what: "flows on paths this long",
                    most: u64::from(NONE >> shift),
                });
            }
            let moving = moving();
            let moving: Vec<_> =
                moving.iter().map(|&(flow, path)| (flow, self.links(path))).collect();
            network.relink(links.len(), &moving);
        }
        self.links.extend(links.iter().map(|link| link.0));
        self.paths.push(Path { first: first as u32, links: links.len() as u32, latency });
        self.table[slot] = (hash, number as u32);
        Ok(PathId(number as u32))
    }

    fn grow_table(&mut self) {
        let slots = (self.table.len() * 2).max(16);
        let old = std::mem::replace(&mut self.table, vec![(0, NONE); slots]);
        for entry in old.into_iter().filter(|&(_, path)| path != NONE) {
            let mut slot = entry.0 as usize & (slots - 1);
            while self.table[slot].1 != NONE {
                slot = (slot + 1) & (slots - 1);
            }
            self.table[slot] = entry;
        }
    }
}

fn hash_of(links: impl Iterator<Item = u32>) -> u32 {
    let hash = links.fold(0x517c_c1b7_2722_0a95_u64, |hash, link| {
        (hash ^ u64::from(link)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    (hash ^ hash >> 32) as u32
}

/// Rejects a path with a repeated link.
fn check_loop(links: &[LinkId]) -> Result<()> {
    // Fast path: most paths are short and have no loop.
    let twice = |hop: usize| links[..hop].contains(&links[hop]);
    if links.len() <= 16 && !(1..links.len()).any(twice) {
        return Ok(());
    }
    let mut sorted: Vec<(LinkId, usize)> =
        (0..).zip(links).map(|(hop, &link)| (link, hop)).collect();
    sorted.sort_unstable();
    let twice = sorted.windows(2).filter(|pair| pair[0].0 == pair[1].0);
    match twice.min_by_key(|pair| pair[1].1) {
        Some(pair) => Err(Error::Loop { link: pair[0].0, first: pair[0].1, second: pair[1].1 }),
        None => Ok(()),
    }
}
