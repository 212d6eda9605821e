//! Max-min fair rates, for as few flows as a change concerns.
//!
//! An allocation is max-min fair exactly if it keeps every link's bandwidth and every flow has a
//! bottleneck: a link that is full and on which no flow is faster (Bertsekas and Gallager, Data Networks,
//! 6.5). So a part of the flows can be solved while the rates of all others stand, and if afterwards
//! every flow on the links concerned has a bottleneck, the whole is the one max-min fair allocation.
//! Those that have lost theirs take part in the next attempt. Changes are local in most networks, and
//! this finds out how far they reach instead of taking everything that is connected.

use crate::job::{Job, Jobs};
use crate::network::{Links, Paths};

/// Rates and loads that differ by less than this part are the same: more than rounding, and far less
/// than anybody measures.
const SAME: f64 = 1e-9;
/// Levels of one attempt within this part of each other are one.
const SAME_LEVEL: f64 = 1e-13;
/// After so many attempts all that is connected is solved at once.
const ATTEMPTS: u32 = 8;
/// After so many levels in one attempt the next ones are found by a heap.
const LEVELS: u32 = 12;

/// A link that flows in question use.
#[derive(Clone, Copy, Debug)]
struct Local {
    link: u32,
    /// Flows in question on it, and how many of them have no rate yet.
    members: u32,
    open: u32,
    /// Bandwidth that nobody has yet.
    residual: f64,
    /// The rate of the flows in question that have their bottleneck here.
    level: f64,
}

