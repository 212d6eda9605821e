//! Generator for `python/weft/moe/options.py`: the options as Python declares them.

use super::declare::{Audience, Keyword};
use std::fmt::Write as _;

/// Maximum line width in columns.
const WIDTH: usize = 100;
const INDENT: &str = "    ";

impl Keyword {
    /// True if `weft.moe.device.config.make` derives it, so that it has no default.
    fn is_derived(&self) -> bool {
        self.audience == Audience::Derived || self.native != self.argument
    }

    /// Entry in a dictionary whose keys are mostly optional.
    fn entry(&self, kind: &str) -> String {
        let Keyword { name, .. } = self;
        match self.audience {
            Audience::Required => format!("{INDENT}{name}: Required[{kind}]\n"),
            _ => format!("{INDENT}{name}: {kind}\n"),
        }
    }

    fn field(&self) -> String {
        let Keyword { name, native, default, .. } = self;
        if self.is_derived() || self.audience == Audience::Required {
            format!("{INDENT}{name}: {native}\n")
        } else {
            format!("{INDENT}{name}: {native} = {default}\n")
        }
    }
}

/// Python module text.
pub fn python_module(keywords: &[Keyword]) -> String {
    let dictionary = |name: &str, about: &str, has: fn(&Keyword) -> bool, native: bool| {
        let kind = |keyword: &Keyword| {
            keyword.entry(if native { &keyword.native } else { &keyword.argument })
        };
        let entries: String = keywords.iter().filter(|keyword| has(keyword)).map(kind).collect();
        format!(
            "\n\nclass {name}(TypedDict, total=False):\n{INDENT}\"\"\"{about}\"\"\"\n\n{entries}"
        )
    };
    let mut text = String::from(
        "\"\"\"Device all-to-all options.\n\n\
         Generated from crates/moe/src/device/options/mod.rs, which declares them; a test compares both.\n\
         \"\"\"\n\n\
         from __future__ import annotations\n\n\
         from dataclasses import dataclass\n\
         from typing import Final, Literal, Required, TypedDict\n\n\
         __all__ = [\"ARGUMENTS\", \"DeviceOnly\", \"Native\", \"Options\", \"Plain\"]\n",
    );
    text += &dictionary("Native", "Keywords for the native class.", |_| true, true);
    let plain = |keyword: &Keyword| !keyword.is_derived();
    text += &dictionary("Plain", "Arguments that the native class takes unchanged.", plain, false);
    let device = |keyword: &Keyword| keyword.audience == Audience::Device;
    text += &dictionary("DeviceOnly", "Arguments for only device all-to-alls.", device, false);
    let fields: String = keywords.iter().map(Keyword::field).collect();
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "\n\n@dataclass(frozen=True, kw_only=True)\nclass Options:\n{INDENT}\"\"\"The native class's \
         keywords; derived ones have no default.\"\"\"\n\n{fields}"
    );
    text += "\n\n#: Argument documentation, in docstring form.\nARGUMENTS: Final = \"\"\"\\\n";
    keywords.iter().filter(|keyword| keyword.audience != Audience::Derived).for_each(|keyword| {
        text += &wrapped(&format!("{}: {}", keyword.name, keyword.about));
    });
    text += "\"\"\"\n";
    text
}

/// A docstring section paragraph, with a hanging indent.
fn wrapped(paragraph: &str) -> String {
    let (mut text, mut line) = (String::new(), INDENT.to_owned());
    let mut begun = false;
    for word in paragraph.split_whitespace() {
        if begun && line.len() + 1 + word.len() > WIDTH {
            text += &line;
            text.push('\n');
            line = INDENT.repeat(2);
            begun = false;
        }
        if begun {
            line.push(' ');
        }
        line += word;
        begun = true;
    }
    text + &line + "\n"
}
