//! Conformance suite: contract tests for all providers, one line each below.
//!
//! A [`Provider`] describes how a rank's device is created in each [`Shape`], and which guarantees it
//! gives. The macro gives it a test module, one for each case:
//!
//! - `requests.rs`: all request kinds, lengths and offsets
//! - `traffic.rs`: random writes byte for byte, many ranks, full queues, ranks configured differently
//! - `slow.rs`: peers that read late or never, deadlines that pass
//! - `loss.rs`: peers that are killed, stopped, or leave in order; writes whose writer leaves at once
//! - `memory.rs`: regions that are released and granted again
//! - `restarts.rs`: ranks that restart, and introductions from earlier processes
//!
//! A case that a provider or this machine cannot run prints the reason and is skipped. `WEFT_LONG=1`
//! selects the long runs for a release. The simulator has a virtual clock: `stepped.rs` advances it as
//! ranks poll. A separate suite (`sim.rs`) runs drivers under many seeds, one run each.

#[path = "common/mod.rs"]
mod common;
#[path = "conformance/loss.rs"]
mod loss;
#[path = "conformance/memory.rs"]
mod memory;
#[path = "conformance/provider.rs"]
mod provider;
#[path = "conformance/requests.rs"]
mod requests;
#[path = "conformance/restarts.rs"]
mod restarts;
#[path = "conformance/slow.rs"]
mod slow;
#[path = "conformance/stepped.rs"]
mod stepped;
#[path = "conformance/traffic.rs"]
mod traffic;

use common::MemberDevices;
use provider::{
    Provider, automatic_tcp, automatic_tcp_beside_gpus, copy_twin, hostile_automatic_tcp,
    hostile_ofi, hostile_shm, hostile_staged_shm, hostile_tcp, hostile_verbs, hostile_verbs_twin,
    ofi_shm, ofi_tcp, shm, staged_hostile_tcp, staged_shm, staged_tcp, tcp, verbs, verbs_twin,
};
use stepped::{sim, sim_world};

/// True if the long runs are selected.
fn is_long() -> bool {
    std::env::var_os("WEFT_LONG").is_some_and(|value| value == "1")
}

macro_rules! conformance {
    ($name:ident: $provider:expr) => {
        mod $name {
            use super::*;

            const PROVIDER: Provider = Provider { name: stringify!($name), ..$provider };

            cases! {
                requests::every_kind_of_request_arrives,
                requests::writes_of_any_length_arrive_at_any_offset,
                requests::a_gibibyte_arrives,
                traffic::threads_write_random_pages_to_each_other,
                traffic::processes_write_random_pages_to_each_other,
                traffic::eight_ranks_write_to_each_other,
                traffic::full_queues_slow_writers_down_and_lose_nothing,
                traffic::ranks_configured_differently_reach_each_other,
                traffic::writes_in_random_order_arrive_byte_for_byte,
                traffic::a_scatter_cut_short_by_a_full_queue_arrives_whole,
                traffic::a_sleeping_rank_is_woken_for_each_turn,
                traffic::credits_that_writes_carry_arrive,
                slow::a_peer_that_does_not_poll_delays_no_other,
                slow::nothing_is_lost_while_an_owner_does_not_poll,
                slow::a_deadline_that_passes_leaves_the_request_until_it_drains,
                slow::a_queue_that_stays_full_ends_the_wait_and_names_the_peer,
                loss::a_killed_peer_is_named,
                loss::a_stopped_peer_is_named_and_a_fence_drains_its_requests,
                loss::a_fence_under_load_gives_every_source_back,
                loss::a_peer_that_left_in_peace_poisons_nothing,
                loss::what_was_posted_arrives_although_its_writer_leaves,
                memory::a_region_takes_the_key_of_one_that_was_released,
                memory::memory_at_the_address_of_freed_memory_is_other_memory,
                restarts::an_old_introduction_connects_to_nobody,
            }
        }
    };
}

macro_rules! cases {
    ($($module:ident::$case:ident,)*) => {
        $(
            #[test]
            fn $case() {
                crate::provider::CASE.set(stringify!($case));
                crate::$module::$case(&PROVIDER);
            }
        )*
    };
}

