//! Options of a builder in a file, in their order.

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// Names and values in their order, so that duplicates are detected; a map would drop them.
pub struct OptionList(pub Vec<(String, Value)>);

impl<'de> Deserialize<'de> for OptionList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<OptionList, D::Error> {
        deserializer.deserialize_map(OptionListVisitor)
    }
}

struct OptionListVisitor;

impl<'de> Visitor<'de> for OptionListVisitor {
    type Value = OptionList;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a builder's options")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<OptionList, A::Error> {
        let mut given = Vec::new();
        while let Some(option) = map.next_entry()? {
            given.push(option);
        }
        Ok(OptionList(given))
    }
}
