//! The page: one file, with nothing to load.

use std::fmt::Write;

use anyhow::Result;

use super::data::{Bench, Figure, Report};
use super::plots::{self, BLUE, Bars, GREEN, GREY, Line, ORANGE};
use super::targets::{Target, targets};
use super::text::{escape, megabytes, micros, tokens};

const STYLE: &str = include_str!("style.css");

/// This project in the head of a table, in one piece.
const OURS: &str = "<span class=\"whole\">fused-kv</span>";

/// Peers as the report calls them: key in the figures, name, color.
const DENSE_PEERS: [(&str, &str, plotters::style::RGBColor); 2] = [
    ("sglang", "sglang (Triton)", ORANGE),
    ("flaggems", "FlagGems (Triton)", GREEN),
];

/// The whole page.
pub fn page(report: &Report) -> Result<String> {
    let targets = targets(report);
    let title = format!("fused-kv benchmark: {}", report.device());
    let mut body = String::new();
    body += &head(report, &targets);
    body += &headline(report)?;
    body += &target_table(&targets);
    body += &geometry(report);
    body += &pool(report)?;
    body += &loads(report);
    body += &method(report);
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n",
        escape(&title)
    ))
}

/// CUDA's version from the driver's number for it.
fn cuda(number: i32) -> String {
    format!("CUDA {}.{}", number / 1000, number % 1000 / 10)
}

fn head(report: &Report, targets: &[Target]) -> String {
    let mut facts = Vec::new();
    if let Some(machine) = &report.machine {
        if !machine.date.is_empty() {
            facts.push(machine.date.clone());
        }
        if !machine.driver.is_empty() {
            facts.push(format!("driver {}", machine.driver));
        }
    }
    if let Some(bench) = &report.dense {
        facts.push(cuda(bench.driver));
    }
    if let Some(peers) = &report.peers {
        for (name, version) in [("PyTorch", &peers.torch), ("Triton", &peers.triton)] {
            if let Some(version) = version {
                facts.push(format!("{name} {version}"));
            }
        }
    }
    let count = |wanted| targets.iter().filter(|target| target.met == wanted).count();
    let (met, short, open) = (count(Some(true)), count(Some(false)), count(None));
    let mut verdict = format!("{met} of {} targets met", met + short);
    if short > 0 {
        write!(verdict, ", {short} short").expect("a string takes everything");
    }
    if open > 0 {
        write!(verdict, ", {open} not measured").expect("a string takes everything");
    }
    format!(
        "<header>\n<h1>fused-kv benchmark</h1>\n<p class=\"device\">{}</p>\n<p class=\"facts\">{}</p>\n\
         <p>Fused RMSNorm and RoPE of K, copy of V, for all layers in one launch. {} \
         <a href=\"#targets\">{verdict}</a>.</p>\n</header>\n",
        escape(report.device()),
        escape(&facts.join(" · ")),
        escape(&runs(report)),
    )
}

/// Whether the peers stood beside the kernel.
fn runs(report: &Report) -> String {
    let Some(peers) = &report.peers else {
        return "The peers were not measured.".into();
    };
    let together = report
        .machine
        .as_ref()
        .is_some_and(|machine| machine.commands.iter().any(|c| c.contains("peers.py")));
    if together {
        return "Everything was measured on one machine in one run.".into();
    }
    format!(
        "The peers were measured in a run of their own ({}, {}).",
        peers.device.as_deref().unwrap_or("unknown device"),
        if peers.date.is_empty() {
            "unknown date"
        } else {
            &peers.date
        },
    )
}

/// A legend: a swatch and a name for each.
fn legend<'a>(entries: impl Iterator<Item = (&'a str, plotters::style::RGBColor, bool)>) -> String {
    let mut text = String::from("<p class=\"legend\">");
    for (name, color, dashed) in entries {
        let kind = if dashed { "dashed" } else { "solid" };
        write!(
            text,
            "<span><i class=\"{kind}\" style=\"color:{}\"></i>{}</span>",
            plots::css(color),
            escape(name)
        )
        .expect("a string takes everything");
    }
    text + "</p>\n"
}

