//! Kernel macros: a shape as names and values.

use crate::device::options::types::TransferPath;
use crate::device::shape::DeviceShape;
use crate::device::shape::channel_layout::{CHUNK, DeviceArea};
use crate::device::shape::replica_table::ROWS_BITS;
use crate::shape::expert_map::MOST_REPLICAS;

impl DeviceShape {
    /// Kernel macros, as names and values: from the options, and derived from the shape. They are equal on
    /// every rank. Area offsets and channel sizes are `unsigned long long`, the others `int`.
    pub fn defines(&self) -> Vec<(String, String)> {
        let (config, areas) = (self.config(), self.channel_layout());
        let derived = [
            ("RANKS", config.ranks.into()),
            ("EXPERTS", self.placement().experts().into()),
            ("MAPPED", (self.layers() > 0).into()),
            ("TURNS", MOST_REPLICAS.into()),
            ("ROWS_BITS", ROWS_BITS.into()),
            ("LOCAL_EXPERTS", self.local_experts().into()),
            ("CAST", config.casts().into()),
            ("SCALES", self.scales().into()),
            ("EXPERT_CAPACITY", self.expert_capacity().into()),
            ("POSITIONS", self.positions().into()),
            ("PATH", path_code(self.path())),
            ("ROW_SCALES_AT", areas.row_scales_at),
            ("ROW_META_AT", areas.row_meta_at),
            ("ROW_BYTES", areas.row_bytes),
            ("ROW_STRIDE", areas.row_stride),
            ("REPLY_BYTES", areas.reply_bytes),
            ("REPLY_STRIDE", areas.reply_stride),
            ("CHUNK", CHUNK.into()),
        ];
        let numbers = config.numbers().into_iter().chain(derived);
        let mut defines: Vec<(String, String)> =
            numbers.map(|(name, value)| (format!("WEFT_{name}"), value.to_string())).collect();
        if let Some(firsts) = self.placement().uneven() {
            let firsts: Vec<String> = firsts.iter().map(u32::to_string).collect();
            defines.push(("WEFT_FIRST_EXPERTS".into(), firsts.join(",")));
        }
        let mut long = |name: String, value: u64| defines.push((name, format!("{value}ull")));
        long("WEFT_CHANNEL_BYTES".into(), areas.channel_bytes());
        for area in DeviceArea::ALL {
            long(format!("WEFT_{}_AT", area.name()), areas.extent(area).offset);
        }
        defines
    }
}

fn path_code(path: TransferPath) -> u64 {
    match path {
        TransferPath::Packets => 0,
        TransferPath::Latency => 1,
        TransferPath::Bandwidth => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::options::DeviceConfig;
    use crate::device::options::types::{DeviceLayout, IdWidth, ScaleLayout};
    use crate::elements::dtype::DType;
    use crate::elements::float8::Float8;
    use crate::elements::token_type::{BlockScaled, ScaleType, TokenType};
    use crate::shape::config::Weighting;
    use std::collections::HashMap;

    #[test]
    fn every_choice_has_its_number() {
        let scaled = BlockScaled { format: Float8::E4M3, scale: ScaleType::Ue8m0, block: 64 };
        let config = DeviceConfig {
            token_type: DType::F16.into(),
            wire: TokenType::Scaled(scaled),
            combine_dtype: DType::F16,
            reply_dtype: DType::F32,
            ids: IdWidth::I32,
            layout: DeviceLayout::Padded { expert_capacity: Some(9) },
            scale_layout: ScaleLayout::ColumnPacked,
            weighting: Weighting::AtExpert,
            path: Some(TransferPath::Bandwidth),
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
            ("SCALE_LAYOUT", "2"),
            ("ID_BYTES", "4"),
            ("LAYOUT", "2"),
            ("PAD_TO", "1"),
            ("EXPERT_CAPACITY", "9"),
            ("POSITIONS", "27"),
            ("COMBINE_TYPE", "2"),
            ("REPLY_TYPE", "0"),
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
