//! Crate errors, one variant per cause.

use std::path::PathBuf;

/// Result type for calls into this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Failure to read, build or route a network, a rank map or a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Number out of range.
    #[error("{at}: {what} {}: expected {must}", short(*value))]
    Number {
        /// Position in the input: a link, a field, an option.
        at: String,
        /// Quantity.
        what: &'static str,
        /// Given value.
        value: f64,
        /// Expected range.
        must: &'static str,
    },
    /// Count out of range.
    #[error("{what} {value}: expected {must}")]
    Count {
        /// Counted items.
        what: String,
        /// The count.
        value: u64,
        /// Expected range.
        must: &'static str,
    },
    /// Size above a limit in this crate.
    #[error("{what}: {needed} needed, {limit} allowed")]
    TooLarge {
        /// Counted items.
        what: &'static str,
        /// Number needed.
        needed: u128,
        /// Number allowed.
        limit: u64,
    },
    /// Name that two nodes have.
    #[error("{at}: the name {name:?} is given twice")]
    DuplicateName {
        /// Position of the second one.
        at: String,
        /// The name.
        name: String,
    },
    /// Invalid name.
    #[error("{at}: {name:?} is not a valid name: {reason}")]
    BadName {
        /// Position in the input.
        at: String,
        /// The name.
        name: String,
        /// Reason.
        reason: &'static str,
    },
    /// Name that no node has, in a link or a route.
    #[error("{at}: there is no node {name:?}{hint}")]
    UnknownNode {
        /// Position in the input.
        at: String,
        /// The name.
        name: String,
        /// Suggested similar name, or empty.
        hint: String,
    },
    /// Link from a node to itself.
    #[error("{at}: a link leads from {name:?} to itself")]
    SelfLink {
        /// Position in the input.
        at: String,
        /// The node.
        name: String,
    },
    /// Network without endpoints.
    #[error("the network has no endpoints")]
    NoEndpoints,
    /// Endpoints without a path.
    #[error("no path leads from {from:?} to {to:?}")]
    Unreachable {
        /// The endpoint that would send.
        from: String,
        /// The endpoint that would receive.
        to: String,
    },
    /// Several shortest paths under unique routing.
    #[error(
        "routing is unique, but from {from:?} to {to:?} there are {choices} shortest paths from \
         {at:?} on, among them by {first:?} and {second:?}; choose static, ecmp or adaptive"
    )]
    NotUnique {
        /// The endpoint that sends.
        from: Box<str>,
        /// The endpoint that receives.
        to: Box<str>,
        /// Node at which the paths part.
        at: Box<str>,
        /// Links to choose from.
        choices: usize,
        /// The first link.
        first: Box<str>,
        /// The second link.
        second: Box<str>,
    },
    /// Loop in a routing table.
    #[error("the routes to {to:?} form a loop: {}", nodes.join(" -> "))]
    RoutingLoop {
        /// Destination.
        to: String,
        /// Nodes in the loop; the first is also the last.
        nodes: Vec<String>,
    },
    /// Invalid next hop in a routing table.
    #[error("{at}: the route from {node:?} to {to:?} goes by {via:?}, {reason}")]
    BadRoute {
        /// Position in the input.
        at: String,
        /// Node that has the entry.
        node: String,
        /// Destination.
        to: String,
        /// Next hop.
        via: String,
        /// Reason.
        reason: &'static str,
    },
    /// Endpoint number outside the network.
    #[error("endpoint {endpoint} is outside a network of {endpoints}; they are numbered from 0")]
    EndpointOutOfRange {
        /// The number.
        endpoint: u32,
        /// Endpoints in the network.
        endpoints: u32,
    },
    /// Link number outside the network.
    #[error("link {link} is outside a network of {links} directed links")]
    LinkOutOfRange {
        /// The number.
        link: u32,
        /// Links in the network.
        links: usize,
    },
    /// No contention-free rank map for this rank count.
    #[error("no HDRM rank map for {ranks} ranks: {reason}")]
    NoRankMap {
        /// Ranks.
        ranks: u64,
        /// Reason.
        reason: String,
    },
    /// Rank map that a file format cannot express.
    #[error("the rank map has no {form} form: {reason}")]
    NoForm {
        /// File format.
        form: &'static str,
        /// Reason.
        reason: String,
    },
    /// Rank map that is not one to one.
    #[error("rank_map: {reason}")]
    BadRankMap {
        /// Reason.
        reason: String,
    },
    /// Invalid JSON, or JSON outside the schema.
    #[error("{what}, line {line}, column {column}: {reason}")]
    Json {
        /// Input.
        what: String,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// Parser message.
        reason: String,
    },
    /// JSON description field with a contradiction or without effect.
    #[error("{at}: {reason}")]
    Field {
        /// Field path, such as `links[3].from`.
        at: String,
        /// Reason.
        reason: String,
    },
    /// Invalid short form.
    #[error("{spec:?} is not a network: {reason}")]
    Spec {
        /// The short form.
        spec: String,
        /// Reason.
        reason: String,
    },
    /// Unreadable file.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// System error.
        source: std::io::Error,
    },
    /// Invalid XML, or XML outside NCCL's schema.
    #[error("line {line}: {reason}")]
    Xml {
        /// The line, from 1.
        line: u32,
        /// Reason.
        reason: String,
    },
}

/// A number in decimal notation, in scientific form where it is very large or small.
fn short(value: f64) -> String {
    match value.abs() {
        1e-9..1e16 | 0.0 => value.to_string(),
        size if size.is_finite() => format!("{value:e}"),
        _ => value.to_string(),
    }
}

/// Suggestion "; did you mean ...?" if a known name is close, else empty.
pub(crate) fn hint<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    // Bounds the time for clusters with a million names.
    const LOOKED_AT: usize = 4096;
    known
        .take(LOOKED_AT)
        .map(|other| (distance(name, other), other))
        .min()
        .filter(|(distance, _)| *distance <= 1 + name.chars().count() / 4)
        .map_or_else(String::new, |(_, other)| format!("; did you mean {other:?}?"))
}

/// Levenshtein distance over the first 64 characters.
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
