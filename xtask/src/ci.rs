//! `cargo xtask ci`: every check, one after the other.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::flags;
use crate::project::{self, Project};
use crate::{build_ptx, ptxas, stub_cuda};

/// Runs all checks even when one fails, and prints a line for each at the end.
pub fn run(project: &Project, flags: &flags::Ci) -> Result<()> {
    let stub = stub_cuda::make(project)?;
    if flags.install {
        ptxas::install(project)?;
    }
    let mut summary = Vec::new();
    let device = build_ptx::stage(project)?.display().to_string();
    for step in steps(project, &stub, &device) {
        println!(
            "\n== {}\n   {}",
            step.name,
            project::show_command(&step.command)
        );
        let start = Instant::now();
        let mut command = step.command;
        let passed = match command.status() {
            Ok(status) => status.success(),
            Err(error) => {
                println!("cannot be started: {error}");
                false
            }
        };
        summary.push((step.name, passed, start.elapsed()));
    }
    println!("\n== summary");
    for (name, passed, took) in &summary {
        println!("{}", line(name, *passed, *took));
    }
    let failed = summary.iter().filter(|(_, passed, _)| !passed).count();
    if failed > 0 {
        bail!("{failed} of {} checks failed", summary.len());
    }
    Ok(())
}

fn line(name: &str, passed: bool, took: Duration) -> String {
    let word = if passed { "ok    " } else { "FAILED" };
    format!("{word} {:>5} s  {name}", took.as_secs())
}

struct Step {
    name: &'static str,
    command: Command,
}

fn steps(project: &Project, stub: &Path, device: &str) -> Vec<Step> {
    const CUDA: &str = "fused-kv/cuda,fused-kv-tests/cuda";
    let cargo = |name, arguments: &[&str]| {
        let mut command = project.cargo();
        command.args(arguments);
        Step { name, command }
    };
    // The feature `cuda`, linked to the stand-in and started with it: no device is found.
    let cuda = |mut step: Step| {
        step.command
            .env("CUDA_LIBRARY_PATH", stub)
            .env("LD_LIBRARY_PATH", stub.join("lib64"));
        step
    };
    let docs = |mut step: Step| {
        step.command.env("RUSTDOCFLAGS", "-D warnings");
        step
    };
    let format = |name, manifest: &str| {
        let step = cargo(name, &["fmt", "--all", "--check", "--manifest-path"]);
        with(step, manifest)
    };
    let xtask = |name, arguments: &[&str]| {
        let program = std::env::current_exe().unwrap_or_else(|_| "xtask".into());
        let mut command = Command::new(program);
        command
            .current_dir(&project.root)
            .env("CARGO_TARGET_DIR", &project.target)
            .args(arguments);
        Step { name, command }
    };
    let script = |name, path: &str| {
        let mut command = Command::new("bash");
        command.current_dir(&project.root).arg(path);
        Step { name, command }
    };
    let clippy = ["clippy", "--workspace", "--all-targets"];
    let deny = ["--", "-D", "warnings"];
    let packages = ["--package", "fused-kv", "--package", "fused-kv-tests"];
    vec![
        format("format", "Cargo.toml"),
        format("format of kernel-crate", "kernel-crate/Cargo.toml"),
        format(
            "format of ptx-builder",
            "kernel-crate/ptx-builder/Cargo.toml",
        ),
        // README's command.
        cargo("tests", &["test", "--workspace"]),
        cargo(
            "tests of kernel-crate",
            &["test", "--package", "fused-kv-kernels"],
        ),
        cuda(cargo(
            "tests with cuda, no device",
            &[
                &["test", "--features", CUDA, "--lib", "--test", "gpu"],
                &packages[..],
            ]
            .concat(),
        )),
        cargo("clippy", &[&clippy[..], &deny].concat()),
        cuda(cargo(
            "clippy with cuda",
            &[&clippy[..], &["--features", CUDA], &deny].concat(),
        )),
        // From outside the workspace clippy looks at workspace members alone.
        cargo(
            "clippy of kernel-crate",
            &[
                &["clippy", "--all-targets", "--manifest-path", device][..],
                &deny,
            ]
            .concat(),
        ),
        docs(cargo("documentation", &["doc", "--workspace", "--no-deps"])),
        docs(cargo(
            "documentation of kernel-crate",
            &["doc", "--no-deps", "--manifest-path", device],
        )),
        docs(cuda(cargo(
            "documentation with cuda",
            &[&["doc", "--no-deps", "--features", CUDA], &packages[..]].concat(),
        ))),
        xtask(
            "committed PTX",
            &["build-ptx", "--codegen", "llvm", "--check"],
        ),
        xtask("ptx-report", &["ptx-report"]),
        script("rust-cuda type check", ".ci/check-rust-cuda"),
    ]
}

fn with(mut step: Step, argument: &str) -> Step {
    step.command.arg(argument);
    step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_command_is_among_the_checks() {
        let project = Project {
            root: "/p".into(),
            target: "/p/target".into(),
        };
        let steps = steps(&project, Path::new("/stub"), "/device/Cargo.toml");
        let shown: Vec<_> = steps
            .iter()
            .map(|step| project::show_command(&step.command))
            .collect();
        assert!(shown.iter().any(|line| line.ends_with(" test --workspace")));
        let names: std::collections::BTreeSet<_> = steps.iter().map(|step| step.name).collect();
        assert_eq!(names.len(), steps.len(), "two checks have one name");
    }

    #[test]
    fn a_failure_is_named() {
        let line = line("tests", false, Duration::from_secs(12));
        assert_eq!(line, "FAILED    12 s  tests");
    }
}
