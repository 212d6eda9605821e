//! MoE as a family of device operators: the names of its phases, and the words for what its kernels record.

use crate::device::record::{Code, Phase};
use weft_control::Rank;
use weft_gpu::{Family, Record, Report};

/// The family of dispatch and combine.
pub static FAMILY: Family = Family {
    name: "MoE",
    first_phase: Phase::DispatchSend as u32,
    phases: &["dispatch_send", "dispatch_recv", "combine_send", "combine_recv", "plan"],
    order: "dispatch send, dispatch receive, combine send, combine receive",
    first_code: Code::Expert as u32,
    codes: 3,
    explain,
};

fn explain(record: &Record, phase: weft_gpu::Phase) -> Report {
    let number = record.code.number();
    match number {
        _ if number == Code::Expert as u32 => expert(record),
        _ if number == Code::Capacity as u32 => capacity(record),
        _ => released(record, phase),
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

/// A rank without room for what is on its way to it.
fn capacity(record: &Record) -> Report {
    let Record { rank, peer, channel, expected: needed, seen: room, .. } = *record;
    let rank = Rank(peer.unwrap_or(rank));
    let too_few = needed.saturating_sub(room);
    let text = format!(
        "{rank} would receive {needed} positions but has room for {room}, {too_few} too few (channel \
         {channel}): raise max_positions or expert_capacity there, or send smaller batches; nothing \
         was placed and the batch is lost"
    );
    Report { class: "CapacityError", rank: Some(rank), text }
}

/// A peer released a round that this rank combines.
fn released(record: &Record, phase: weft_gpu::Phase) -> Report {
    let (rank, peer) = (Rank(record.rank), record.peer.map(Rank));
    let who = peer.map_or("a peer".to_owned(), |peer| peer.to_string());
    let text = format!(
        "{rank} combines a round of channel {} that {who} released without answers ({phase}): either \
         every rank combines a round or every rank releases it",
        record.channel
    );
    Report { class: "StageError", rank: peer, text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_gpu::Families;

    fn said(code: Code, phase: Phase, peer: Option<u32>, expected: u64, seen: u64) -> String {
        let mut families = Families::default();
        families.add(&FAMILY).unwrap();
        let (code, phase) = (weft_gpu::Code::Own(code as u32), phase as u32);
        let record = Record { code, rank: 2, phase, peer, channel: 1, slot: 9, expected, seen };
        record.error(&families).to_string()
    }

    #[test]
    fn what_a_user_can_mend_says_how() {
        assert_eq!(
            said(Code::Capacity, Phase::DispatchRecv, Some(5), 4096, 1024),
            "rank 5 would receive 4096 positions but has room for 1024, 3072 too few (channel 1): \
             raise max_positions or expert_capacity there, or send smaller batches; nothing was \
             placed and the batch is lost"
        );
        let outside = said(Code::Expert, Phase::Plan, None, 64, 70);
        let twice = said(Code::Expert, Phase::Plan, None, 64, 3);
        assert!(outside.contains("token 9 names expert 70, but there are 64 experts"), "{outside}");
        assert!(twice.contains("token 9 names expert 3 twice"), "{twice}");
        let released = said(Code::Released, Phase::CombineRecv, Some(3), 0, 0);
        assert!(
            released.contains("that rank 3 released without answers (combine_recv)"),
            "{released}"
        );
    }

    #[test]
    fn every_phase_has_its_name_and_every_code_is_the_familys_or_common() {
        use Phase::{CombineRecv, CombineSend, DispatchRecv, DispatchSend, Plan};
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
        let common = [Code::Timeout, Code::Aborted, Code::TwoLaunches, Code::OutOfOrder];
        for (code, number) in common.into_iter().zip(1..) {
            assert_eq!(code as u32, number);
            assert!(number < Family::COMMON_CODES);
        }
        let last = FAMILY.first_code + FAMILY.codes - 1;
        assert_eq!((Code::Expert as u32, Code::Released as u32), (FAMILY.first_code, last));
    }
}