impl Local {
    fn share(&self) -> f64 {
        self.residual.max(0.0) / f64::from(self.open)
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Solver {
    round: u32,
    /// The flows in question, and the rates that they had before.
    pub(crate) flows: Vec<(u32, f64)>,
    locals: Vec<Local>,
    /// Places in `locals` that still have flows without a rate.
    open: Vec<u32>,
    heap: Vec<(f64, u32)>,
    joining: Vec<u32>,
}

impl Solver {
    /// Begins a new round, without flows.
    pub(crate) fn begin(&mut self, links: &mut Links, jobs: &mut Jobs) {
        self.flows.clear();
        if self.round == u32::MAX {
            self.round = 0;
            for link in &mut links.state {
                link.seen = 0;
            }
            for job in &mut jobs.slots {
                (job.solved, job.frozen) = (0, 0);
            }
        }
        self.round += 1;
    }

    /// Adds a flow, unless it is there.
    #[inline]
    pub(crate) fn add(&mut self, flow: u32, job: &mut Job) {
        if job.solved != self.round {
            job.solved = self.round;
            self.flows.push((flow, job.rate));
        }
    }

    /// Adds the flows of a link that an additional flow on it is likely to slow down, once.
    pub(crate) fn add_rivals(&mut self, link: u32, links: &mut Links, jobs: &mut Jobs) {
        let state = &mut links.state[link as usize];
        if state.seen == self.round {
            return;
        }
        state.seen = self.round;
        let fair = state.bandwidth / f64::from(state.flows);
        for flow in links.flows(link) {
            let job = &mut jobs.slots[flow as usize];
            if job.bottleneck == link || job.rate > fair {
                self.add(flow, job);
            }
        }
    }

    /// Adds the flows that have their bottleneck on a link, or all flows of it.
    pub(crate) fn add_flows(&mut self, link: u32, all: bool, links: &Links, jobs: &mut Jobs) {
        for flow in links.flows(link) {
            let job = &mut jobs.slots[flow as usize];
            if all || job.bottleneck == link {
                self.add(flow, job);
            }
        }
    }

    /// Gives the flows in question, and all others that this concerns, their rates.
    pub(crate) fn solve(&mut self, links: &mut Links, paths: &Paths, jobs: &mut Jobs) {
        let members = self.round;
        let mut attempt = 0;
        loop {
            self.gather(members, links, paths, jobs);
            self.fill(members, links, paths, jobs);
            self.verify(members, links, jobs);
            if self.joining.is_empty() {
                return;
            }
            while let Some(flow) = self.joining.pop() {
                self.add(flow, &mut jobs.slots[flow as usize]);
            }
            attempt += 1;
            if attempt == ATTEMPTS {
                self.add_connected(links, paths, jobs);
            }
        }
    }

    /// Lists the links of the flows in question, with the bandwidth that others leave of them.
    fn gather(&mut self, members: u32, links: &mut Links, paths: &Paths, jobs: &mut Jobs) {
        self.locals.clear();
        for &(flow, _) in &self.flows {
            let job = &mut jobs.slots[flow as usize];
            job.frozen = 0;
            for &link in paths.links(job.path) {
                let state = &mut links.state[link as usize];
                let there = self.locals.get(state.place as usize);
                if there.is_none_or(|local| local.link != link) {
                    state.place = self.locals.len() as u32;
                    let (residual, level) = (state.bandwidth, f64::INFINITY);
                    self.locals.push(Local { link, members: 0, open: 0, residual, level });
                }
                self.locals[state.place as usize].members += 1;
            }
        }
        self.open.clear();
        for (place, local) in (0..).zip(&mut self.locals) {
            local.open = local.members;
            self.open.push(place);
            if local.members < links.state[local.link as usize].flows {
                for flow in links.flows(local.link) {
                    let job = &jobs.slots[flow as usize];
                    if job.solved != members {
                        local.residual -= job.rate;
                    }
                }
            }
        }
    }

    /// Progressive filling: the link that gives its flows least settles their rates, and so on with
    /// what is left.
    fn fill(&mut self, members: u32, links: &Links, paths: &Paths, jobs: &mut Jobs) {
        let mut levels = 0;
        while !self.open.is_empty() {
            if levels == LEVELS {
                return self.fill_by_heap(members, links, paths, jobs);
            }
            levels += 1;
            let shares = self.open.iter().map(|&place| self.locals[place as usize].share());
            let least = shares.fold(f64::INFINITY, f64::min);
            let limit = least * (1.0 + SAME_LEVEL);
            let mut kept = 0;
            for index in 0..self.open.len() {
                let place = self.open[index];
                let local = &self.locals[place as usize];
                if local.open > 0 && local.share() <= limit {
                    self.settle(place, least, members, links, paths, jobs);
                }
                if self.locals[place as usize].open > 0 {
                    self.open[kept] = place;
                    kept += 1;
                }
            }
            self.open.truncate(kept);
        }
    }

    /// The same for many levels. A link's share only grows while flows elsewhere are settled, so one
    /// that has grown goes back into the heap.
    fn fill_by_heap(&mut self, members: u32, links: &Links, paths: &Paths, jobs: &mut Jobs) {
        let mut heap = std::mem::take(&mut self.heap);
        heap.clear();
        for &place in &self.open {
            let local = &self.locals[place as usize];
            if local.open > 0 {
                push(&mut heap, (local.share(), place));
            }
        }
        while let Some((share, place)) = pop(&mut heap) {
            let local = &self.locals[place as usize];
            if local.open == 0 {
                continue;
            }
            let grown = local.share();
            if grown > share * (1.0 + SAME_LEVEL) {
                push(&mut heap, (grown, place));
            } else {
                self.settle(place, share, members, links, paths, jobs);
            }
        }
        self.open.clear();
        self.heap = heap;
    }

    /// Gives the flows on a link that have no rate yet this one.
    fn settle(
        &mut self,
        place: u32,
        rate: f64,
        members: u32,
        links: &Links,
        paths: &Paths,
        jobs: &mut Jobs,
    ) {
        let link = self.locals[place as usize].link;
        self.locals[place as usize].level = rate;
        for flow in links.flows(link) {
            let job = &mut jobs.slots[flow as usize];
            if job.solved != members || job.frozen == members {
                continue;
            }
            (job.frozen, job.rate, job.bottleneck) = (members, rate, link);
            for &other in paths.links(job.path) {
                let local = &mut self.locals[links.state[other as usize].place as usize];
                local.residual -= rate;
                local.open -= 1;
            }
        }
    }

    /// Finds the flows that were not in question and have no bottleneck now, or take it from others.
    fn verify(&mut self, members: u32, links: &Links, jobs: &Jobs) {
        for local in &self.locals {
            let state = &links.state[local.link as usize];
            if local.members == state.flows {
                continue;
            }
            let (mut load, mut fastest) = (0.0, 0.0_f64);
            for flow in links.flows(local.link) {
                let rate = jobs.slots[flow as usize].rate;
                load += rate;
                fastest = fastest.max(rate);
            }
            let full = load >= state.bandwidth * (1.0 - SAME);
            for flow in links.flows(local.link) {
                let job = &jobs.slots[flow as usize];
                if job.solved == members {
                    continue;
                }
                let lost =
                    job.bottleneck == local.link && !(full && job.rate >= fastest * (1.0 - SAME));
                if lost || job.rate > local.level * (1.0 + SAME) {
                    self.joining.push(flow);
                }
            }
        }
    }

    /// Adds all flows that share links with those in question, directly or through others.
    fn add_connected(&mut self, links: &mut Links, paths: &Paths, jobs: &mut Jobs) {
        // Every flow of a link that is visited comes in, so each link is visited once.
        let mut index = 0;
        let mut visited = vec![false; links.state.len()];
        while index < self.flows.len() {
            let path = jobs.slots[self.flows[index].0 as usize].path;
            for &link in paths.links(path) {
                if !std::mem::replace(&mut visited[link as usize], true) {
                    self.add_flows(link, true, links, jobs);
                }
            }
            index += 1;
        }
    }
}

fn push(heap: &mut Vec<(f64, u32)>, entry: (f64, u32)) {
    let mut index = heap.len();
    heap.push(entry);
    while index > 0 {
        let parent = (index - 1) / 2;
        if heap[parent] <= heap[index] {
            break;
        }
        heap.swap(parent, index);
        index = parent;
    }
}

fn pop(heap: &mut Vec<(f64, u32)>) -> Option<(f64, u32)> {
    if heap.is_empty() {
        return None;
    }
    let first = heap.swap_remove(0);
    let mut index = 0;
    loop {
        let left = 2 * index + 1;
        let least = (left..(left + 2).min(heap.len()))
            .min_by(|&a, &b| heap[a].partial_cmp(&heap[b]).expect("shares are numbers"));
        match least {
            Some(child) if heap[child] < heap[index] => {
                heap.swap(child, index);
                index = child;
            }
            _ => return Some(first),
        }
    }
}
