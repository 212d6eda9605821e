//! A builder's options as they stand in a file.

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// Names and values in their order. A map would keep the last of two values of one name without a word.
pub struct Given(pub Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Given {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Given, D::Error> {
        deserializer.deserialize_map(Names)
    }
}

struct Names;

impl<'de> Visitor<'de> for Names {
    type Value = Given;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a builder's options")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Given, A::Error> {
        let mut given = Vec::new();
        while let Some(option) = map.next_entry()? {
            given.push(option);
        }
        Ok(Given(given))
    }
}
