//! MoE as a device operator family: phase names, and error texts for device records.

use crate::device::abi::record::{MoeCode, MoePhase};
use weft_control::Rank;
use weft_gpu::{Family, Record, Report};

/// Dispatch and combine family.
pub static FAMILY: Family = Family {
    name: "MoE",
    first_phase: MoePhase::DispatchSend as u32,
    phases: &["dispatch_send", "dispatch_recv", "combine_send", "combine_recv", "plan"],
    order: "dispatch send, dispatch receive, combine send, combine receive",
    first_code: MoeCode::Expert as u32,
    codes: 5,
    explain,
};

fn explain(record: &Record, phase: weft_gpu::Phase) -> Report {
    let number = record.code.number();
    match number {
        _ if number == MoeCode::Expert as u32 => expert(record),
        _ if number == MoeCode::Capacity as u32 => capacity(record),
        _ if number == MoeCode::Released as u32 => released(record, phase),
        _ if number == MoeCode::Placement as u32 => placement(record),
        _ => other_plan(record),
    }
}

/// An expert that does not exist, or one named twice.
fn expert(record: &Record) -> Report {
    let Record { rank, slot, channel, expected, seen, .. } = *record;
    let why = if seen >= expected {
        format!(", but there are {expected} experts; a negative id means no expert")
    } else {
        " twice; add up its weights and name it once".to_owned()
    };
    let rank = Rank(rank);
    let text = format!(
        "token {slot} names expert {seen}{why} ({rank}, channel {channel}); the batch is lost"
    );
    Report { class: "ExpertError", rank: Some(rank), text }
}

/// A rank without room for the tokens sent to it.
fn capacity(record: &Record) -> Report {
    let Record { rank, peer, channel, expected: needed, seen: room, .. } = *record;
    let rank = Rank(peer.unwrap_or(rank));
    if record.phase == MoePhase::CombineSend as u32 || needed <= room {
        // Only a rank's own record has the row count.
        let rows = if needed > room { format!("{room}") } else { "fewer".to_owned() };
        let text = format!(
            "{rank} gave combine {rows} rows of outputs for {needed} positions (channel {channel}): pass a row for each \
             position up to the last of expert_offsets; no replies were sent and the batch is lost"
        );
        return Report { class: "CapacityError", rank: Some(rank), text };
    }
    let too_few = needed.saturating_sub(room);
    let text = format!(
        "{rank} would receive {needed} positions but has room for {room}, {too_few} too few (channel \
         {channel}): raise max_positions or expert_capacity there, or send smaller batches; no \
         token was placed and the batch is lost"
    );
    Report { class: "CapacityError", rank: Some(rank), text }
}

/// A peer released a round that this rank combines.
fn released(record: &Record, phase: weft_gpu::Phase) -> Report {
    let (rank, peer) = (Rank(record.rank), record.peer.map(Rank));
    let who = peer.map_or("a peer".to_owned(), |peer| peer.to_string());
    let text = format!(
        "{rank} combines a round of channel {} that {who} released without replies ({phase}): either \
         every rank combines a round or every rank releases it",
        record.channel
    );
    Report { class: "StageError", rank: peer, text }
}

/// A peer dispatched by another layer's placement, or by one before or after a change.
fn placement(record: &Record) -> Report {
    let Record { rank, channel, expected, seen, .. } = *record;
    let (rank, peer) = (Rank(rank), record.peer.map(Rank));
    let who = peer.map_or("a peer".to_owned(), |peer| peer.to_string());
    let text = format!(
        "{who} dispatched by change {seen} of the placement, {rank} by change {expected} (channel {channel}): pass \
         the same layer to dispatch on every rank, and change placements between the same rounds"
    );
    Report { class: "StageError", rank: peer, text }
}

