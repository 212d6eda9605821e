//! Configuration agreement between ranks, checked before any allocation.
//!
//! Each rank encodes its configuration as text, with a `name=value` line for each field, for example
//! `top_k=8`. All ranks gather all texts, and each compares them with its own. So the first difference is
//! reported by name, also between Weft versions.

use crate::elements::token_type::TokenType;
use crate::error::Error;
use crate::shape::config::{CombineMode, Config, Layout, Weighting};
use crate::shape::placement::Placement;

/// Longest text from a peer in an error, in characters.
const MOST_SHOWN: usize = 40;
const ABSENT: &str = "none";

/// A field's name and value.
pub(crate) type Field = (&'static str, String);

/// Encoded fields, as sent to the other ranks.
pub(crate) fn encode(fields: &[Field]) -> Vec<u8> {
    fields.iter().map(|(name, value)| format!("{name}={value}\n")).collect::<String>().into_bytes()
}

/// Compares this rank's fields with those that all `ranks` encoded; see [`Config::agree`].
pub(crate) fn agree(fields: &[Field], ranks: u32, encoded: &[Vec<u8>]) -> Result<(), Error> {
    let (expected, given) = (ranks as usize, encoded.len());
    for (peer, theirs) in (0..).zip(encoded) {
        compare(fields, peer, &String::from_utf8_lossy(theirs))?;
    }
    if given != expected {
        return Err(Error::WrongLength { what: "the ranks' configurations", expected, given });
    }
    Ok(())
}

fn compare(fields: &[Field], peer: u32, encoded: &str) -> Result<(), Error> {
    let differ = |field: &str, ours: &str, theirs: &str| {
        let shown = |text: &str| text.chars().take(MOST_SHOWN).collect();
        let (field, ours, theirs) = (shown(field), shown(ours), shown(theirs));
        Err(Error::Disagreement { peer, field, ours, theirs })
    };
    let mut lines = encoded.lines();
    for (name, value) in fields {
        match lines.next().map(|line| line.split_once('=').unwrap_or((line, ""))) {
            Some((field, theirs)) if field == *name && theirs == value => {}
            Some((field, theirs)) if field == *name => return differ(name, value, theirs),
            _ => return differ(name, value, ABSENT),
        }
    }
    lines.next().map_or(Ok(()), |line| {
        let (field, theirs) = line.split_once('=').unwrap_or((line, ""));
        differ(field, ABSENT, theirs)
    })
}

/// Experts on each rank, or `even` for the default placement.
pub(crate) fn counts(firsts: Option<&[u32]>) -> String {
    let counts = |firsts: &[u32]| -> Vec<String> {
        firsts.windows(2).map(|ends| (ends[1] - ends[0]).to_string()).collect()
    };
    firsts.map_or("even".to_owned(), |firsts| counts(firsts).join(","))
}

impl Config {
    /// Encoded fields for [`Config::agree`].
    pub fn encode(&self) -> Vec<u8> {
        encode(&self.fields())
    }

    /// Compares this configuration with those that all ranks encoded, in rank order, this rank's included.
    ///
    /// # Errors
    /// [`Error::Disagreement`] with the first rank and the first field that differ; [`Error::WrongLength`] if
    /// there is not one text per rank.
    pub fn agree(&self, encoded: &[Vec<u8>]) -> Result<(), Error> {
        agree(&self.fields(), self.ranks, encoded)
    }

    /// Names and values, in comparison order.
    fn fields(&self) -> [Field; 20] {
        let Config { ranks, rank: _, experts, top_k, hidden, max_tokens, .. } = self;
        let layout = match self.layout {
            Layout::Contiguous { .. } => "contiguous",
            Layout::Indexed => "indexed",
        };
        let combine = match self.combine {
            CombineMode::ReduceAtExpert => "reduce",
            CombineMode::PerExpert => "per_expert",
        };
        let weighting = match self.weighting {
            Weighting::AtCombine => "combine",
            Weighting::AtExpert => "expert",
        };
        let scale = match self.token_type {
            TokenType::Plain(_) => "none".to_owned(),
            TokenType::Scaled(scaled) => scaled.scale.to_string(),
        };
        let or_none = |limit: Option<u64>| limit.map_or("none".to_owned(), |n| n.to_string());
        [
            ("ranks", ranks.to_string()),
            ("experts", experts.to_string()),
            ("placement", counts(self.placement.as_ref().and_then(Placement::uneven))),
            ("top_k", top_k.to_string()),
            ("hidden", hidden.to_string()),
            ("max_tokens", max_tokens.to_string()),
            // Limited to max_tokens, as in `Shape::new`.
            ("private_rows", self.private_rows.min(*max_tokens).to_string()),
            ("max_receive_rows", or_none(self.max_receive_rows.map(u64::from))),
            ("channels", self.channels.to_string()),
            ("token_dtype", self.token_type.to_string()),
            ("scale_dtype", scale),
            ("block", or_none(self.token_type.block().map(u64::from))),
            ("combine_dtype", self.combine_dtype.to_string()),
            ("reply_dtype", self.reply_dtype.to_string()),
            ("output_dtype", self.output_dtype.to_string()),
            ("layout", layout.to_owned()),
            ("pad_to", self.layout.pad_to().to_string()),
            ("combine", combine.to_owned()),
            ("weighting", weighting.to_owned()),
            ("max_bytes", or_none(self.max_bytes)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elements::dtype::DType;
    use crate::elements::float8::Float8;
    use crate::elements::token_type::{BlockScaled, ScaleType};
    use proptest::prelude::*;

    type Change = fn(&mut Config);

    fn config() -> Config {
        Config::new(3, 0, 8, 2).sized(16, 64)
    }

    fn disagreement(theirs: Vec<u8>) -> Option<String> {
        let all = [config().encode(), theirs, config().encode()];
        config().agree(&all).err().map(|error| error.to_string())
    }

    #[test]
    fn equal_configurations_agree_whatever_the_rank() {
        assert_eq!(disagreement(Config { rank: 1, ..config() }.encode()), None);
        // Both are limited to 16.
        assert_eq!(disagreement(Config { private_rows: 99, ..config() }.encode()), None);
    }

    #[test]
    fn every_field_is_compared_and_named() {
        let changes: [(&str, Change); 18] = [
            ("ranks", |c| c.ranks = 4),
            ("experts", |c| c.experts = 9),
            ("placement", |c| c.placement = Some(Placement::of_counts(&[2, 2, 4]))),
            ("top_k", |c| c.top_k = 1),
            ("hidden", |c| c.hidden = 65),
            ("max_tokens", |c| c.max_tokens = 17),
            ("private_rows", |c| c.private_rows = 5),
            ("max_receive_rows", |c| c.max_receive_rows = Some(40)),
            ("channels", |c| c.channels = 1),
            ("token_dtype", |c| c.token_type = DType::F16.into()),
            ("combine_dtype", |c| c.combine_dtype = DType::BF16),
            ("reply_dtype", |c| c.reply_dtype = DType::BF16),
            ("output_dtype", |c| c.output_dtype = DType::BF16),
            ("layout", |c| c.layout = Layout::Indexed),
            ("pad_to", |c| c.layout = Layout::Contiguous { pad_to: 8 }),
            ("combine", |c| c.combine = CombineMode::PerExpert),
            ("weighting", |c| c.weighting = Weighting::AtExpert),
            ("max_bytes", |c| c.max_bytes = Some(1 << 30)),
        ];
        for (field, change) in changes {
            let mut theirs = config();
            change(&mut theirs);
            let message = disagreement(theirs.encode()).unwrap();
            assert!(message.contains(&format!("rank 1 has {field} ")), "{message}");
        }
        let message =
            disagreement(Config { hidden: 65, channels: 9, ..config() }.encode()).unwrap();
        assert!(message.contains("hidden 65, this rank 64"), "{message}");
    }

    #[test]
    fn scales_are_compared() {
        let (format, scale) = (Float8::E4M3, ScaleType::F32);
        let ours = BlockScaled { format, scale, block: 128 };
        let encode = |scaled| {
            let token_type = TokenType::Scaled(scaled);
            Config { token_type, ..config() }.encode()
        };
        for (field, theirs) in [
            ("token_dtype float8_e5m2", BlockScaled { format: Float8::E5M2, ..ours }),
            ("scale_dtype float8_e8m0fnu", BlockScaled { scale: ScaleType::Ue8m0, ..ours }),
            ("block 64", BlockScaled { block: 64, ..ours }),
        ] {
            let all = [encode(ours), encode(theirs), encode(ours)];
            let config = Config { token_type: TokenType::Scaled(ours), ..config() };
            let message = config.agree(&all).unwrap_err().to_string();
            assert!(message.contains(&format!("rank 1 has {field}, ")), "{message}");
        }
    }

    #[test]
    fn a_missing_or_added_field_is_named() {
        let mut more = config().encode();
        more.extend(b"colour=blue\n");
        let message = disagreement(more).unwrap();
        assert!(message.contains("colour blue, this rank none"), "{message}");
        let message = disagreement(Vec::new()).unwrap();
        assert!(message.contains("ranks none, this rank 3"), "{message}");
    }

    #[test]
    fn a_missing_rank_is_an_error() {
        let two = [config().encode(), config().encode()];
        assert!(matches!(config().agree(&two), Err(Error::WrongLength { given: 2, .. })));
    }

    proptest! {
        #[test]
        fn garbage_disagrees_and_is_truncated_in_the_error(
            garbage in prop::collection::vec(any::<u8>(), 0..2000),
        ) {
            prop_assert!(disagreement(garbage).unwrap().len() < 400);
        }
    }
}
