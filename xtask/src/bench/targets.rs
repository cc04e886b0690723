//! What the project wants to reach, and what was reached.

use super::data::{Figure, Report};
use super::text::{micros, tokens};

/// One target.
#[derive(Debug, PartialEq)]
pub struct Target {
    /// What is held to it.
    pub what: String,
    /// What is wanted.
    pub wanted: String,
    /// What was measured; empty when it was not.
    pub measured: String,
    /// Whether that is enough; `None` when it was not measured.
    pub met: Option<bool>,
}

impl Target {
    fn new(
        what: impl Into<String>,
        wanted: impl Into<String>,
        measured: Option<(String, bool)>,
    ) -> Self {
        let (measured, met) = match measured {
            Some((measured, met)) => (measured, Some(met)),
            None => (String::new(), None),
        };
        Self {
            what: what.into(),
            wanted: wanted.into(),
            measured,
            met,
        }
    }
}

/// The least of some values, and what it belongs to.
fn least(values: impl Iterator<Item = (f64, String)>) -> Option<(f64, String)> {
    values.min_by(|a, b| a.0.total_cmp(&b.0))
}

/// A target for the least of some ratios. `strictly`: above, not at, the wanted one.
fn at_least(
    what: &str,
    wanted: f64,
    strictly: bool,
    values: impl Iterator<Item = (f64, String)>,
) -> Target {
    let (word, ratio) = if strictly {
        ("more than", format!("{wanted}"))
    } else {
        ("at least", format!("{wanted:.2}"))
    };
    Target::new(
        what,
        format!("{word} {ratio}"),
        least(values).map(|(value, of)| {
            let enough = if strictly {
                value > wanted
            } else {
                value >= wanted
            };
            (format!("{value:.3} ({of})"), enough)
        }),
    )
}

fn at_tokens(figure: &Figure) -> String {
    format!("T = {}", tokens(figure.tokens))
}

/// All targets, in the order of the report.
pub fn targets(report: &Report) -> Vec<Target> {
    let mut all = dense(report);
    all.extend(elsewhere(report));
    all.extend(pool(report));
    all
}

fn dense(report: &Report) -> Vec<Target> {
    let headline = report.headline();
    let mut all = Vec::new();
    for wanted_tokens in [1, 16] {
        let figure = headline.iter().find(|f| f.tokens == wanted_tokens);
        all.push(Target::new(
            format!("above the better copy, T = {wanted_tokens}"),
            "at most 0.25 µs",
            figure.map(|figure| {
                let above = figure.ours.median - figure.copy();
                (format!("{above:+.2} µs"), above <= 0.25)
            }),
        ));
    }
    let mut sizes = vec![(128, 0.97), (512, 0.97), (2048, 0.98), (8192, 0.98)];
    let larger = headline.iter().map(|f| f.tokens).filter(|t| *t > 8192);
    sizes.extend(larger.map(|tokens| (tokens, 0.98)));
    for (wanted_tokens, wanted) in sizes {
        all.push(at_least(
            &format!(
                "rate against the better copy, T = {}",
                tokens(wanted_tokens)
            ),
            wanted,
            false,
            headline
                .iter()
                .filter(|f| f.tokens == wanted_tokens)
                .map(|f| (f.of_copy(), at_tokens(f))),
        ));
    }
    let against = |peer: &'static str, from: u64| {
        headline
            .iter()
            .filter(move |f| f.tokens >= from)
            .filter_map(move |f| {
                let theirs = report.dense_peer(peer, f.tokens)?;
                Some((theirs / f.ours.median, at_tokens(f)))
            })
    };
    all.push(at_least(
        "times sglang's rate, every T",
        1.0,
        true,
        against("sglang", 0),
    ));
    all.push(at_least(
        "times sglang's rate, T ≥ 512",
        2.8,
        false,
        against("sglang", 512),
    ));
    all.push(at_least(
        "times FlagGems' rate, every T",
        1.0,
        true,
        against("flaggems", 0),
    ));
    for (group, what, wanted) in [
        (
            "geometry",
            "other geometries against the copy, T = 8192",
            0.9,
        ),
        ("odd", "odd geometries against the copy, T = 8192", 0.6),
    ] {
        all.push(at_least(
            what,
            wanted,
            false,
            report.group(group).map(|f| (f.of_copy(), f.name.clone())),
        ));
    }
    all
}

fn elsewhere(report: &Report) -> Vec<Target> {
    let host = report.dense.as_ref().and_then(|bench| bench.host_cost_us);
    let mut all = vec![Target::new(
        "host time of one run, no graph",
        "at most 3 µs",
        host.map(|host| (format!("{host:.2} µs"), host <= 3.0)),
    )];
    for (label, what, limit) in [
        ("cold", "first plan, empty cache of the driver", 300.0),
        ("cached", "first plan, from the driver's cache", 30.0),
    ] {
        let times = report.first_loads(label);
        all.push(Target::new(
            what,
            format!("under {limit} ms"),
            times.get(times.len() / 2).map(|median| {
                let worst = times.last().copied().unwrap_or(*median);
                (
                    format!(
                        "{median:.1} ms (median of {}, at most {worst:.1})",
                        times.len()
                    ),
                    *median < limit,
                )
            }),
        ));
    }
    all
}

fn pool(report: &Report) -> Vec<Target> {
    let all: Vec<&Figure> = report.group("pool").collect();
    let of = |fp8: bool| all.iter().filter(move |f| f.fp8() == fp8 && !f.hnd());
    let against = |fp8: bool, from: u64| {
        let peer = if fp8 {
            "tokenspeed e4m3fn"
        } else {
            "tokenspeed bf16"
        };
        of(fp8)
            .filter(move |f| f.tokens >= from)
            .filter_map(move |f| {
                let theirs = report.pool_peer(peer, f.tokens)?;
                Some((theirs / f.ours.median, at_tokens(f)))
            })
    };
    let time = |fp8: bool| of(fp8).find(|f| f.tokens == 8192).map(|f| f.ours.median);
    vec![
        at_least(
            "pool, bf16: rate against the copy, T ≥ 2048",
            0.93,
            false,
            of(false)
                .filter(|f| f.tokens >= 2048)
                .map(|f| (f.of_copy(), at_tokens(f))),
        ),
        at_least(
            "pool, bf16: times the Triton scatter's rate, every T",
            1.0,
            true,
            against(false, 0),
        ),
        at_least(
            "pool, bf16: times the Triton scatter's rate, T ≥ 512",
            2.8,
            false,
            against(false, 512),
        ),
        Target::new(
            "pool, FP8: time as a part of bf16's, T = 8192",
            "at most 0.80",
            time(true).zip(time(false)).map(|(fp8, bf16)| {
                let part = fp8 / bf16;
                (
                    format!("{part:.3} ({} of {} µs)", micros(fp8), micros(bf16)),
                    part <= 0.80,
                )
            }),
        ),
        at_least(
            "pool, FP8: times the Triton scatter's rate, every T",
            1.0,
            true,
            against(true, 0),
        ),
        at_least(
            "pool, FP8: times the Triton scatter's rate, T ≥ 512",
            2.8,
            false,
            against(true, 512),
        ),
        at_least(
            "pool, HND pages: rate against the copy, T ≥ 2048",
            0.85,
            false,
            all.iter()
                .filter(|f| f.hnd() && f.tokens >= 2048)
                .map(|f| (f.of_copy(), format!("{}, {}", f.name, at_tokens(f)))),
        ),
    ]
}
