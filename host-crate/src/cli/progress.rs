//! Progress bars: on standard error, for work that takes long, never where no one is watching.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Shorter work shows nothing.
const PATIENCE: Duration = Duration::from_millis(400);

/// A bar that appears once the work turns out to be long.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    started: Instant,
}

impl Progress {
    /// Progress in bytes.
    pub(crate) fn bytes(label: &'static str, total: u64) -> Self {
        Self::new(
            label,
            total,
            "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}",
        )
    }

    /// Progress in steps.
    pub(crate) fn steps(label: &'static str, total: u64) -> Self {
        Self::new(label, total, "{msg} {wide_bar} {pos}/{len} {eta}")
    }

    fn new(label: &'static str, total: u64, template: &str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden())
                .with_message(label);
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar
        });
        Self {
            bar,
            started: Instant::now(),
        }
    }

    /// `amount` more is done.
    pub(crate) fn advance(&self, amount: u64) {
        if let Some(bar) = &self.bar {
            if bar.is_hidden() && self.started.elapsed() > PATIENCE {
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            bar.inc(amount);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
