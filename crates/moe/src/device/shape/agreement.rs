//! Fields on which the ranks in a device all-to-all must agree.

use crate::device::options::DeviceConfig;
use crate::shape::agreement::{Field, counts};
use crate::shape::expert_map::ExpertMap;
use weft_gpu::MemoryLocation;

/// Digest over all layers' maps: equal for equal maps, different with high probability otherwise.
pub(crate) fn digest(maps: &[ExpertMap]) -> String {
    let digest = maps.iter().fold(0u64, |digest, map| digest.rotate_left(5) ^ map.digest());
    format!("{digest:016x}")
}

impl DeviceConfig {
    /// Names and values, in comparison order.
    pub(crate) fn fields(&self, place: &MemoryLocation) -> Vec<Field> {
        let device = match place {
            MemoryLocation::Cuda { .. } => "cuda",
            MemoryLocation::Twin => "twin",
        };
        let mut fields = vec![("device", device.to_owned()), ("ranks", self.ranks.to_string())];
        fields.extend(self.agreed());
        fields.extend([
            ("placement", counts(self.placement().uneven())),
            ("placement's layers", self.maps.len().to_string()),
            ("placement's digest", digest(&self.maps)),
        ]);
        fields
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::options::types::{DeviceLayout, IdWidth, ScaleLayout, TransferPath};
    use crate::elements::dtype::DType;
    use crate::elements::float8::Float8;
    use crate::elements::token_type::{BlockScaled, ScaleType, TokenType};
    use crate::shape::agreement::{agree, encode};
    use crate::shape::config::Weighting;
    use std::sync::Arc;

    type Change = fn(&mut DeviceConfig);

    fn maps(ranks: &[&[u32]]) -> Arc<[ExpertMap]> {
        let ranks: Vec<Vec<u32>> = ranks.iter().map(|held| held.to_vec()).collect();
        [ExpertMap::new(8, &ranks).unwrap()].into()
    }

    fn scaled(block: u32, scale: ScaleType) -> TokenType {
        TokenType::Scaled(BlockScaled { format: Float8::E4M3, scale, block })
    }

    #[test]
    fn every_field_is_compared_and_named() {
        let ours = DeviceConfig::new(2, 0, 8, 2).sized(16, 64).tokens(scaled(64, ScaleType::F32));
        let disagreement = |theirs: &DeviceConfig| {
            let all = [
                encode(&ours.fields(&MemoryLocation::Twin)),
                encode(&theirs.fields(&MemoryLocation::Twin)),
            ];
            agree(&ours.fields(&MemoryLocation::Twin), 2, &all).err().map(|error| error.to_string())
        };
        assert_eq!(disagreement(&DeviceConfig { rank: 1, ..ours.clone() }), None);
        let changes: [(&str, Change); 23] = [
            ("ranks", |c| c.ranks = 4),
            ("experts", |c| c.experts = 9),
            ("placement", |c| c.maps = maps(&[&[0, 1, 2], &[3, 4, 5, 6, 7]])),
            ("placement's layers", |c| c.maps = maps(&[&[0, 1, 2, 3], &[4, 5, 6, 7]])),
            ("top_k", |c| c.top_k = 1),
            ("hidden", |c| c.hidden = 80),
            ("max_tokens", |c| c.max_tokens = 17),
            ("channels", |c| c.channels = 1),
            ("token_dtype", |c| c.token_type = DType::F16.into()),
            ("wire_dtype", |c| c.wire = DType::F16.into()),
            ("scale_dtype", |c| c.wire = scaled(64, ScaleType::Ue8m0)),
            ("block", |c| c.wire = scaled(32, ScaleType::F32)),
            ("combine_dtype", |c| c.combine_dtype = DType::F16),
            ("reply_dtype", |c| c.reply_dtype = DType::F32),
            ("output_dtype", |c| c.output_dtype = DType::F32),
            ("ids_dtype", |c| c.ids = IdWidth::I32),
            ("layout", |c| c.layout = DeviceLayout::Indexed),
            ("pad_to", |c| c.layout = DeviceLayout::Contiguous { pad_to: 8 }),
            ("max_positions", |c| c.max_positions = Some(40)),
            ("scale_layout", |c| c.scale_layout = ScaleLayout::Column),
            ("weighting", |c| c.weighting = Weighting::AtExpert),
            ("path", |c| c.path = Some(TransferPath::Bandwidth)),
            ("max_bytes", |c| c.max_bytes = Some(1 << 30)),
        ];
        for (field, change) in changes {
            let mut theirs = ours.clone();
            change(&mut theirs);
            let message = disagreement(&theirs).unwrap();
            assert!(message.contains(&format!("rank 1 has {field} ")), "{field}: {message}");
        }
    }

    #[test]
    fn maps_with_the_same_numbers_are_compared_by_their_digest() {
        let config = |maps| DeviceConfig { maps, ..DeviceConfig::new(2, 0, 8, 2) };
        let ours = config(maps(&[&[0, 1, 2, 3], &[4, 5, 6, 7, 0]]));
        let theirs = config(maps(&[&[0, 1, 2, 3], &[4, 5, 7, 6, 0]]));
        let fields = ours.fields(&MemoryLocation::Twin);
        let all = [encode(&fields), encode(&theirs.fields(&MemoryLocation::Twin))];
        let message = agree(&fields, 2, &all).unwrap_err().to_string();
        assert!(message.contains("rank 1 has placement's digest "), "{message}");
        // The layer order counts.
        let both = [&*ours.maps, &*theirs.maps].concat();
        let swapped = [&*theirs.maps, &*ours.maps].concat();
        assert_ne!(digest(&both), digest(&swapped));
    }
}
