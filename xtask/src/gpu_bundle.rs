//! `cargo xtask gpu-bundle`: everything that a GPU machine without Rust needs, in one folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::flags;
use crate::project::{self, Project};
use crate::stub_cuda;

/// Packages whose tests and programs go into the bundle, built with these features.
const PACKAGES: [&str; 2] = ["fused-kv", "fused-kv-tests"];
const FEATURES: &str = "fused-kv/cuda,fused-kv-tests/cuda";

/// Runs what is in the bundle; see the text.
const RUN_SH: &str = include_str!("gpu_bundle/run.sh");

/// Builds and fills the folder.
pub fn run(project: &Project, flags: &flags::GpuBundle) -> Result<()> {
    let out = match &flags.out {
        Some(out) => std::env::current_dir()?.join(out),
        None => project.target.join("gpu-bundle"),
    };
    let mut tests = executables(
        &mut cargo(project, &["test", "--no-run", "--lib", "--bins", "--tests"])?,
        true,
    )?;
    if !flags.only.is_empty() {
        tests.retain(|test| flags.only.iter().any(|part| test.name.contains(part)));
        if tests.is_empty() {
            bail!("no test binary has {} in its name", flags.only.join(" or "));
        }
    }
    let examples = executables(&mut cargo(project, &["build", "--examples"])?, false)?;
    let programs = programs(project, &out)?;
    for test in &tests {
        copy(&test.path, &out.join("tests").join(&test.name))?;
    }
    for example in &examples {
        copy(&example.path, &out.join("examples").join(&example.name))?;
    }
    let data = project.root.join("tests/data");
    if data.is_dir() {
        copy_tree(&data, &out.join("data"))?;
    } else {
        println!("{}: missing, the bundle has no data", project.show(&data));
    }
    println!(
        "{}: {} test binaries, {programs} programs, {} examples, {:.1} MB; on the GPU machine: \
         bash run.sh [--help]",
        project.show(&out),
        tests.len(),
        examples.len(),
        size(&out)? as f64 / 1e6
    );
    Ok(())
}

/// Fills the folder with all but the tests and their data, and returns the number of programs.
pub fn programs(project: &Project, out: &Path) -> Result<usize> {
    let programs = executables(&mut cargo(project, &["build", "--bins"])?, false)?;
    if !programs.iter().any(|program| program.name == "fused-kv") {
        bail!("the program fused-kv was not built");
    }
    clear(out)?;
    for program in &programs {
        copy(&program.path, &out.join("bin").join(&program.name))?;
    }
    let peers = project.root.join("tests/peers/peers.py");
    copy(&peers, &out.join("peers/peers.py"))?;
    copy_tree(&project.root.join("host-crate/ptx"), &out.join("ptx/llvm"))?;
    let rust_cuda = project.target.join("ptx/rust-cuda");
    if rust_cuda.is_dir() {
        copy_tree(&rust_cuda, &out.join("ptx/rust-cuda"))?;
    }
    let script = out.join("run.sh");
    project::write(&script, RUN_SH)?;
    make_executable(&script)?;
    Ok(programs.len())
}

/// Cargo, building the bundle's packages for a GPU, on a machine without CUDA too.
fn cargo(project: &Project, arguments: &[&str]) -> Result<Command> {
    let mut command = project.cargo();
    command
        .args(arguments)
        .args(["--release", "--features", FEATURES])
        .args(PACKAGES.iter().flat_map(|package| ["--package", package]))
        .env("CUDA_LIBRARY_PATH", stub_cuda::make(project)?);
    Ok(command)
}

/// A program that cargo built.
#[derive(Debug, PartialEq, Eq)]
struct Executable {
    name: String,
    path: PathBuf,
}

fn executables(cargo: &mut Command, tests: bool) -> Result<Vec<Executable>> {
    let json = project::output(cargo.arg("--message-format=json-render-diagnostics"))?;
    let mut found = parse_messages(&json, tests)?;
    found.sort_by(|a, b| a.name.cmp(&b.name));
    if found.windows(2).any(|pair| pair[0].name == pair[1].name) {
        bail!("two executables have one name: {found:?}");
    }
    Ok(found)
}