// Over shm, introductions only serve memory reads.
conformance!(shm: Provider { introductions_identify: false, ..Provider::new("", shm) });
conformance!(tcp: Provider {
    notices_death: true,
    may_be_done_at_once: false,
    ..Provider::new("", tcp)
});
conformance!(copy_twin: Provider {
    places: MemberDevices { source: Some(0), inbox: Some(1) },
    ..Provider::new("", copy_twin)
});
// The network completes early or late, parts overtake each other, and credited bytes turn random.
conformance!(sim: Provider {
    processes: false,
    world: Some(sim_world),
    answers: false,
    keeps_credited_bytes: false,
    notices_death: true,
    longest: 64 << 20,
    ..Provider::new("", sim)
});
conformance!(hostile_shm: Provider {
    introductions_identify: false,
    longest: 64 << 20,
    ..Provider::new("", hostile_shm)
});
conformance!(hostile_tcp: Provider {
    notices_death: true,
    may_be_done_at_once: false,
    longest: 64 << 20,
    ..Provider::new("", hostile_tcp)
});
conformance!(ofi_tcp: Provider { may_be_done_at_once: false, ..Provider::new("", ofi_tcp) });
// Libfabric's shm frees endpoint memory that other endpoints in the process still use, and holds spin
// locks in shared memory, which a killed rank may leave locked.
conformance!(ofi_shm: Provider {
    threads: false,
    survives_kills: false,
    ..Provider::new("", ofi_shm)
});
conformance!(hostile_ofi: Provider {
    may_be_done_at_once: false,
    longest: 64 << 20,
    ..Provider::new("", hostile_ofi)
});
// A peer's NIC takes writes also while the processes are stopped.
conformance!(verbs: Provider::new("", verbs));
// The NICs live in this process, so all ranks are threads.
conformance!(verbs_twin: Provider { processes: false, ..Provider::new("", verbs_twin) });
conformance!(hostile_verbs_twin: Provider {
    processes: false,
    longest: 64 << 20,
    ..Provider::new("", hostile_verbs_twin)
});
conformance!(hostile_verbs: Provider { longest: 64 << 20, ..Provider::new("", hostile_verbs) });
// Sources and inboxes lie on a twin's devices; barriers and credits are signals, which pass through.
conformance!(staged_shm: Provider {
    places: MemberDevices { source: Some(0), inbox: Some(1) },
    introductions_identify: false,
    longest: 64 << 20,
    ..Provider::new("", staged_shm)
});
conformance!(staged_tcp: Provider {
    places: MemberDevices { source: Some(0), inbox: Some(1) },
    notices_death: true,
    may_be_done_at_once: false,
    longest: 64 << 20,
    ..Provider::new("", staged_tcp)
});
conformance!(staged_tcp_into_gpus: Provider {
    places: MemberDevices { source: None, inbox: Some(1) },
    notices_death: true,
    may_be_done_at_once: false,
    longest: 64 << 20,
    ..Provider::new("", staged_tcp)
});
conformance!(staged_tcp_in_host_memory: Provider {
    notices_death: true,
    may_be_done_at_once: false,
    longest: 64 << 20,
    ..Provider::new("", staged_tcp)
});
conformance!(automatic_tcp: Provider {
    places: MemberDevices { source: Some(0), inbox: Some(1) },
    notices_death: true,
    may_be_done_at_once: false,
    longest: 64 << 20,
    ..Provider::new("", automatic_tcp)
});
conformance!(automatic_tcp_in_host_memory: Provider {
    notices_death: true,
    may_be_done_at_once: false,
    longest: 64 << 20,
    ..Provider::new("", automatic_tcp_beside_gpus)
});
conformance!(hostile_automatic_tcp: Provider {
    places: MemberDevices { source: Some(0), inbox: Some(1) },
    notices_death: true,
    may_be_done_at_once: false,
    longest: 64 << 20,
    ..Provider::new("", hostile_automatic_tcp)
});
conformance!(hostile_staged_shm: Provider {
    places: MemberDevices { source: Some(0), inbox: Some(1) },
    introductions_identify: false,
    longest: 64 << 20,
    ..Provider::new("", hostile_staged_shm)
});
conformance!(staged_hostile_tcp: Provider {
    places: MemberDevices { source: Some(0), inbox: None },
    notices_death: true,
    may_be_done_at_once: false,
    longest: 64 << 20,
    ..Provider::new("", staged_hostile_tcp)
});
