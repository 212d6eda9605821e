//! Limits for commands: what all ranks have agreed at construction.

use super::command::{Command, CommandError, CommandFields, HOLD, Kind, Place, Problem, Target};
use weft_control::Rank;

/// Maximum words that a rank has for each source.
pub const MAX_WORDS: usize = 64;

/// Peers and fixed offsets that a SCATTER names by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Template {
    /// Members, each another peer.
    pub members: Vec<TemplateMember>,
}

/// One peer in a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateMember {
    /// The peer.
    pub peer: Rank,
    /// Added to the command's source offset.
    pub source_offset: u64,
    /// Added to the command's destination offset.
    pub destination_offset: u64,
}

/// Limits that admit or refuse a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// This rank.
    pub rank: Rank,
    /// World size.
    pub ranks: u32,
    /// Window lengths in bytes, by window and rank; 0 if a rank has none.
    pub windows: Vec<Vec<u64>>,
    /// By word: true if rounds are credited by RELEASE.
    pub holds: Vec<bool>,
    /// Longest put in bytes: one part on every route.
    pub max_put_bytes: u64,
    /// Templates.
    pub templates: Vec<Template>,
    /// Lengths that the list holds.
    pub list_lengths: u32,
}

impl Limits {
    /// Command from a kernel.
    ///
    /// # Errors
    /// [`CommandError`], with the command's fields.
    pub fn check(&self, ticket: u64, fields: &CommandFields) -> Result<Command, CommandError> {
        let admitted = self.admit(fields).and_then(|command| {
            if let Command::Scatter { template, count, .. } = command {
                let windows = self.scatter_windows(fields)?;
                let members = &self.templates[usize::from(template)].members[..count as usize];
                members.iter().try_for_each(|member| windows.check(member, 0).map(drop))?;
            }
            Ok(command)
        });
        admitted.map_err(|problem| CommandError { ticket, fields: *fields, problem })
    }

    /// The command, or the first field that is out of range. A SCATTER's members are left to
    /// [`Limits::scatter_windows`].
    pub(super) fn admit(&self, fields: &CommandFields) -> Result<Command, Problem> {
        let kind = Kind::from_number(fields.kind)
            .ok_or_else(|| within("kind", fields.kind.into(), 1, Kind::ALL.len() as u64))?;
        check_unused(kind, fields)?;
        self.check_word(fields.word)?;
        match kind {
            Kind::Put => {
                let peer = self.peer(fields.peer)?;
                let target = self.target(fields)?;
                check("length", fields.length, 1, self.max_put_bytes)?;
                let (source, destination) = self.places(fields, peer, fields.length)?;
                Ok(Command::Put { peer, target, source, destination, length: fields.length })
            }
            Kind::Signal => {
                Ok(Command::Signal { peer: self.peer(fields.peer)?, target: self.target(fields)? })
            }
            Kind::Scatter => self.scatter(fields),
            Kind::Release => {
                let (peer, hold) = (self.peer(fields.peer)?, self.holds[fields.word as usize]);
                check("hold, as the word has it,", hold.into(), 1, 1)?;
                check("count", fields.count.into(), 1, u32::MAX.into())?;
                Ok(Command::Release { peer, word: fields.word, count: fields.count })
            }
            Kind::Drained => Ok(Command::Drained { word: fields.word }),
        }
    }

    fn scatter(&self, fields: &CommandFields) -> Result<Command, Problem> {
        let template = self
            .templates
            .get(usize::from(fields.peer))
            .ok_or_else(|| below("template", fields.peer.into(), self.templates.len() as u64))?;
        let target = self.target(fields)?;
        check("count", fields.count.into(), 1, template.members.len() as u64)?;
        let most = u64::from(self.list_lengths).checked_sub(fields.count.into());
        let Some(most) = most else {
            return Err(below("list", fields.list.into(), 0));
        };
        check("list", fields.list.into(), 0, most)?;
        let (source, destination) = places_of(fields);
        let (count, list) = (fields.count, fields.list);
        Ok(Command::Scatter { template: fields.peer, target, source, destination, count, list })
    }

    /// A SCATTER's windows, with which each member is checked.
    ///
    /// # Errors
    /// [`Problem`] if there is no such window.
    pub fn scatter_windows(&self, fields: &CommandFields) -> Result<ScatterWindows<'_>, Problem> {
        let (source, destination) = places_of(fields);
        Ok(ScatterWindows {
            source: source.offset,
            source_bytes: self.window("source window", source.window)?[self.rank.index()],
            destination: destination.offset,
            destination_bytes: self.window("destination window", destination.window)?,
            max_put_bytes: self.max_put_bytes,
        })
    }

    fn peer(&self, peer: u16) -> Result<Rank, Problem> {
        check("peer", peer.into(), 0, u64::from(self.ranks) - 1)?;
        let rank = Rank(peer.into());
        if rank == self.rank {
            return Err(below("peer, this rank,", peer.into(), 0));
        }
        Ok(rank)
    }

    fn check_word(&self, word: u32) -> Result<(), Problem> {
        if (word as usize) < self.holds.len() {
            return Ok(());
        }
        Err(below("word", word.into(), self.holds.len() as u64))
    }

    fn target(&self, fields: &CommandFields) -> Result<Target, Problem> {
        let hold = self.holds[fields.word as usize];
        let flags = if hold { HOLD } else { 0 };
        check("flags", fields.flags.into(), flags.into(), flags.into())?;
        Ok(Target { word: fields.word, hold })
    }

    /// A put's source and destination, if the bytes are inside the windows.
    #[inline]
    fn places(
        &self,
        fields: &CommandFields,
        peer: Rank,
        length: u64,
    ) -> Result<(Place, Place), Problem> {
        let (source, destination) = places_of(fields);
        let bytes = self.window("source window", source.window)?[self.rank.index()];
        check_bytes("source offset", source.offset, length, bytes)?;
        let bytes = self.window("destination window", destination.window)?[peer.index()];
        check_bytes("destination offset", destination.offset, length, bytes)?;
        Ok((source, destination))
    }

    /// A window's lengths, by rank.
    #[inline]
    fn window(&self, field: &'static str, window: u16) -> Result<&[u64], Problem> {
        let lengths = self.windows.get(usize::from(window));
        let lengths = lengths.ok_or_else(|| below(field, window.into(), self.windows.len() as u64));
        Ok(lengths?)
    }
}

