//! What kernels are compiled with: a shape in the form of macros.

use crate::device::areas::{CHUNK, DeviceArea};
use crate::device::config::{DeviceLayout, Path};
use crate::device::shape::DeviceShape;
use crate::dtype::DType;
use crate::float8::Float8;
use crate::shape::Weighting;
use crate::token_type::{ScaleType, TokenType};

impl DeviceShape {
    /// The macros of the kernels, names and values. They are the same on every rank. Offsets of areas and
    /// sizes of channels are `unsigned long long`, the rest `int`.
    pub fn defines(&self) -> Vec<(String, String)> {
        let (config, areas) = (self.config(), self.areas());
        let (layout, pad_to) = match config.layout {
            DeviceLayout::Contiguous { pad_to } => (0, pad_to),
            DeviceLayout::Indexed => (1, 1),
            DeviceLayout::Padded { .. } => (2, 1),
        };
        let path = match self.path() {
            Path::Packets => 0,
            Path::Latency => 1,
            Path::Bandwidth => 2,
        };
        let (scale_type, block) = match config.scaled() {
            None => (0, 0),
            Some(scaled) if scaled.scale == ScaleType::F32 => (1, scaled.block),
            Some(scaled) => (2, scaled.block),
        };
        let numbers: [(&str, u64); 29] = [
            ("RANKS", config.ranks.into()),
            ("EXPERTS", config.experts.into()),
            ("LOCAL_EXPERTS", self.local_experts().into()),
            ("TOP_K", config.top_k.into()),
            ("HIDDEN", config.hidden.into()),
            ("MAX_TOKENS", config.max_tokens.into()),
            ("TOKEN_TYPE", token_code(config.token_type)),
            ("WIRE_TYPE", token_code(config.wire)),
            ("CAST", config.casts().into()),
            ("SCALE_TYPE", scale_type),
            ("SCALE_BLOCK", block.into()),
            ("SCALES", self.scales().into()),
            ("ID_BYTES", config.ids.bytes() as u64),
            ("LAYOUT", layout),
            ("PAD_TO", pad_to.into()),
            ("EXPERT_CAPACITY", self.expert_capacity().into()),
            ("POSITIONS", self.positions().into()),
            ("COMBINE_TYPE", code(config.combine_dtype)),
            ("ANSWER_TYPE", code(config.answer_dtype)),
            ("OUTPUT_TYPE", code(config.output_dtype)),
            ("WEIGHT_AT_COMBINE", (config.weighting == Weighting::AtCombine).into()),
            ("PATH", path),
            ("ROW_SCALES_AT", areas.row_scales_at),
            ("ROW_META_AT", areas.row_meta_at),
            ("ROW_BYTES", areas.row_bytes),
            ("ROW_STRIDE", areas.row_stride),
            ("ANSWER_BYTES", areas.answer_bytes),
            ("ANSWER_STRIDE", areas.answer_stride),
            ("CHUNK", CHUNK.into()),
        ];
        let mut defines: Vec<(String, String)> = numbers
            .into_iter()
            .map(|(name, value)| (format!("WEFT_{name}"), value.to_string()))
            .collect();
        let mut long = |name: String, value: u64| defines.push((name, format!("{value}ull")));
        long("WEFT_CHANNEL_BYTES".into(), areas.channel_bytes());
        for area in DeviceArea::ALL {
            long(format!("WEFT_{}_AT", area.name()), areas.extent(area).offset);
        }
        defines
    }
}

fn code(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => 0,
        DType::BF16 => 1,
        DType::F16 => 2,
    }
}

fn token_code(token_type: TokenType) -> u64 {
    match token_type {
        TokenType::Plain(dtype) => code(dtype),
        TokenType::Scaled(scaled) if scaled.format == Float8::E4M3 => 3,
        TokenType::Scaled(_) => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::config::{DeviceConfig, IdWidth};
    use crate::token_type::BlockScaled;
    use std::collections::HashMap;

    #[test]
    fn every_choice_has_its_number() {
        let scaled = BlockScaled { format: Float8::E4M3, scale: ScaleType::Ue8m0, block: 64 };
        let config = DeviceConfig {
            token_type: DType::F16.into(),
            wire: TokenType::Scaled(scaled),
            combine_dtype: DType::F16,
            answer_dtype: DType::F32,
            ids: IdWidth::I32,
            layout: DeviceLayout::Padded { expert_capacity: Some(9) },
            weighting: Weighting::AtExpert,
            path: Some(Path::Bandwidth),
            ..DeviceConfig::new(4, 1, 10, 3).sized(100, 144)
        };
        let shape = DeviceShape::new(config).unwrap();
        let defines: HashMap<String, String> = shape.defines().into_iter().collect();
        assert_eq!(defines.len(), shape.defines().len(), "names are distinct");
        for (name, value) in [
            ("RANKS", "4"),
            ("LOCAL_EXPERTS", "3"),
            ("TOKEN_TYPE", "2"),
            ("WIRE_TYPE", "3"),
            ("CAST", "1"),
            ("SCALE_TYPE", "2"),
            ("SCALE_BLOCK", "64"),
            ("SCALES", "3"),
            ("ID_BYTES", "4"),
            ("LAYOUT", "2"),
            ("PAD_TO", "1"),
            ("EXPERT_CAPACITY", "9"),
            ("POSITIONS", "27"),
            ("COMBINE_TYPE", "2"),
            ("ANSWER_TYPE", "0"),
            ("OUTPUT_TYPE", "1"),
            ("WEIGHT_AT_COMBINE", "0"),
            ("PATH", "2"),
            ("ROW_SCALES_AT", "144"),
            ("ROW_META_AT", "160"),
            ("ROW_BYTES", "192"),
            ("ROW_STRIDE", "256"),
            ("CHUNK", "64"),
            ("COUNTS_AT", "0ull"),
            ("SIGNALS_AT", "256ull"),
            ("ROW_FLAGS_AT", "512ull"),
        ] {
            assert_eq!(defines[&format!("WEFT_{name}")], value, "{name}");
        }
        for area in DeviceArea::ALL {
            assert!(defines.contains_key(&format!("WEFT_{}_AT", area.name())));
        }
    }
}
