//! What can go wrong, one variant per cause, worded for whoever wrote the input.

use std::path::PathBuf;

/// The result of a call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a network, a route, a rank map or a host could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number is not one that a network can have.
    #[error("{at}: {what} is {}; it must be {must}", short(*value))]
    Number {
        /// Where it stands: a link, a field, an option.
        at: String,
        /// What the number says.
        what: &'static str,
        /// The number.
        value: f64,
        /// What it must be.
        must: &'static str,
    },
    /// A count is zero, or of the wrong form.
    #[error("{what} is {value}; it must be {must}")]
    Count {
        /// What is counted.
        what: String,
        /// The count.
        value: u64,
        /// What it must be.
        must: &'static str,
    },
    /// More is asked for than this crate makes.
    #[error("{what}: {needed} needed, {limit} allowed")]
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// How many there would be.
        needed: u128,
        /// How many there may be.
        limit: u64,
    },
    /// Two nodes have one name.
    #[error("{at}: the name {name:?} is given twice")]
    DuplicateName {
        /// Where the second stands.
        at: String,
        /// The name.
        name: String,
    },
    /// A name that cannot be one.
    #[error("{at}: {name:?} cannot be a name: {reason}")]
    BadName {
        /// Where it stands.
        at: String,
        /// The name.
        name: String,
        /// Why.
        reason: &'static str,
    },
    /// A link or a route names a node that does not exist.
    #[error("{at}: there is no node {name:?}{hint}")]
    UnknownNode {
        /// Where the name stands.
        at: String,
        /// The name.
        name: String,
        /// A name that was perhaps meant.
        hint: String,
    },
    /// A link leads from a node to itself.
    #[error("{at}: a link leads from {name:?} to itself")]
    SelfLink {
        /// Where it stands.
        at: String,
        /// The node.
        name: String,
    },
    /// Messages start and end at endpoints, and there are none.
    #[error("the network has no endpoints")]
    NoEndpoints,
    /// Two endpoints have no path.
    #[error("no path leads from {from:?} to {to:?}")]
    Unreachable {
        /// The endpoint that would send.
        from: String,
        /// The endpoint that would receive.
        to: String,
    },
    /// Unique routing met a choice.
    #[error(
        "routing is unique, but from {from:?} to {to:?} there are {choices} shortest paths from \
         {at:?} on, by {first:?} and {second:?} among others"
    )]
    NotUnique {
        /// The endpoint that sends.
        from: Box<str>,
        /// The endpoint that receives.
        to: Box<str>,
        /// The node at which the paths part.
        at: Box<str>,
        /// Links to choose from.
        choices: usize,
        /// The first link.
        first: Box<str>,
        /// The second link.
        second: Box<str>,
    },
    /// A routing table leads in a circle.
    #[error("the routes to {to:?} lead in a circle: {}", circle.join(" -> "))]
    RoutingLoop {
        /// The endpoint never reached.
        to: String,
        /// The nodes of the circle; the first is also the last.
        circle: Vec<String>,
    },
    /// A routing table names a next node that is not a neighbour, or cannot forward.
    #[error("{at}: the route from {node:?} to {to:?} goes by {via:?}, {reason}")]
    BadRoute {
        /// Where it stands.
        at: String,
        /// The node that routes.
        node: String,
        /// The endpoint to be reached.
        to: String,
        /// The next node.
        via: String,
        /// Why that cannot be.
        reason: &'static str,
    },
    /// An endpoint's number is outside the network.
    #[error("endpoint {endpoint} is outside a network of {endpoints}; they are numbered from 0")]
    EndpointOutOfRange {
        /// The number.
        endpoint: u32,
        /// Endpoints of the network.
        endpoints: u32,
    },
    /// A link's number is outside the network.
    #[error("link {link} is outside a network of {links} directed links")]
    LinkOutOfRange {
        /// The number.
        link: u32,
        /// Links of the network.
        links: usize,
    },
    /// No rank map without contention exists, or not for as many ranks.
    #[error("no HDRM rank map for {ranks} ranks on this BiGraph: {reason}")]
    NoRankMap {
        /// Ranks asked for.
        ranks: u64,
        /// Why.
        reason: String,
    },
    /// A rank map cannot be written in the form asked for.
    #[error("the rank map has no {form} form: {reason}")]
    NoForm {
        /// The form.
        form: &'static str,
        /// Why.
        reason: String,
    },
    /// A rank map is not one to one.
    #[error("rank_map: {reason}")]
    BadRankMap {
        /// What is wrong.
        reason: String,
    },
    /// Text that is not JSON, or JSON of another form.
    #[error("{what}, line {line}, column {column}: {reason}")]
    Json {
        /// What was read.
        what: String,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// What the parser said.
        reason: String,
    },
    /// A field of a JSON description contradicts another, or says nothing.
    #[error("{at}: {reason}")]
    Field {
        /// The field's path, as `links[3].from`.
        at: String,
        /// What is wrong.
        reason: String,
    },
    /// A short form that cannot be understood.
    #[error("{spec:?} cannot be understood: {reason}")]
    Spec {
        /// What was given.
        spec: String,
        /// Why.
        reason: String,
    },
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Text that is not XML, or XML of another form.
    #[error("line {line}: {reason}")]
    Xml {
        /// The line, from 1.
        line: u32,
        /// What is wrong.
        reason: String,
    },
}

/// A number as people write it, without hundreds of zeros.
fn short(value: f64) -> String {
    match value.abs() {
        1e-9..1e16 | 0.0 => value.to_string(),
        size if size.is_finite() => format!("{value:e}"),
        _ => value.to_string(),
    }
}

/// ", did you mean ...?" if a known name is close.
pub(crate) fn hint<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    // A cluster may have a million names, and nobody waits for help with spelling.
    const LOOKED_AT: usize = 4096;
    known
        .take(LOOKED_AT)
        .map(|other| (distance(name, other), other))
        .min()
        .filter(|(distance, _)| *distance <= 1 + name.chars().count() / 4)
        .map_or_else(String::new, |(_, other)| format!("; did you mean {other:?}?"))
}

/// Letters to insert, remove or replace; names are cut at 64 letters.
fn distance(one: &str, other: &str) -> usize {
    let one: Vec<char> = one.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=one.len()).collect();
    for (line, letter) in other.chars().take(64).enumerate() {
        let mut corner = row[0];
        row[0] = line + 1;
        for (column, &mine) in one.iter().enumerate() {
            let replaced = corner + usize::from(mine != letter);
            corner = row[column + 1];
            row[column + 1] = replaced.min(corner + 1).min(row[column] + 1);
        }
    }
    row[one.len()]
}