/// Ranks that dispatch by different plans.
fn other_plan(record: &Record) -> Report {
    let (rank, peer) = (Rank(record.rank), record.peer.map(Rank));
    let who = peer.map_or("a peer".to_owned(), |peer| peer.to_string());
    let plan = |key| if key == 0 { "a new plan" } else { "the handle of an earlier round" };
    let (here, there) = (plan(record.expected), plan(record.seen));
    let same = if record.expected != 0 && record.seen != 0 { ", and not the same one" } else { "" };
    let text = format!(
        "{rank} dispatches by {here} on channel {}, {who} by {there}{same}: every rank passes the handle of the \
         same round, or none",
        record.channel
    );
    Report { class: "StageError", rank: peer, text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_gpu::Families;

    fn text_of(
        code: MoeCode,
        phase: MoePhase,
        peer: Option<u32>,
        expected: u64,
        seen: u64,
    ) -> String {
        let mut families = Families::default();
        families.add(&FAMILY).unwrap();
        let (code, phase) = (code.into(), phase as u32);
        let record = Record { code, rank: 2, phase, peer, channel: 1, slot: 9, expected, seen };
        families.error(&record).to_string()
    }

    #[test]
    fn a_correctable_error_names_its_remedy() {
        assert_eq!(
            text_of(MoeCode::Capacity, MoePhase::DispatchRecv, Some(5), 4096, 1024),
            "rank 5 would receive 4096 positions but has room for 1024, 3072 too few (channel 1): \
             raise max_positions or expert_capacity there, or send smaller batches; no \
             token was placed and the batch is lost"
        );
        assert_eq!(
            text_of(MoeCode::Capacity, MoePhase::CombineSend, Some(2), 4096, 1024),
            "rank 2 gave combine 1024 rows of outputs for 4096 positions (channel 1): pass a row for each position up \
             to the last of expert_offsets; no replies were sent and the batch is lost"
        );
        let remote = text_of(MoeCode::Capacity, MoePhase::CombineRecv, Some(5), 1024, 4096);
        assert!(
            remote.starts_with("rank 5 gave combine fewer rows of outputs for 1024"),
            "{remote}"
        );
        let outside = text_of(MoeCode::Expert, MoePhase::Plan, None, 64, 70);
        let twice = text_of(MoeCode::Expert, MoePhase::Plan, None, 64, 3);
        assert!(outside.contains("token 9 names expert 70, but there are 64 experts"), "{outside}");
        assert!(twice.contains("token 9 names expert 3 twice"), "{twice}");
        let released = text_of(MoeCode::Released, MoePhase::CombineRecv, Some(3), 0, 0);
        let placed = text_of(MoeCode::Placement, MoePhase::DispatchRecv, Some(3), 4, 9);
        assert!(
            placed
                .starts_with("rank 3 dispatched by change 9 of the placement, rank 2 by change 4"),
            "{placed}"
        );
        assert!(
            released.contains("that rank 3 released without replies (combine_recv)"),
            "{released}"
        );
        assert_eq!(
            text_of(MoeCode::OtherPlan, MoePhase::DispatchRecv, Some(3), 77, 0),
            "rank 2 dispatches by the handle of an earlier round on channel 1, rank 3 by a new plan: every rank \
             passes the handle of the same round, or none"
        );
        let two = text_of(MoeCode::OtherPlan, MoePhase::DispatchRecv, Some(3), 77, 78);
        assert!(
            two.contains("rank 3 by the handle of an earlier round, and not the same"),
            "{two}"
        );
    }

    #[test]
    fn every_phase_has_its_name_and_every_code_is_the_familys_or_common() {
        use MoePhase::{CombineRecv, CombineSend, DispatchRecv, DispatchSend, Plan};
        let mut families = Families::default();
        families.add(&FAMILY).unwrap();
        let names = [
            (DispatchSend, "dispatch_send"),
            (DispatchRecv, "dispatch_recv"),
            (CombineSend, "combine_send"),
            (CombineRecv, "combine_recv"),
            (Plan, "plan"),
        ];
        for (phase, name) in names {
            assert_eq!(families.phase(phase as u32).to_string(), name);
        }
        let last = FAMILY.first_code + FAMILY.codes - 1;
        assert_eq!((MoeCode::Expert as u32, MoeCode::OtherPlan as u32), (FAMILY.first_code, last));
    }
}
