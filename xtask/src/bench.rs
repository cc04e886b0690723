//! `cargo xtask bench`: measures on a GPU, or takes figures from one, and makes the report.

mod data;
mod html;
mod plots;
mod targets;
mod text;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::flags;
use crate::gpu_bundle;
use crate::project::{self, Project};
use data::Report;
use text::{micros, tokens};

/// Name of the file with all figures, which is input to a later report too.
const JSON: &str = "report.json";
const HTML: &str = "report.html";

/// Measures if no figures are given; writes JSON and HTML and prints the headline and the targets.
pub fn run(project: &Project, flags: &flags::Bench) -> Result<()> {
    let out = match &flags.out {
        Some(out) => std::env::current_dir()?.join(out),
        None => project.target.join("bench"),
    };
    let mut report = Report::default();
    if flags.json.is_empty() {
        if !flags.peers.is_empty() {
            bail!(
                "--peers belongs to --json; to measure the peers here: --sglang, --flaggems, --tokenspeed"
            );
        }
        let results = project.target.join("bench/results");
        measure(project, flags, &results)?;
        report.add(&results)?;
    } else {
        for path in flags.json.iter().chain(&flags.peers) {
            report.add(path)?;
        }
    }
    let (json, page) = (out.join(JSON), out.join(HTML));
    // Both are made before either is written.
    let html = html::page(&report)?;
    let text = serde_json::to_string_pretty(&report)? + "\n";
    project::write(&json, text)?;
    project::write(&page, html)?;
    print!("{}", summary(&report));
    println!("{}\n{}", project.show(&json), project.show(&page));
    Ok(())
}

/// Runs all measurements on this machine, by the script that does it on machines without Rust.
fn measure(project: &Project, flags: &flags::Bench, results: &Path) -> Result<()> {
    let gpu = Command::new("nvidia-smi")
        .arg("-L")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .output();
    if !gpu.is_ok_and(|output| output.status.success() && !output.stdout.is_empty()) {
        bail!(
            "no NVIDIA GPU here (`nvidia-smi -L` shows none). On a machine with one, without \
             Rust: `cargo xtask gpu-bundle` here, `bash run.sh bench --out DIR` there, then \
             `cargo xtask bench --json DIR` here"
        );
    }
    let bundle = project.target.join("bench/bundle");
    gpu_bundle::programs(project, &bundle)?;
    let mut command = Command::new("bash");
    command.arg(bundle.join("run.sh")).arg("bench");
    command.arg("--out").arg(results);
    for (option, path) in [
        ("--sglang", &flags.sglang),
        ("--flaggems", &flags.flaggems),
        ("--tokenspeed", &flags.tokenspeed),
    ] {
        if let Some(path) = path {
            let path: PathBuf = std::path::absolute(path)
                .with_context(|| format!("cannot find {}", path.display()))?;
            command.arg(option).arg(path);
        }
    }
    // Some measurements may fail and others not: the report says which are missing.
    if let Err(error) = project::run(&mut command) {
        println!("{error:#}; the report is made from what there is");
    }
    Ok(())
}

/// The headline table and the targets, for a terminal.
fn summary(report: &Report) -> String {
    use std::fmt::Write;
    let mut text = format!(
        "{}\n\n{:>8} {:>9} {:>9} {:>11} {:>9} {:>9} {:>8} {:>8}\n",
        report.device(),
        "tokens",
        "fused-kv",
        "memcpy",
        "copy kernel",
        "sglang",
        "FlagGems",
        "of copy",
        "/ sglang"
    );
    let dash = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    for figure in report.headline() {
        let peer = |name| report.dense_peer(name, figure.tokens);
        writeln!(
            text,
            "{:>8} {:>9} {:>9} {:>11} {:>9} {:>9} {:>8.3} {:>8}",
            tokens(figure.tokens),
            micros(figure.ours.median),
            micros(figure.memcpy.median),
            micros(figure.copy_kernel.median),
            dash(peer("sglang").map(micros)),
            dash(peer("flaggems").map(micros)),
            figure.of_copy(),
            dash(peer("sglang").map(|theirs| format!("{:.2}", theirs / figure.ours.median))),
        )
        .expect("a string takes everything");
    }
    text.push('\n');
    for target in targets::targets(report) {
        let word = match target.met {
            Some(true) => "met  ",
            Some(false) => "SHORT",
            None => "-    ",
        };
        let measured = if target.measured.is_empty() {
            "not measured"
        } else {
            &target.measured
        };
        writeln!(
            text,
            "{word} {}: {}, {measured}",
            target.what, target.wanted
        )
        .expect("a string takes everything");
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests;