/// A table; the first `text_columns` columns hold text, the others numbers. Cells are HTML.
fn table(text_columns: usize, heads: &[&str], rows: &[Vec<String>]) -> String {
    let mut text = String::from("<div class=\"scroll\"><table>\n<thead><tr>");
    let kind = |column: usize| {
        if text_columns == 1 && column == 0 {
            " class=\"whole\""
        } else if column < text_columns {
            ""
        } else {
            " class=\"n\""
        }
    };
    for (column, head) in heads.iter().enumerate() {
        write!(text, "<th{}>{head}</th>", kind(column)).expect("a string takes everything");
    }
    text += "</tr></thead>\n<tbody>\n";
    for row in rows {
        text += "<tr>";
        for (column, cell) in row.iter().enumerate() {
            write!(text, "<td{}>{cell}</td>", kind(column)).expect("a string takes everything");
        }
        text += "</tr>\n";
    }
    text + "</tbody></table></div>\n"
}

/// A number, or a dash where there is none.
fn or_dash(value: Option<f64>, show: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "–".into(), show)
}

fn ratio(value: f64) -> String {
    format!("{value:.2}")
}

fn headline(report: &Report) -> Result<String> {
    let figures = report.headline();
    if figures.is_empty() {
        return Ok(String::new());
    }
    let rust_cuda = |count: u64| {
        let bench: &Bench = report.dense_rust_cuda.as_ref()?;
        let found = bench
            .figures
            .iter()
            .find(|f| f.group == "headline" && f.tokens == count)?;
        Some(found.ours.median)
    };
    let with_rust_cuda = report.dense_rust_cuda.is_some();
    let mut heads = vec!["tokens", "MB moved", OURS];
    if with_rust_cuda {
        heads.push("with PTX of rust-cuda");
    }
    heads.extend([
        "memcpy",
        "copy kernel",
        "sglang",
        "FlagGems",
        "rate / better copy",
        "rate / sglang",
        "rate / FlagGems",
        "TB/s",
    ]);
    let rows: Vec<_> = figures
        .iter()
        .map(|f| {
            let ours = f.ours.median;
            let peer = |name| report.dense_peer(name, f.tokens);
            let mut row = vec![
                tokens(f.tokens),
                megabytes(f.moved()),
                format!("<b>{}</b>", micros(ours)),
            ];
            if with_rust_cuda {
                row.push(or_dash(rust_cuda(f.tokens), micros));
            }
            row.extend([
                micros(f.memcpy.median),
                micros(f.copy_kernel.median),
                or_dash(peer("sglang"), micros),
                or_dash(peer("flaggems"), micros),
                format!("{:.3}", f.of_copy()),
                or_dash(peer("sglang").map(|theirs| theirs / ours), ratio),
                or_dash(peer("flaggems").map(|theirs| theirs / ours), ratio),
                format!("{:.2}", f.moved() / ours / 1e6),
            ]);
            row
        })
        .collect();

    let rate = |bytes: f64, micros: f64| bytes / micros / 1e6;
    let mut lines = vec![Line {
        name: "device copy (the better of two): the ceiling".into(),
        color: GREY,
        dashed: true,
        points: figures
            .iter()
            .map(|f| (f.tokens, rate(f.moved(), f.copy())))
            .collect(),
    }];
    let mut peers = Vec::new();
    for (key, name, color) in DENSE_PEERS {
        let times = |value: &dyn Fn(&Figure, f64) -> f64| -> Vec<(u64, f64)> {
            figures
                .iter()
                .filter_map(|f| {
                    let theirs = report.dense_peer(key, f.tokens)?;
                    Some((f.tokens, value(f, theirs)))
                })
                .collect()
        };
        let points = times(&|f, theirs| rate(f.moved(), theirs));
        if points.is_empty() {
            continue;
        }
        lines.push(Line {
            name: name.into(),
            color,
            dashed: false,
            points,
        });
        peers.push(Bars {
            name: name.into(),
            color,
            values: times(&|f, theirs| theirs / f.ours.median),
        });
    }
    lines.push(Line {
        name: "fused-kv".into(),
        color: BLUE,
        dashed: false,
        points: figures
            .iter()
            .map(|f| (f.tokens, rate(f.moved(), f.ours.median)))
            .collect(),
    });

    let mut text = String::from(
        "<section>\n<h2>Workspace output</h2>\n\
         <p>bf16, 8 layers, 8 KV heads, head_dim = rotary_dim = 128. Microseconds a call, medians.</p>\n",
    );
    text += &table(0, &heads, &rows);
    text += "<h3>Rate: bytes read and written</h3>\n<figure>\n";
    text += &legend(
        lines
            .iter()
            .rev()
            .map(|l| (l.name.as_str(), l.color, l.dashed)),
    );
    text += &plots::lines(
        "Rate in TB/s against the number of tokens, which the table above lists",
        "TB/s",
        &lines,
    )?;
    text += "</figure>\n";
    if !peers.is_empty() {
        text += "<h3>How many times the peers' rate</h3>\n<figure>\n";
        text += &legend(peers.iter().map(|b| (b.name.as_str(), b.color, false)));
        text += &plots::bars(
            "fused-kv's rate over each peer's, which the table above lists",
            "fused-kv's rate / the peer's",
            &peers,
            &[(1.0, "as fast"), (2.8, "2.8 times")],
        )?;
        text += "</figure>\n";
    }
    Ok(text + "</section>\n")
}

