//! Text tables.

/// Formats columns as wide as the longest cell; text on the left, numbers on the right.
pub fn format(headers: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].len());
        cells.chain([headers[column].len()]).max().unwrap_or(0)
    };
    let numeric = |column: usize| {
        rows.iter().all(|row| row[column].is_empty() || row[column].parse::<f64>().is_ok())
    };
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.enumerate().map(|(column, cell)| {
            let width = width(column);
            if numeric(column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let mut out = line(&mut headers.iter().copied());
    for row in rows {
        out += &line(&mut row.iter().map(String::as_str));
    }
    out
}