/// The test binaries or the programs that cargo's JSON messages name. Unit tests are named
/// `unit-<crate>`, the others as their target.
fn parse_messages(json: &str, tests: bool) -> Result<Vec<Executable>> {
    #[derive(Deserialize)]
    struct Message {
        reason: String,
        executable: Option<PathBuf>,
        target: Option<Target>,
        profile: Option<Profile>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
        kind: Vec<String>,
    }
    #[derive(Deserialize)]
    struct Profile {
        test: bool,
    }
    let mut found = Vec::new();
    for line in json.lines().filter(|line| line.starts_with('{')) {
        let message: Message = serde_json::from_str(line).context("cargo's message")?;
        if message.reason != "compiler-artifact" {
            continue;
        }
        let (Some(path), Some(target), Some(profile)) =
            (message.executable, message.target, message.profile)
        else {
            continue;
        };
        // `cargo test` also builds the programs, for the tests to start.
        if profile.test != tests {
            continue;
        }
        let kind = target.kind.first().map_or("", String::as_str);
        let name = match (profile.test, kind) {
            (true, "test") | (false, _) => target.name,
            (true, "bin") => format!("unit-bin-{}", target.name),
            (true, _) => format!("unit-{}", target.name),
        };
        found.push(Executable { name, path });
    }
    Ok(found)
}

/// Empties the folder of an earlier bundle; one with anything else in it is left alone.
fn clear(out: &Path) -> Result<()> {
    let Ok(mut entries) = std::fs::read_dir(out) else {
        return Ok(());
    };
    if entries.next().is_some() && !out.join("run.sh").is_file() {
        bail!("{} is not empty and no bundle", out.display());
    }
    project::remove_dir(out)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(parent) = to.parent() {
        project::create_dir(parent)?;
    }
    std::fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    project::create_dir(to)?;
    let entries = std::fs::read_dir(from).with_context(|| from.display().to_string())?;
    for entry in entries {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &to)?;
        } else {
            copy(&entry.path(), &to)?;
        }
    }
    Ok(())
}

fn size(folder: &Path) -> Result<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        total += if entry.file_type()?.is_dir() {
            size(&entry.path())?
        } else {
            entry.metadata()?.len()
        };
    }
    Ok(total)
}

#[cfg(unix)]
fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
        .with_context(|| path.display().to_string())
}

