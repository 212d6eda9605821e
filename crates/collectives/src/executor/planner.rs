//! Planner: divides calls into chunks, and keeps the plans for their shapes.

use super::call::Call;
use super::config::{CollectivesConfig, GroupRoutes};
use super::layout::Layout;
use super::plan::{self, ChunkShape, PlanRoute, WIDE_BYTES};
use super::read_plan;
use super::selection::{self, Routes, Selector};
use super::short;
use super::step::Plan;
use crate::algorithm::{Algorithm, Options};
use crate::any_schedule::{AnySchedule, build};
use crate::op::{Collective, Rank};
use crate::placement::Placement;
use crate::run_error::RunError;
use crate::tuning::{Prediction, Tuning};
use std::collections::HashMap;
use std::sync::Arc;
use weft_fabric::{Engine, Route};

/// Maximum kept plans, and kept divisions.
const MAX_PLANS: usize = 4096;
/// Bytes in a chunk that is read in place, in multiples of the channel bytes.
const READ_CHUNK: u64 = 4;
/// Chunk share granularity in elements, where a chunk has as many.
const CHUNK_ALIGNMENT: u64 = 64;

/// Call division into chunks, with their plans.
#[derive(Clone, Debug)]
pub(super) struct Division {
    /// Plan for all chunks but the last.
    pub full: Arc<Plan>,
    /// Plan for the last chunk.
    pub last: Arc<Plan>,
    pub chunks: u64,
    /// Bytes per share in a full chunk.
    pub share_bytes: u64,
    pub algorithm: (Algorithm, Options),
    /// True if it runs as a short call, where mailboxes exist.
    pub is_short: bool,
}