fn target_table(targets: &[Target]) -> String {
    let rows: Vec<_> = targets
        .iter()
        .map(|target| {
            let (class, word) = match target.met {
                Some(true) => ("met", "✓ met"),
                Some(false) => ("short", "✗ short"),
                None => ("open", "not measured"),
            };
            vec![
                escape(&target.what),
                escape(&target.wanted),
                if target.measured.is_empty() {
                    "–".into()
                } else {
                    escape(&target.measured)
                },
                format!("<span class=\"{class}\">{word}</span>"),
            ]
        })
        .collect();
    format!(
        "<section id=\"targets\">\n<h2>Targets</h2>\n\
         <p>The least favourable case of each, named. What was tried where one is short is in \
         docs/performance.md.</p>\n{}</section>\n",
        table(4, &["what", "wanted", "measured", ""], &rows)
    )
}

/// A bar within a cell, as long as the ratio says, and the ratio.
fn bar(value: f64, wanted: f64) -> String {
    let length = (value * 100.0).clamp(0.0, 100.0);
    let class = if value < wanted { " low" } else { "" };
    format!("<span class=\"bar{class}\"><i style=\"width:{length:.1}%\"></i></span>{value:.3}")
}

fn geometry(report: &Report) -> String {
    let mut text = String::new();
    for (group, title, note, wanted) in [
        (
            "geometry",
            "Other geometries and layouts",
            "One thing differs from the headline case in each row. Wanted: 0.90 of the copy.",
            0.9,
        ),
        (
            "odd",
            "Odd geometries",
            "Rows or bases that 16-byte accesses do not fit. Wanted: 0.60 of the copy.",
            0.6,
        ),
    ] {
        let rows: Vec<_> = report
            .group(group)
            .map(|f| {
                vec![
                    escape(&f.name),
                    tokens(f.tokens),
                    megabytes(f.moved()),
                    micros(f.ours.median),
                    micros(f.memcpy.median),
                    micros(f.copy_kernel.median),
                    bar(f.of_copy(), wanted),
                ]
            })
            .collect();
        if rows.is_empty() {
            continue;
        }
        let heads = [
            "case",
            "tokens",
            "MB moved",
            OURS,
            "memcpy",
            "copy kernel",
            "rate / better copy",
        ];
        write!(
            text,
            "<section>\n<h2>{title}</h2>\n<p>{note} Microseconds a call.</p>\n{}</section>\n",
            table(1, &heads, &rows)
        )
        .expect("a string takes everything");
    }
    text
}

