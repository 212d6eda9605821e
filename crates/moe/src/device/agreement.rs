//! What the ranks of a device all-to-all must have been given alike.

use crate::agreement::Field;
use crate::device::config::{DeviceConfig, DeviceLayout, IdWidth, Path};
use crate::shape::Weighting;
use crate::token_type::TokenType;
use weft_gpu::Place;

impl DeviceConfig {
    /// Names and values; what comes first is compared first.
    pub(super) fn fields(&self, place: &Place) -> Vec<Field> {
        let (layout, pad_to, capacity) = match self.layout {
            DeviceLayout::Contiguous { pad_to } => ("contiguous", pad_to, None),
            DeviceLayout::Indexed => ("indexed", 1, None),
            DeviceLayout::Padded { expert_capacity } => ("padded", 1, expert_capacity),
        };
        let device = match place {
            Place::Cuda { .. } => "cuda",
            Place::Twin => "twin",
        };
        let ids = match self.ids {
            IdWidth::I32 => "int32",
            IdWidth::I64 => "int64",
        };
        let weighting = match self.weighting {
            Weighting::AtCombine => "combine",
            Weighting::AtExpert => "expert",
        };
        let path = self.path.map_or("automatic", Path::name);
        let or_none = |limit: Option<u64>| limit.map_or("none".to_owned(), |n| n.to_string());
        let scale = match self.wire {
            TokenType::Plain(_) => "none".to_owned(),
            TokenType::Scaled(scaled) => scaled.scale.to_string(),
        };
        vec![
            ("device", device.to_owned()),
            ("ranks", self.ranks.to_string()),
            ("experts", self.experts.to_string()),
            ("top_k", self.top_k.to_string()),
            ("hidden", self.hidden.to_string()),
            ("max_tokens", self.max_tokens.to_string()),
            ("buffers", self.channels.to_string()),
            ("token_dtype", self.token_type.to_string()),
            ("wire_dtype", self.wire.to_string()),
            ("scale_dtype", scale),
            ("block", or_none(self.wire.block().map(u64::from))),
            ("combine_dtype", self.combine_dtype.to_string()),
            ("answer_dtype", self.answer_dtype.to_string()),
            ("output_dtype", self.output_dtype.to_string()),
            ("ids_dtype", ids.to_owned()),
            ("layout", layout.to_owned()),
            ("pad_to", pad_to.to_string()),
            ("expert_capacity", or_none(capacity.map(u64::from))),
            ("max_positions", or_none(self.max_positions.map(u64::from))),
            ("weighting", weighting.to_owned()),
            ("path", path.to_owned()),
            ("max_bytes", or_none(self.max_bytes)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::{agree, encode};
    use crate::dtype::DType;
    use crate::float8::Float8;
    use crate::token_type::{BlockScaled, ScaleType};

    type Change = fn(&mut DeviceConfig);

    fn scaled(block: u32, scale: ScaleType) -> TokenType {
        TokenType::Scaled(BlockScaled { format: Float8::E4M3, scale, block })
    }

    #[test]
    fn every_field_is_compared_and_named() {
        let ours = DeviceConfig::new(2, 0, 8, 2).sized(16, 64).tokens(scaled(64, ScaleType::F32));
        let told = |theirs: &DeviceConfig| {
            let all = [encode(&ours.fields(&Place::Twin)), encode(&theirs.fields(&Place::Twin))];
            agree(&ours.fields(&Place::Twin), 2, &all).err().map(|error| error.to_string())
        };
        assert_eq!(told(&DeviceConfig { rank: 1, ..ours.clone() }), None);
        let changes: [(&str, Change); 20] = [
            ("ranks", |c| c.ranks = 4),
            ("experts", |c| c.experts = 9),
            ("top_k", |c| c.top_k = 1),
            ("hidden", |c| c.hidden = 80),
            ("max_tokens", |c| c.max_tokens = 17),
            ("buffers", |c| c.channels = 1),
            ("token_dtype", |c| c.token_type = DType::F16.into()),
            ("wire_dtype", |c| c.wire = DType::F16.into()),
            ("scale_dtype", |c| c.wire = scaled(64, ScaleType::Ue8m0)),
            ("block", |c| c.wire = scaled(32, ScaleType::F32)),
            ("combine_dtype", |c| c.combine_dtype = DType::F16),
            ("answer_dtype", |c| c.answer_dtype = DType::F32),
            ("output_dtype", |c| c.output_dtype = DType::F32),
            ("ids_dtype", |c| c.ids = IdWidth::I32),
            ("layout", |c| c.layout = DeviceLayout::Indexed),
            ("pad_to", |c| c.layout = DeviceLayout::Contiguous { pad_to: 8 }),
            ("max_positions", |c| c.max_positions = Some(40)),
            ("weighting", |c| c.weighting = Weighting::AtExpert),
            ("path", |c| c.path = Some(Path::Bandwidth)),
            ("max_bytes", |c| c.max_bytes = Some(1 << 30)),
        ];
        for (field, change) in changes {
            let mut theirs = ours.clone();
            change(&mut theirs);
            let message = told(&theirs).unwrap();
            assert!(message.contains(&format!("rank 1 has {field} ")), "{field}: {message}");
        }
    }
}
