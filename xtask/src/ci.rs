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
        let verdict = match command.status() {
            Ok(status) => Verdict::of(status.code()),
            Err(error) => {
                println!("cannot be started: {error}");
                Verdict::Failed
            }
        };
        summary.push((step.name, verdict, start.elapsed()));
    }
    println!("\n== summary");
    for (name, verdict, took) in &summary {
        println!("{}", line(name, *verdict, *took));
    }
    let failed = summary
        .iter()
        .filter(|(_, verdict, _)| *verdict == Verdict::Failed)
        .count();
    if failed > 0 {
        bail!("{failed} of {} checks failed", summary.len());
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    /// Nothing failed, but something could not be looked at.
    Skipped,
    Failed,
}

impl Verdict {
    /// 77 is what many test harnesses take for "skipped".
    fn of(exit_status: Option<i32>) -> Self {
        match exit_status {
            Some(0) => Self::Passed,
            Some(77) => Self::Skipped,
            _ => Self::Failed,
        }
    }
}

fn line(name: &str, verdict: Verdict, took: Duration) -> String {
    let word = match verdict {
        Verdict::Passed => "ok",
        Verdict::Skipped => "SKIPPED",
        Verdict::Failed => "FAILED",
    };
    format!("{word:<7} {:>5} s  {name}", took.as_secs())
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
                &[
                    "test",
                    "--features",
                    CUDA,
                    "--lib",
                    "--bins",
                    "--test",
                    "gpu",
                ],
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
    fn what_did_not_pass_is_named() {
        let line = |status| line("tests", Verdict::of(status), Duration::from_secs(12));
        assert_eq!(line(Some(0)), "ok         12 s  tests");
        assert_eq!(line(Some(77)), "SKIPPED    12 s  tests");
        assert_eq!(line(Some(1)), "FAILED     12 s  tests");
        assert_eq!(line(None), "FAILED     12 s  tests");
    }
}