fn pool(report: &Report) -> Result<String> {
    let mut figures: Vec<_> = report.group("pool").collect();
    if figures.is_empty() {
        return Ok(String::new());
    }
    // The cases in the order of measurement, each from few tokens to many.
    let mut names: Vec<&str> = Vec::new();
    for figure in &figures {
        if !names.contains(&figure.name.as_str()) {
            names.push(&figure.name);
        }
    }
    figures.sort_by_key(|f| (names.iter().position(|name| *name == f.name), f.tokens));
    let peer = |f: &Figure, kind: &str| {
        let dtype = if f.fp8() { "e4m3fn" } else { "bf16" };
        // The peers write the plain layout only.
        if f.hnd() {
            return None;
        }
        report.pool_peer(&format!("{kind} {dtype}"), f.tokens)
    };
    let rows: Vec<_> = figures
        .iter()
        .map(|f| {
            let ours = f.ours.median;
            let scatter = peer(f, "tokenspeed");
            let indexed = peer(f, "indexed writes");
            vec![
                escape(&f.name),
                tokens(f.tokens),
                format!("<b>{}</b>", micros(ours)),
                micros(f.copy()),
                or_dash(scatter, micros),
                or_dash(indexed, micros),
                format!("{:.3}", f.of_copy()),
                or_dash(scatter.map(|theirs| theirs / ours), ratio),
                or_dash(indexed.map(|theirs| theirs / ours), ratio),
            ]
        })
        .collect();
    let heads = [
        "case",
        "tokens",
        OURS,
        "better copy",
        "Triton scatter",
        "workspace, indexed writes",
        "rate / copy",
        "rate / scatter",
        "rate / indexed",
    ];
    let mut bars: Vec<Bars> = Vec::new();
    for (fp8, name, color) in [(false, "bf16", BLUE), (true, "FP8 (e4m3fn)", ORANGE)] {
        let mut values: Vec<(u64, f64)> = figures
            .iter()
            .filter(|f| f.fp8() == fp8)
            .filter_map(|f| Some((f.tokens, peer(f, "tokenspeed")? / f.ours.median)))
            .collect();
        values.dedup_by_key(|value| value.0);
        if !values.is_empty() {
            bars.push(Bars {
                name: name.into(),
                color,
                values,
            });
        }
    }
    let mut text = format!(
        "<section>\n<h2>Straight into the KV pool</h2>\n\
         <p>65 536 slots a layer, random distinct slots, 8 layers, 8 KV heads, head_dim = \
         rotary_dim = 128, kv in bf16. Microseconds a call. The copy moves as many bytes as the \
         kernel, fewer with FP8. The Triton scatter is tokenspeed's; \
         indexed writes are sglang's workspace kernel and then, for each layer, one indexed write \
         of K and one of V.</p>\n{}",
        table(1, &heads, &rows)
    );
    if !bars.is_empty() {
        text += "<h3>How many times the Triton scatter's rate</h3>\n<figure>\n";
        text += &legend(bars.iter().map(|b| (b.name.as_str(), b.color, false)));
        text += &plots::bars(
            "fused-kv's rate over that of the Triton scatter, which the table above lists",
            "fused-kv's rate / the scatter's",
            &bars,
            &[(1.0, "as fast"), (2.8, "2.8 times")],
        )?;
        text += "</figure>\n";
    }
    Ok(text + "</section>\n")
}

