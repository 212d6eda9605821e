use super::*;
use crate::device::shape::DeviceShape;
use crate::shape::agreement::{agree, encode};
use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;

fn required() -> Keywords {
    let given = [("experts", 8), ("top_k", 2), ("hidden", 256), ("max_tokens", 16)];
    given.map(|(name, number)| (name.to_owned(), OptionValue::Integer(number))).into()
}

fn read(changes: &[(&str, OptionValue)]) -> Result<Options, OptionError> {
    let mut given = required();
    given.extend(changes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    Options::read(&given)
}

fn text(name: &str) -> OptionValue {
    OptionValue::Text(name.to_owned())
}

/// A value other than the default, with the options that it requires.
fn another(keyword: &Keyword) -> Vec<(&'static str, OptionValue)> {
    let Keyword { name, .. } = *keyword;
    let float8 = [("wire_dtype", text("float8_e4m3fn"))];
    match name {
        "scales" => {
            let scales = OptionValue::Scales(
                "float8_e8m0fnu".to_owned(),
                Box::new(OptionValue::Integer(64)),
            );
            [&float8[..], &[("scales", scales)]].concat()
        }
        "expert_capacity" => vec![("layout", text("padded")), (name, OptionValue::Integer(9))],
        _ => {
            let value = match &keyword.default {
                OptionValue::Flag(flag) => OptionValue::Flag(!flag),
                OptionValue::Float(number) => OptionValue::Float(number + 1.0),
                OptionValue::Integer(number) => OptionValue::Integer(number + 2),
                OptionValue::None if keyword.native.starts_with("int") => OptionValue::Integer(3),
                _ => text(match name {
                    "ids_dtype" => "int32",
                    "layout" => "indexed",
                    "scale_layout" => "column",
                    "weighting" => "expert",
                    "path" => "bandwidth",
                    "memory" => "ipc",
                    _ => "float16",
                }),
            };
            vec![(name, value)]
        }
    }
}

#[test]
fn python_has_what_is_declared() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../python/weft/moe/options.py");
    let expected = python_module(&keywords());
    if std::env::var_os("BLESS").is_some() {
        fs::write(&path, &expected).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "options have changed: run this test with BLESS=1");
}

#[test]
fn every_keyword_changes_what_it_is_declared_for() {
    let place = MemoryLocation::Twin;
    let show = |options: &Options| {
        let (config, creation) = (options.config(2, 0), &options.creation);
        (config, format!("{:?} {creation:?}", options.setup(place)))
    };
    let (config, rest) = show(&read(&[]).unwrap());
    let agreed: Vec<_> = DeviceConfig::keywords().iter().map(|keyword| keyword.name).collect();
    for keyword in keywords() {
        let (other, other_rest) = show(&read(&another(&keyword)).unwrap());
        if !agreed.contains(&keyword.name) {
            assert_ne!(other_rest, rest, "{}", keyword.name);
            continue;
        }
        let fields = config.fields(&place);
        let all = [encode(&fields), encode(&other.fields(&place))];
        assert!(agree(&fields, 2, &all).is_err(), "ranks compare {}", keyword.name);
    }
}

#[test]
fn every_macro_of_an_option_follows_it() {
    let base = read(&[]).unwrap().config(2, 0);
    let mut changed = HashSet::new();
    for keyword in DeviceConfig::keywords() {
        let other = read(&another(&keyword)).unwrap().config(2, 0);
        let pairs = base.numbers().into_iter().zip(other.numbers());
        changed.extend(pairs.filter(|(one, other)| one != other).map(|((name, _), _)| name));
    }
    let declared: HashSet<&str> = base.numbers().into_iter().map(|(name, _)| name).collect();
    assert_eq!(changed, declared);
    let defines = DeviceShape::new(base.clone()).unwrap().defines();
    for (name, value) in base.numbers() {
        assert!(defines.contains(&(format!("WEFT_{name}"), value.to_string())), "{name}");
    }
}

#[test]
fn defaults_are_those_of_rust() {
    let options = read(&[]).unwrap();
    assert_eq!(options.config(2, 1), DeviceConfig::new(2, 1, 8, 2).sized(16, 256));
    let shown = |setup: &DeviceSetup| format!("{setup:?}");
    assert_eq!(
        shown(&options.setup(MemoryLocation::Twin)),
        shown(&DeviceSetup::new(MemoryLocation::Twin))
    );
    // A default that is passed explicitly has no effect.
    for keyword in keywords() {
        let given = required().remove(keyword.name).unwrap_or(keyword.default);
        assert_eq!(read(&[(keyword.name, given)]).unwrap().config(2, 1), options.config(2, 1));
    }
}

#[test]
fn an_invalid_option_is_rejected_by_name() {
    let refusal = |name: &str, given: OptionValue| read(&[(name, given)]).unwrap_err().to_string();
    let too_many = OptionValue::LargeInteger("9".repeat(60));
    for (name, given, words) in [
        (
            "experts",
            OptionValue::Integer(-1),
            "experts=-1: expected a whole number from 0 to 4294967295",
        ),
        (
            "max_bytes",
            OptionValue::Integer(-1),
            "from 0 to 18446744073709551615; pass one of those",
        ),
        ("max_tokens", too_many, "max_tokens=999"),
        ("experts", text("many"), "experts=\"many\": expected a whole number; pass one"),
        ("concurrent", OptionValue::Integer(1), "concurrent=1: expected True or False"),
        ("layout", text("sideways"), "layout is \"sideways\": contiguous and indexed and padded"),
        ("expert_capacity", OptionValue::Integer(9), "is for layout='padded', not \"contiguous\""),
        ("path", text("scenic"), "path is \"scenic\": packets and latency and bandwidth are known"),
        ("token_dtype", text("float64"), "dtype \"float64\" is not supported: float32, bfloat16"),
        (
            "skew_timeout",
            OptionValue::Float(-1.0),
            "skew_timeout is -1: expected seconds from 0 on",
        ),
        ("scales", OptionValue::Integer(1), "scales=1: expected a dtype and a whole number"),
        ("memory", text("twin"), "memory is \"twin\": fd and ipc are known"),
        ("colour", text("blue"), "colour is not an option"),
    ] {
        let refusal = refusal(name, given);
        assert!(refusal.contains(words), "{refusal}");
    }
    let mut given = required();
    given.remove("top_k");
    assert_eq!(
        Options::read(&given).unwrap_err().to_string(),
        "top_k is missing: it has no default"
    );
}
