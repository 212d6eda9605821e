//! Solver for max-min fair rates, incremental: it includes only the flows that a change affects.
//!
//! An allocation is max-min fair if and only if it respects each link's bandwidth and each flow has a bottleneck: a
//! saturated link on which no flow is faster (Bertsekas and Gallager, Data Networks, 6.5). So a flow subset can be
//! solved while all other rates are fixed; if each flow on the links concerned then has a bottleneck, the whole is the
//! unique max-min fair allocation. Flows that have lost the bottleneck join the next attempt. Changes are local in most
//! networks, so the subset stays small.

use crate::job::{Job, Jobs};
use crate::network::{Links, Paths};

/// Relative tolerance for rates and loads: above rounding errors, far below measurable differences.
const SAME: f64 = 1e-9;
/// Relative tolerance within which levels in one attempt are equal.
const SAME_LEVEL: f64 = 1e-13;
/// Number of attempts before all connected flows are included.
const ATTEMPTS: u32 = 8;
/// Number of levels in one attempt before the search uses a heap.
const LEVELS: u32 = 12;

/// Link used by flows in the subset.
#[derive(Clone, Copy, Debug)]
struct Local {
    link: u32,
    /// Flows on the link that are in the subset, and flows that have no rate.
    members: u32,
    open: u32,
    /// Unassigned bandwidth.
    residual: f64,
    /// Rate for subset flows whose bottleneck it is.
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
    /// Subset flows, with previous rates.
    pub(crate) flows: Vec<(u32, f64)>,
    locals: Vec<Local>,
    /// Indices in `locals` for links with flows without a rate.
    open: Vec<u32>,
    heap: Vec<(f64, u32)>,
    joining: Vec<u32>,
}

impl Solver {
    /// Starts a new round with an empty subset.
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

    /// Adds a flow, once.
    #[inline]
    pub(crate) fn add(&mut self, flow: u32, job: &mut Job) {
        if job.solved != self.round {
            job.solved = self.round;
            self.flows.push((flow, job.rate));
        }
    }

    /// Adds the flows on a link that an additional flow on it is likely to slow down, once per round.
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

    /// Adds the flows whose bottleneck is this link, or all flows on it.
    pub(crate) fn add_flows(&mut self, link: u32, all: bool, links: &Links, jobs: &mut Jobs) {
        for flow in links.flows(link) {
            let job = &mut jobs.slots[flow as usize];
            if all || job.bottleneck == link {
                self.add(flow, job);
            }
        }
    }

    /// Solves the rates in the subset, and for all flows that it affects.
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

    /// Collects the links in the subset, with the bandwidth left by other flows.
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

    /// Progressive filling: the link with the smallest share per flow fixes the rates for the flows on it; repeated on the
    /// residual bandwidth.
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
                    self.fix_rates(place, least, members, links, paths, jobs);
                }
                if self.locals[place as usize].open > 0 {
                    self.open[kept] = place;
                    kept += 1;
                }
            }
            self.open.truncate(kept);
        }
    }

    /// Progressive filling by a heap, for many levels. A link's share only grows as rates elsewhere are fixed, so
    /// an entry whose share has grown is pushed again.
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
                self.fix_rates(place, share, members, links, paths, jobs);
            }
        }
        self.open.clear();
        self.heap = heap;
    }

    /// Fixes the rate for all flows on a link that have none.
    fn fix_rates(
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

    /// Finds flows outside the subset that have lost a bottleneck, or exceed another flow's.
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

    /// Adds the connected component: all flows that share links with the subset, directly or through others.
    fn add_connected(&mut self, links: &mut Links, paths: &Paths, jobs: &mut Jobs) {
        // A visited link adds all its flows, so each link is visited once.
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
