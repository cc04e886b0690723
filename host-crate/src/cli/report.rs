//! Short tables for people.

use std::fmt::Write;
use std::time::Duration;

/// Rows of a name and a value, aligned.
#[derive(Debug, Default)]
pub(crate) struct Table(Vec<(String, String)>);

impl Table {
    /// A row; an empty name continues the row above.
    pub(crate) fn row(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.push((name.into(), value.into()));
    }

    /// The table as lines.
    pub(crate) fn render(&self) -> String {
        let width = self.0.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let mut text = String::new();
        for (name, value) in &self.0 {
            let value = super::one_line(value);
            // Writing to a string does not fail.
            let _ = writeln!(text, "{name:width$}  {value}");
        }
        text
    }
}

/// A duration in the unit that suits it.
pub(crate) fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        _ if seconds < 1e-3 => format!("{:.1} us", seconds * 1e6),
        _ if seconds < 1.0 => format!("{:.3} ms", seconds * 1e3),
        _ => format!("{seconds:.3} s"),
    }
}

/// A byte count with a decimal unit.
pub(crate) fn bytes(bytes: f64) -> String {
    match bytes {
        _ if bytes < 1e3 => format!("{bytes:.0} B"),
        _ if bytes < 1e6 => format!("{:.1} kB", bytes / 1e3),
        _ if bytes < 1e9 => format!("{:.1} MB", bytes / 1e6),
        _ if bytes < 1e12 => format!("{:.2} GB", bytes / 1e9),
        _ => format!("{:.2} TB", bytes / 1e12),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(time(Duration::from_nanos(1500)), "1.5 us");
        assert_eq!(time(Duration::from_micros(1500)), "1.500 ms");
        assert_eq!(time(Duration::from_millis(1500)), "1.500 s");
        assert_eq!(bytes(999.0), "999 B");
        assert_eq!(bytes(4.17e12), "4.17 TB");
    }

    #[test]
    fn rows_are_aligned() {
        let mut table = Table::default();
        table.row("a", "1");
        table.row("long", "2\n");
        assert_eq!(table.render(), "a     1\nlong  2\\n\n");
    }
}
