//! MoE's phases and codes in device records, beside the codes common to all families ([`weft_gpu::Code`]). A
//! record is a [`weft_gpu::Record`], laid out as [`RecordLayout`](weft_gpu::domain::RecordLayout).

/// Code in an MoE device record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MoeCode {
    /// Notice: an expert id that is out of range, or repeated within its token; the slot counts as masked.
    /// `slot` is the token, `peer` the top-k slot, `expected` the expert count and `seen` the id.
    Expert = 5,
    /// Notice: rank `peer` lacks room. `expected` is how many positions are needed, or 0 if only that rank
    /// knows, and `seen` is the room.
    Capacity = 6,
    /// Rank `peer` released a round that this rank combines.
    Released = 7,
    /// Rank `peer` dispatched by another expert map, with generation `seen`; this rank's is `expected`.
    Placement = 8,
    /// Rank `peer` sends by another plan than this rank's: `expected` and `seen` are kept plans' keys, 0 for
    /// a new plan.
    OtherPlan = 9,
}

impl From<MoeCode> for weft_gpu::Code {
    fn from(code: MoeCode) -> weft_gpu::Code {
        weft_gpu::Code::Family(code as u32)
    }
}

/// Call phase that wrote a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MoePhase {
    /// Dispatch send.
    DispatchSend = 0,
    /// Dispatch receive.
    DispatchRecv = 1,
    /// Combine send.
    CombineSend = 2,
    /// Combine receive.
    CombineRecv = 3,
    /// Plan on the bandwidth path.
    Plan = 4,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{FAMILY, SOURCES};
    use weft_gpu::Code as Common;
    use weft_gpu::kernels::HEADERS;

    /// A kernel enumeration's enumerators and values.
    fn enumerators(name: &str) -> Vec<(String, u32)> {
        let head = format!("enum {name} : u32 {{");
        let text =
            HEADERS.iter().chain(SOURCES).find_map(|(_, text)| text.split_once(&head)).unwrap().1;
        let inside = text.split_once('}').unwrap().0;
        let pairs = inside.split(',').map(|each| each.split_once('=').unwrap());
        pairs.map(|(name, value)| (name.trim().to_owned(), value.trim().parse().unwrap())).collect()
    }

    #[test]
    fn kernels_have_the_same_numbers() {
        let own = [
            MoeCode::Expert,
            MoeCode::Capacity,
            MoeCode::Released,
            MoeCode::Placement,
            MoeCode::OtherPlan,
        ]
        .map(Common::from);
        let common = [Common::Timeout, Common::Aborted, Common::Overlap, Common::OutOfOrder];
        let names = [
            "TIMEOUT",
            "ABORTED",
            "CONCURRENT",
            "ORDER",
            "EXPERT",
            "CAPACITY",
            "RELEASED",
            "PLACEMENT",
            "OTHER_PLAN",
        ];
        let codes = common.into_iter().chain(own).map(Common::number);
        let expected: Vec<_> = names.map(str::to_owned).into_iter().zip(codes).collect();
        assert_eq!(enumerators("Code"), expected);
        let phases = FAMILY.phases.iter().map(|name| name.to_uppercase());
        let expected: Vec<_> = phases.zip(MoePhase::DispatchSend as u32..).collect();
        assert_eq!(enumerators("Phase"), expected);
    }
}
