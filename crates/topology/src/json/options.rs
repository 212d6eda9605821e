//! Builder options in a file, in order.

use crate::describe::Options;
use crate::error::{Error, Result};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// Names and values in order, so that duplicates are detected; a map would drop them.
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

pub(crate) fn options_from_json(kind: &str, options: &OptionList) -> Result<Options> {
    let mut given = BTreeMap::new();
    for (name, value) in &options.0 {
        let fail = |reason| Err(Error::Field { at: format!("{kind}.{name}"), reason });
        let Some(number) = value.as_f64() else {
            return fail(format!("{value} is not a number"));
        };
        if given.insert(name.clone(), number).is_some() {
            return fail("given twice".to_owned());
        }
    }
    Ok(Options { spec: kind.to_owned(), given, known: Vec::new() })
}