fn loads(report: &Report) -> String {
    let mut rows = Vec::new();
    if let Some(host) = report.dense.as_ref().and_then(|bench| bench.host_cost_us) {
        rows.push(vec![
            "host time of one run of a plan, no graph".into(),
            format!("{host:.2} µs"),
            String::new(),
        ]);
    }
    for (label, what) in [
        ("cold", "first plan of a process, the driver's cache empty"),
        ("cached", "first plan of a process, from the driver's cache"),
    ] {
        let times = report.first_loads(label);
        if let (Some(first), Some(last)) = (times.first(), times.last()) {
            rows.push(vec![
                what.into(),
                format!("{:.1} ms", times[times.len() / 2]),
                format!("{first:.1} to {last:.1} ms, {} processes", times.len()),
            ]);
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    format!(
        "<section>\n<h2>Host</h2>\n{}</section>\n",
        table(3, &["what", "median", "range"], &rows)
    )
}

fn method(report: &Report) -> String {
    let mut text = String::from(
        "<section>\n<h2>How it was measured</h2>\n<ul>\n\
         <li>CUDA graphs of at least 50 calls over rotating buffers that are together larger than \
         256 MB, several times the second-level cache (at T = 1 over 2048 sets of buffers, 134 MB, or 101 MB into an FP8 pool); \
         3 replays to warm up, then the median of 15. \
         Inputs are random, not zero.</li>\n\
         <li>Copies move as many bytes as the kernel: <code>cuMemcpyDtoDAsync</code>, and a copy \
         kernel with 16-byte accesses. The better one is the ceiling.</li>\n\
         <li>The peers are unmodified upstream files, timed by the same method; \
         up to 2048 tokens their results were compared with a plain float32 computation \
         first.</li>\n</ul>\n",
    );
    let mut commands: Vec<&str> = Vec::new();
    if let Some(machine) = &report.machine {
        commands.extend(machine.commands.iter().map(String::as_str));
    }
    if let Some(peers) = &report.peers
        && !commands.iter().any(|command| command.contains("peers.py"))
    {
        commands.push(&peers.command);
    }
    if !commands.is_empty() {
        writeln!(
            text,
            "<h3>Commands</h3>\n<pre>{}</pre>",
            escape(&commands.join("\n"))
        )
        .expect("a string takes everything");
    }
    if let Some(machine) = &report.machine
        && !machine.ptx_dir.is_empty()
    {
        writeln!(
            text,
            "<p>FUSED_KV_PTX_DIR named <code>{}</code> for all of them.</p>",
            escape(&machine.ptx_dir)
        )
        .expect("a string takes everything");
    }
    let rows: Vec<_> = report
        .ptx
        .iter()
        .flat_map(|manifest| {
            manifest.tiers.iter().map(move |tier| {
                vec![
                    escape(&manifest.codegen),
                    escape(&manifest.compiler),
                    escape(&tier.target),
                    escape(&tier.ptx_version),
                    tier.entries.len().to_string(),
                    digest(&tier.sha256),
                    digest(&manifest.source_sha256),
                ]
            })
        })
        .collect();
    if !rows.is_empty() {
        text += "<h3>PTX</h3>\n";
        let heads = [
            "code generator",
            "compiler",
            "target",
            "PTX version",
            "kernels",
            "SHA-256 of the file",
            "SHA-256 of the sources",
        ];
        text += &table(7, &heads, &rows);
    }
    if !report.ptx.iter().any(|ptx| ptx.codegen == "rust-cuda") {
        text += "<p>No PTX of the rust-cuda road was part of this run.</p>\n";
    }
    if let Some(peers) = &report.peers {
        let rows: Vec<_> = peers
            .files
            .iter()
            .map(|(peer, file)| {
                vec![
                    escape(peer),
                    escape(&file.name),
                    file.bytes.to_string(),
                    digest(&file.sha256),
                ]
            })
            .collect();
        if !rows.is_empty() {
            text += "<h3>Peers</h3>\n";
            text += &table(4, &["peer", "file", "bytes", "SHA-256"], &rows);
        }
        for (peer, error) in &peers.errors {
            writeln!(
                text,
                "<p><span class=\"short\">not measured</span> {}: {}</p>",
                escape(peer),
                escape(error)
            )
            .expect("a string takes everything");
        }
    }
    text + "</section>\n"
}

/// A digest, cut short on the page; all of it is there to copy.
fn digest(sha256: &str) -> String {
    let short: String = sha256.chars().take(12).collect();
    format!(
        "<code title=\"{}\">{}…</code>",
        escape(sha256),
        escape(&short)
    )
}