/// One SCATTER's windows, with the bytes that its members may read and write.
#[derive(Clone, Copy, Debug)]
pub struct ScatterWindows<'a> {
    /// Offset that the command has for the source.
    source: u64,
    source_bytes: u64,
    /// Offset that the command has for the destinations.
    destination: u64,
    /// By rank.
    destination_bytes: &'a [u64],
    max_put_bytes: u64,
}

impl ScatterWindows<'_> {
    /// Source and destination offsets for one member, whose length comes from the list.
    ///
    /// # Errors
    /// [`Problem`] if the length or the bytes are out of range.
    #[inline]
    pub fn check(&self, member: &TemplateMember, length: u32) -> Result<(u64, u64), Problem> {
        let length = u64::from(length);
        check("length in the list", length, 0, self.max_put_bytes)?;
        let source = self.source.saturating_add(member.source_offset);
        check_bytes("source offset", source, length, self.source_bytes)?;
        let destination = self.destination.saturating_add(member.destination_offset);
        let bytes = self.destination_bytes[member.peer.index()];
        check_bytes("destination offset", destination, length, bytes)?;
        Ok((source, destination))
    }
}

/// Checks that `length` bytes from an offset on are in a window with so many bytes.
#[inline]
fn check_bytes(field: &'static str, offset: u64, length: u64, bytes: u64) -> Result<(), Problem> {
    match bytes.checked_sub(length) {
        Some(most) => check(field, offset, 0, most),
        None => Err(below(field, offset, 0)),
    }
}

/// Fields that a kind does not use are 0.
#[inline]
fn check_unused(kind: Kind, fields: &CommandFields) -> Result<(), Problem> {
    let unused = kind_fields(kind, fields);
    let rest =
        unused.iter().fold(0, |rest, (used, _, value)| rest | if *used { 0 } else { *value });
    if rest == 0 { Ok(()) } else { Err(first_unused(kind, fields)) }
}

/// The first of these fields that is not 0.
#[cold]
fn first_unused(kind: Kind, fields: &CommandFields) -> Problem {
    let first = kind_fields(kind, fields).into_iter().find(|(used, _, value)| !used && *value != 0);
    let (_, field, value) = first.unwrap_or_default();
    within(field, value, 0, 0)
}

/// Fields that not all kinds use: whether this kind uses it, name and value.
#[inline(always)]
fn kind_fields(kind: Kind, fields: &CommandFields) -> [(bool, &'static str, u64); 10] {
    let (writes, copies) = match kind {
        Kind::Put | Kind::Scatter => (true, true),
        Kind::Signal => (true, false),
        Kind::Release | Kind::Drained => (false, false),
    };
    let counts = matches!(kind, Kind::Scatter | Kind::Release);
    [
        (false, "reserved", fields.reserved.into()),
        (writes, "flags", fields.flags.into()),
        (kind != Kind::Drained, "peer", fields.peer.into()),
        (kind == Kind::Put, "length", fields.length),
        (copies, "source window", fields.source_window.into()),
        (copies, "destination window", fields.destination_window.into()),
        (copies, "source offset", fields.source_offset),
        (copies, "destination offset", fields.destination_offset),
        (counts, "count", fields.count.into()),
        (kind == Kind::Scatter, "list", fields.list.into()),
    ]
}

fn places_of(fields: &CommandFields) -> (Place, Place) {
    let source = Place { window: fields.source_window, offset: fields.source_offset };
    let destination =
        Place { window: fields.destination_window, offset: fields.destination_offset };
    (source, destination)
}

fn within(field: &'static str, value: u64, least: u64, most: u64) -> Problem {
    Problem { field, value, least, most }
}

/// `value` in place of an index below `end`.
fn below(field: &'static str, value: u64, end: u64) -> Problem {
    match end {
        0 => within(field, value, 1, 0),
        _ => within(field, value, 0, end - 1),
    }
}

#[inline]
pub(super) fn check(field: &'static str, value: u64, least: u64, most: u64) -> Result<(), Problem> {
    if (least..=most).contains(&value) { Ok(()) } else { Err(within(field, value, least, most)) }
}