impl Division {
    /// True if a write reads the caller's input.
    pub fn reads_input(&self) -> bool {
        self.chunks > 0 && (self.full.reads_input || self.last.reads_input)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PlanKey {
    collective: Collective,
    algorithm: Algorithm,
    chunks: u32,
    local: u32,
    elements: u64,
    element_bytes: u64,
    staged_input: bool,
    is_wide: bool,
}

pub(super) struct Planner {
    config: CollectivesConfig,
    rank: Rank,
    ranks: u32,
    lanes: u16,
    group: GroupRoutes,
    tuning: Option<Tuning>,
    placement: Option<Placement>,
    /// Route to each rank; `None` for this one.
    routes: Vec<Option<PlanRoute>>,
    plans: HashMap<PlanKey, Arc<Plan>>,
    /// Last call's shape and division.
    recent: Option<(CallShape, Division)>,
    divisions: HashMap<CallShape, Division>,
    /// Maximum lanes that a rank pair needs.
    pair_lanes: HashMap<ScheduleKey, u32>,
}

/// Collective, bytes per element, elements, algorithm, if the input is scaled, and if the result is rounded once.
type CallShape = (Collective, usize, u64, Option<(Algorithm, Options)>, bool, bool);
/// Collective, algorithm, and algorithm options.
type ScheduleKey = (Collective, Algorithm, u32, u32);

impl Planner {
    /// Planner for one rank whose engine has resolved the routes.
    pub fn new(
        engine: &Engine,
        config: CollectivesConfig,
        lanes: u16,
        group: GroupRoutes,
    ) -> Planner {
        let ranks = engine.size();
        let route = |rank| {
            let Route { parts, ordered, .. } = engine.route(weft_fabric::Rank(rank))?;
            Some(PlanRoute { parts, ordered })
        };
        Planner {
            config,
            rank: Rank(engine.rank().0),
            ranks,
            lanes,
            group,
            tuning: None,
            placement: None,
            routes: (0..ranks).map(route).collect(),
            plans: HashMap::new(),
            recent: None,
            divisions: HashMap::new(),
            pair_lanes: HashMap::new(),
        }
    }

    /// Rank that the plans are for.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Selects by these measurements from now on.
    pub fn set_tuning(&mut self, tuning: Option<Tuning>) {
        (self.recent, self.tuning) = (None, tuning);
        self.divisions.clear();
    }

    /// From now on, runs HDRM in this placement's order, and selects all-reduces by estimates on the placement's
    /// network.
    pub fn set_placement(&mut self, placement: Option<Placement>) {
        (self.recent, self.placement) = (None, placement);
        self.divisions.clear();
        self.plans.clear();
    }

    /// Divides a call into chunks that fit a channel.
    ///
    /// # Errors
    /// [`RunError::Invalid`] for an algorithm that does not compute the collective; [`RunError::TooLarge`].
    pub fn divide(&mut self, call: &Call) -> Result<Division, RunError> {
        let is_scaled = call.factor().is_some();
        let shape = shape_of(call);
        if let Some((recent, division)) = &self.recent
            && *recent == shape
        {
            return Ok(division.clone());
        }
        let known = self.divisions.get(&shape).cloned();
        let division = match known {
            Some(division) => division,
            None => {
                let division = self.divide_anew(call, is_scaled)?;
                if self.divisions.len() >= MAX_PLANS {
                    self.divisions.clear();
                }
                self.divisions.insert(shape, division.clone());
                division
            }
        };
        self.recent = Some((shape, division.clone()));
        Ok(division)
    }

    /// True if a call runs as a short call, where mailboxes exist.
    ///
    /// # Errors
    /// Errors from [`Planner::divide`].
    pub fn is_short(&mut self, call: &Call) -> Result<bool, RunError> {
        match &self.recent {
            Some((recent, division)) if *recent == shape_of(call) => Ok(division.is_short),
            _ => Ok(self.divide(call)?.is_short),
        }
    }

    fn divide_anew(&mut self, call: &Call, is_scaled: bool) -> Result<Division, RunError> {
        if let Some((algorithm, options)) = call.algorithm {
            if self.config.reproducible {
                selection::check_reproducible(call.collective, algorithm)?;
            }
            return self.divide_by(call, algorithm, options, is_scaled);
        }
        let GroupRoutes { one_host, reads, .. } = self.group;
        let routes = Routes { one_host, reads, lanes: self.lanes };
        let selector = Selector {
            routes,
            ranks: self.ranks,
            reproducible: self.config.reproducible,
            is_rounded: call.is_rounded(),
            has_hdrm: self.placement.as_ref().is_some_and(|one| one.order().is_ok()),
        };
        let shape = (call.collective, call.bytes());
        let (predictions, source) =
            selector.predictions(shape, self.tuning.as_ref(), self.placement.as_mut());
        for (index, fastest) in predictions.iter().enumerate() {
            let Prediction { algorithm, options, .. } = *fastest;
            match self.divide_by(call, algorithm, options, is_scaled) {
                // More lanes, or more staging memory, than there are; on all ranks alike.
                Err(RunError::TooLarge { .. }) => {}
                divided => {
                    selector.log_prediction(shape, &predictions[index..], source);
                    return divided;
                }
            }
        }
        let (algorithm, options) = selector.by_rule(shape);
        selector.log_rule(shape, algorithm, self.tuning.is_some());
        self.divide_by(call, algorithm, options, is_scaled)
    }

    fn divide_by(
        &mut self,
        call: &Call,
        algorithm: Algorithm,
        options: Options,
        is_scaled: bool,
    ) -> Result<Division, RunError> {
        let schedule = self.schedule(call.collective, algorithm, &options)?;
        self.check_lanes((call.collective, algorithm, options.chunks, options.local), &schedule)?;
        let reads = algorithm == Algorithm::DirectRead;
        if reads && !self.group.reads {
            let (what, wanted) = ("peers whose memory is read in place", u64::from(self.ranks) - 1);
            return Err(RunError::TooLarge { what, wanted, limit: 0 });
        }
        let is_short = call.bytes() < self.config.in_place_from(&self.group);
        // Two contributions are folded once, in float32; only a division would round them again.
        let folds_once = self.ranks <= 2 && !call.divides();
        let is_wide = !reads && !folds_once && call.is_rounded();
        let staged_input = !reads && (is_short || is_scaled || is_wide);
        let shares = if call.collective.shares() { u64::from(self.ranks) } else { 1 };
        let element_bytes = if is_wide { WIDE_BYTES } else { call.element.bytes() as u64 };
        let whole = call.elements / shares;
        let staging = |share: u64| {
            if reads {
                let slots = u64::from(self.ranks) * read_plan::SLOT_BYTES;
                return slots.max(share * shares * element_bytes / READ_CHUNK);
            }
            Layout::new(&schedule, share * shares, element_bytes, staged_input).staging_bytes()
        };
        let share = chunk_share(whole, self.config.channel_bytes, element_bytes, staging)?;
        let chunks = whole.div_ceil(share);
        let mut plan_of = |share: u64| {
            let key = PlanKey {
                collective: call.collective,
                algorithm,
                chunks: options.chunks,
                local: options.local,
                elements: share * shares,
                element_bytes,
                staged_input,
                is_wide,
            };
            self.plan(key, &schedule)
        };
        let last = plan_of(whole - share * chunks.saturating_sub(1))?;
        let full = if chunks > 1 { plan_of(share)? } else { last.clone() };
        let share_bytes = share * call.element.bytes() as u64;
        let is_short = short::is_short(call.collective, algorithm, call.bytes(), self.ranks);
        let is_short = is_short && chunks > 0;
        Ok(Division { full, last, chunks, share_bytes, algorithm: (algorithm, options), is_short })
    }

    fn schedule(
        &self,
        collective: Collective,
        algorithm: Algorithm,
        options: &Options,
    ) -> Result<AnySchedule, RunError> {
        if let (Collective::AllReduce, Algorithm::Hdrm, Some(placement)) =
            (collective, algorithm, &self.placement)
        {
            return placement.hdrm();
        }
        build(collective, algorithm, self.ranks, options)
            .map_err(|error| RunError::Invalid { what: "algorithm", detail: error.to_string() })
    }

    /// Checks that no rank pair needs more lanes than there are: on all ranks alike, as no rank may start a call that
    /// another rejects.
    fn check_lanes(&mut self, key: ScheduleKey, schedule: &AnySchedule) -> Result<(), RunError> {
        if self.lanes == 1 {
            return Ok(());
        }
        let wanted = *self.pair_lanes.entry(key).or_insert_with(|| plan::pair_lanes(schedule));
        let (wanted, limit) = (u64::from(wanted), u64::from(self.lanes));
        if wanted > limit {
            return Err(RunError::TooLarge { what: "lanes for a rank pair", wanted, limit });
        }
        Ok(())
    }

    fn plan(&mut self, key: PlanKey, schedule: &AnySchedule) -> Result<Arc<Plan>, RunError> {
        if let Some(plan) = self.plans.get(&key) {
            return Ok(plan.clone());
        }
        let PlanKey { elements, element_bytes, staged_input, is_wide, .. } = key;
        let shape = ChunkShape { elements, element_bytes, staged_input, is_wide };
        // A schedule names peers only, which all have routes.
        let route = |rank: u32| self.routes[rank as usize].unwrap_or(PlanRoute::SELF);
        let plan = match key.algorithm {
            Algorithm::DirectRead => read_plan::plan(schedule, self.rank, shape, route)
                .ok_or_else(|| RunError::Invalid {
                    what: "algorithm",
                    detail: format!("{}: its schedule cannot be read in place", key.algorithm),
                })?,
            _ => plan::plan(schedule, self.rank, shape, route),
        };
        let plan = Arc::new(plan);
        if self.plans.len() >= MAX_PLANS {
            self.plans.clear();
        }
        self.plans.insert(key, plan.clone());
        Ok(plan)
    }
}

fn shape_of(call: &Call) -> CallShape {
    let (is_scaled, is_rounded) = (call.factor().is_some(), call.is_rounded());
    (call.collective, call.element.bytes(), call.elements, call.algorithm, is_scaled, is_rounded)
}

/// Share elements in each chunk: few chunks with nearly equal length, none above `limit` bytes in staging memory.
fn chunk_share(
    whole: u64,
    limit: u64,
    element_bytes: u64,
    staging: impl Fn(u64) -> u64,
) -> Result<u64, RunError> {
    if staging(whole) <= limit {
        return Ok(whole.max(1));
    }
    // Staging memory grows with the share, except for slot and area rounding.
    let (mut fits, mut too_long) = (0, limit / element_bytes + 1);
    while fits + 1 < too_long {
        let middle = fits + (too_long - fits) / 2;
        if staging(middle) <= limit { fits = middle } else { too_long = middle }
    }
    if fits == 0 {
        let wanted = staging(1);
        return Err(RunError::TooLarge { what: "shortest chunk in bytes", wanted, limit });
    }
    let longest = match fits / CHUNK_ALIGNMENT * CHUNK_ALIGNMENT {
        0 => fits,
        aligned => aligned,
    };
    let even = whole.div_ceil(whole.div_ceil(longest));
    Ok(even.next_multiple_of(CHUNK_ALIGNMENT).min(longest))
}