#[cfg(not(unix))]
fn make_executable(_: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_earlier_bundle_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        clear(&folder.path().join("missing")).unwrap();
        project::write(&folder.path().join("thesis.tex"), "").unwrap();
        let error = clear(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("is not empty and no bundle"), "{error}");
        assert!(folder.path().join("thesis.tex").is_file());
        project::write(&folder.path().join("run.sh"), "").unwrap();
        clear(folder.path()).unwrap();
        assert!(!folder.path().exists());
    }

    #[test]
    fn executables_are_named_after_their_targets() {
        let json = r#"
{"reason":"build-script-executed","package_id":"a"}
{"reason":"compiler-artifact","target":{"name":"fused-kv","kind":["bin"]},"profile":{"test":false},"executable":"/t/release/fused-kv"}
{"reason":"compiler-artifact","target":{"name":"fused_kv","kind":["lib"]},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","target":{"name":"fused_kv","kind":["lib"]},"profile":{"test":true},"executable":"/t/release/deps/fused_kv-1"}
{"reason":"compiler-artifact","target":{"name":"gpu","kind":["test"]},"profile":{"test":true},"executable":"/t/release/deps/gpu-2"}
{"reason":"build-finished","success":true}"#;
        let names = |tests| {
            let found = parse_messages(json, tests).unwrap();
            found.into_iter().map(|e| e.name).collect::<Vec<_>>()
        };
        assert_eq!(names(true), ["unit-fused_kv", "gpu"]);
        assert_eq!(names(false), ["fused-kv"]);
    }

    /// compute-sanitizer and a test binary played by scripts.
    #[cfg(unix)]
    #[test]
    fn sanitizers_look_at_every_test() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let script = |name: &str, text: &str| {
            project::write(&path(name), format!("#!/usr/bin/env bash\n{text}\n")).unwrap();
            make_executable(&path(name)).unwrap();
        };
        project::write(&path("run.sh"), RUN_SH).unwrap();
        let list =
            "printf 'every_dim: test\\nsoak: test\\nno_driver: test\\nmany_threads: test\\n'";
        script(
            "tests/gpu",
            &format!("[ \"$1\" = --list ] && {list}; exit 0"),
        );
        script(
            "cuda/bin/compute-sanitizer",
            r#"case "$*" in
            *no_driver*)
                echo "test result: ok. 1 passed"
                echo "========= Error: Target application terminated before first instrumented API call"
                exit 255 ;;
            *--tool*--leak-check*soak*)
                echo "========= COMPUTE-SANITIZER"
                echo "running 1 test"
                # A test's name stands in the same line as what comes next.
                echo "test soak ... ========= Invalid __global__ write"
                echo "========="
                echo "Internal error"
                echo "test result: ok. 1 passed"
                exit "$SOAK_STATUS" ;;
            *many_threads*)
                # Fails as the tool does when it loses track, TOOL_FAILURES times.
                echo >> "$CUDA_PATH/calls"
                [ "$(wc -l < "$CUDA_PATH/calls")" -gt "$TOOL_FAILURES" ] && exit 0
                echo "test many_threads ... ========= Internal Sanitizer Error: lost a launch"
                echo "=========     Saved host backtrace up to driver entry point"
                echo "$BESIDE_IT"
                echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
                exit "$TOOL_STATUS" ;;
            esac"#,
        );
        let run_with = |status: &str, tool_failures: &str, tool_status: &str, beside_it: &str| {
            let _ = std::fs::remove_file(path("cuda/calls"));
            let output = Command::new("bash")
                .arg(path("run.sh"))
                .arg("memcheck")
                .env("CUDA_PATH", path("cuda"))
                .envs([("PARTS", "2"), ("JOBS", "2"), ("SOAK_STATUS", status)])
                .envs([
                    ("TOOL_FAILURES", tool_failures),
                    ("TOOL_STATUS", tool_status),
                ])
                .env("BESIDE_IT", beside_it)
                .env("SANITIZER_OPTIONS", "--leak-check full")
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            (output.status.code(), text)
        };
        let run = |status: &str, tool_failures: &str, beside_it: &str| {
            run_with(status, tool_failures, "9", beside_it)
        };
        let (status, text) = run("0", "0", "");
        assert_eq!(status, Some(0), "{text}");
        assert!(!text.contains("THE TOOL FAILED"), "{text}");
        for job in [
            "every_dim 1/2",
            "every_dim 2/2",
            "soak 1/1",
            "no_driver 1/1",
            "many_threads 1/1",
        ] {
            assert!(text.contains(&format!("ok memcheck gpu {job}")), "{text}");
        }
        assert!(text.contains("memcheck: 5 runs, 0 not clean"), "{text}");
        let (status, text) = run("9", "0", "");
        assert_eq!(status, Some(1), "{text}");
        assert!(
            text.contains(
                "NOT CLEAN (exit 9) memcheck gpu soak 1/1: Invalid __global__ write;Internal error;"
            ),
            "{text}"
        );
        assert!(text.contains("memcheck: 5 runs, 1 not clean"), "{text}");

        // What the tool failed in runs again, alone, until it has an answer or failed four times.
        let failed = "THE TOOL FAILED (exit 9), not the test: memcheck tests/gpu many_threads 1/1";
        let (status, text) = run("0", "3", "");
        assert_eq!(status, Some(0), "{text}");
        assert_eq!(text.matches(failed).count(), 3, "{text}");
        assert!(text.contains("ok memcheck gpu many_threads 1/1"), "{text}");
        assert!(text.contains("memcheck: 5 runs, 0 not clean"), "{text}");
        let (status, text) = run("0", "4", "");
        assert_eq!(status, Some(1), "{text}");
        assert_eq!(text.matches(failed).count(), 4, "{text}");
        assert!(text.contains("memcheck: 5 runs, 1 not clean"), "{text}");
        // Whatever its exit status is.
        let (status, text) = run_with("0", "1", "0", "");
        assert_eq!(status, Some(0), "{text}");
        assert_eq!(
            text.matches("THE TOOL FAILED (exit 0)").count(),
            1,
            "{text}"
        );
        assert!(text.contains("ok memcheck gpu many_threads 1/1"), "{text}");
        // Never when it found something as well, or when the test did not pass.
        for beside_it in ["========= Error: Race reported", "test result: FAILED"] {
            let (status, text) = run("0", "1", beside_it);
            assert_eq!(status, Some(1), "{text}");
            assert!(
                text.contains(
                    "NOT CLEAN (exit 9) memcheck gpu many_threads 1/1: Internal Sanitizer"
                ),
                "{text}"
            );
        }
    }
}
