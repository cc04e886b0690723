//! `cargo xtask build-ptx`: PTX from kernel-crate, through either code generator.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::doctor;
use crate::flags::{BuildPtx, Codegen};
use crate::manifest::{self, Manifest};
use crate::project::{self, Project};
use crate::ptx::Ptx;
use crate::tiers::{self, Tier};

/// The device crate, as a part of file names.
const CRATE: &str = "fused_kv_kernels";
/// The target triple of the in-tree back end.
const TRIPLE: &str = "nvptx64-nvidia-cuda";

/// Builds PTX and writes it, or compares it with what is there.
pub fn run(project: &Project, flags: &BuildPtx) -> Result<()> {
    let tiers = tiers::select(&flags.tiers)?;
    let out = out_folder(project, flags);
    let complete = tiers.len() == tiers::TIERS.len();
    if !complete && !flags.check && flags.out.is_none() {
        bail!("a folder holds all tiers of one source: name another with --out to build only some");
    }
    let (manifest, files) = match flags.codegen {
        Codegen::Llvm => {
            let toolchain = Toolchain::find(project)?;
            if !toolchain.has_rust_src() {
                if flags.check {
                    return check_digest(project, flags, &out, &toolchain);
                }
                bail!("{}", toolchain.missing_rust_src());
            }
            llvm(project, &toolchain, &tiers)?
        }
        Codegen::RustCuda => rust_cuda(project, &tiers)?,
    };
    if flags.check {
        return check(project, flags, &out, &manifest, &files);
    }
    project::create_dir(&out)?;
    // Files of tiers that are no more.
    let old = Manifest::load(&out).map_or_else(|_| Vec::new(), |manifest| manifest.tiers);
    for old in old.iter().map(|tier| out.join(&tier.file)) {
        if old.is_file() {
            std::fs::remove_file(&old).with_context(|| old.display().to_string())?;
        }
    }
    for (name, text) in &files {
        project::write(&out.join(name), text)?;
    }
    project::write(&out.join(manifest::FILE), manifest.to_json()?)?;
    for tier in &manifest.tiers {
        println!(
            "{}: PTX {} for {}, {} kernels",
            project.show(&out.join(&tier.file)),
            tier.ptx_version,
            tier.target,
            tier.entries.len()
        );
    }
    Ok(())
}

/// A manifest and the PTX files it describes, as names and contents.
type Built = (Manifest, Vec<(String, String)>);

/// Where the PTX of a code generator lies.
fn out_folder(project: &Project, flags: &BuildPtx) -> PathBuf {
    match (&flags.out, flags.codegen) {
        (Some(out), _) => std::env::current_dir().unwrap_or_default().join(out),
        (None, Codegen::Llvm) => project.root.join("host-crate/ptx"),
        (None, Codegen::RustCuda) => project.target.join("ptx/rust-cuda"),
    }
}

/// The command that makes a folder of PTX.
fn command(flags: &BuildPtx) -> String {
    let mut command = String::from("cargo xtask build-ptx");
    if flags.codegen == Codegen::Llvm {
        command.push_str(" --codegen llvm");
    }
    if let Some(out) = &flags.out {
        command.push_str(&format!(" --out {}", out.display()));
    }
    command
}

/// The host side's toolchain.
struct Toolchain {
    /// Its rustup name, which is its version.
    name: String,
    /// `rustc --version`.
    version: String,
    sysroot: PathBuf,
}

impl Toolchain {
    fn find(project: &Project) -> Result<Self> {
        let name = project.toolchain()?;
        let rustc = |arguments: &[&str]| {
            let mut command = project.in_toolchain("rustc", Some(&name));
            Ok::<_, anyhow::Error>(project::output(command.args(arguments))?.trim().to_owned())
        };
        let version = rustc(&["--version"])?;
        if !version.starts_with(&format!("rustc {name} ")) {
            bail!("the PTX is built with rustc {name}, but `rustc` is {version}");
        }
        let sysroot = rustc(&["--print", "sysroot"])?.into();
        Ok(Self {
            name,
            version,
            sysroot,
        })
    }

    fn rust_src(&self) -> PathBuf {
        self.sysroot.join("lib/rustlib/src/rust")
    }

    fn has_rust_src(&self) -> bool {
        self.rust_src().join("library/core/src/lib.rs").is_file()
    }

    fn missing_rust_src(&self) -> String {
        format!(
            "no sources of the Rust library in {} (they are compiled for the GPU too)\n\
             install them with:  rustup component add rust-src --toolchain {}",
            self.rust_src().display(),
            self.name
        )
    }
}

/// rustc's NVPTX back end.
fn llvm(project: &Project, toolchain: &Toolchain, tiers: &[&Tier]) -> Result<Built> {
    let mut files = Vec::new();
    for tier in tiers {
        eprintln!("compiling kernel-crate for {} ...", tier.name);
        let text = llvm_tier(project, toolchain, tier)?;
        let ptx = Ptx::parse(&text).with_context(|| format!("the PTX of {}", tier.name))?;
        if !ptx.unresolved.is_empty() {
            // Only this crate becomes PTX: what is not inlined into it is not there at run time.
            bail!(
                "the PTX of {} calls functions that it does not hold: {}\n\
                 (a panic, or a function of another crate that was not inlined)",
                tier.name,
                ptx.unresolved.join(", ")
            );
        }
        if ptx.entries.is_empty() {
            bail!("the PTX of {} has no kernels", tier.name);
        }
        files.push((format!("{}.ptx", tier.name), text));
    }
    let manifest = Manifest::describe(
        project,
        "cargo xtask build-ptx --codegen llvm",
        "llvm",
        &toolchain.version,
        &files,
    )?;
    Ok((manifest, files))
}

fn llvm_tier(project: &Project, toolchain: &Toolchain, tier: &Tier) -> Result<String> {
    let manifest = stage(project)?;
    let build = manifest.parent().context("a file lies in a folder")?;
    // The back end's text is a by-product that cargo does not track, so the crate is compiled
    // afresh for each tier; the core library is not.
    let deps = build.join("target").join(TRIPLE).join("release/deps");
    if deps.is_dir() {
        for path in crate_files(&deps, "")? {
            std::fs::remove_file(&path).with_context(|| path.display().to_string())?;
        }
    }
    // Nothing that differs between machines or checkouts may reach the text: fixed code generation
    // settings whatever the profiles say, and no paths.
    let mut cargo = project.in_toolchain("cargo", Some(&toolchain.name));
    cargo
        .current_dir(build)
        // -Zbuild-std and the nvptx intrinsics are unstable; the compiler is pinned.
        .env("RUSTC_BOOTSTRAP", "1")
        .args(["rustc", "--quiet", "--release", "--lib"])
        .args(["--crate-type", "rlib", "--target-dir", "target"])
        .args(["-Zbuild-std=core", "--target", TRIPLE])
        .args(["--", "--emit", "asm", "-C", "opt-level=3"])
        .args(["-C", "codegen-units=1", "-C", "debuginfo=0"])
        .args(["-C", "panic=abort", "-C", "overflow-checks=off"])
        .args(["-C", "debug-assertions=off", "-C"])
        .arg(format!("target-cpu={}", tier.name))
        .arg("-C")
        .arg(format!("target-feature=+ptx{}", tier.ptx_version));
    for (from, to) in [
        (&toolchain.rust_src(), "/rust"),
        (&package(project), "kernel-crate"),
    ] {
        cargo.arg(format!("--remap-path-prefix={}={to}", from.display()));
    }
    if tier.fp8 {
        cargo.args(["--cfg", "fused_kv_fp8"]);
    }
    if tier.overlap {
        cargo.args(["--cfg", "fused_kv_overlap"]);
    }
    // Quietly: naming a PTX version is a warning, since the feature is unstable.
    project::run_quietly(&mut cargo)?;
    match crate_files(&deps, "s")?.as_slice() {
        [path] => Ok(project::read(path)?.replace("\r\n", "\n")),
        found => bail!("expected one PTX file in {}: {found:?}", deps.display()),
    }
}

/// The device crate's folder.
fn package(project: &Project) -> PathBuf {
    project.root.join("kernel-crate")
}

/// Makes the device crate a package of its own in the target directory, with the workspace's locked
/// versions; returns its Cargo.toml.
///
/// In the workspace, the features that host crates ask of common dependencies (`std`) would reach
/// the device; in its own folder, the device crate asks for the git dependency and the toolchain of
/// the other code generator.
pub fn stage(project: &Project) -> Result<PathBuf> {
    let package = package(project);
    let folder = project.target.join("ptx/build-llvm");
    let manifest = folder.join("Cargo.toml");
    project::write(
        &manifest,
        standalone(&project::read(&package.join("Cargo.toml"))?, &package)?,
    )?;
    let lock = project::read(&project.root.join("Cargo.lock"))?;
    project::write(&folder.join("Cargo.lock"), lock)?;
    Ok(manifest)
}

/// The device crate's Cargo.toml for a build elsewhere and on its own, without what comes by git.
fn standalone(manifest: &str, package: &Path) -> Result<String> {
    let mut manifest: toml::Table = manifest.parse().context("kernel-crate/Cargo.toml")?;
    let mut dropped: Vec<String> = Vec::new();
    if let Some(toml::Value::Table(dependencies)) = manifest.get_mut("dependencies") {
        dependencies.retain(|name, value| {
            // What is optional belongs to the other code generator.
            let optional = value.get("optional").and_then(toml::Value::as_bool);
            let kept = optional != Some(true) && value.get("git").is_none();
            if !kept {
                dropped.push(name.to_owned());
            }
            kept
        });
    }
    if let Some(toml::Value::Table(features)) = manifest.get_mut("features") {
        for (_, parts) in features.iter_mut() {
            if let toml::Value::Array(parts) = parts {
                parts.retain(|part| {
                    let part = part.as_str().unwrap_or_default();
                    let part = part.strip_prefix("dep:").unwrap_or(part);
                    let part = part.split(['/', '?']).next().unwrap_or_default();
                    !dropped.iter().any(|name| name == part)
                });
            }
        }
    }
    if let Some(toml::Value::Table(section)) = manifest.get_mut("lib") {
        let path = package.join("src/lib.rs");
        section.insert("path".into(), path.display().to_string().into());
    } else {
        bail!("kernel-crate/Cargo.toml has no section [lib]");
    }
    let tests = std::fs::read_dir(package.join("tests"));
    let tests = tests.into_iter().flatten().filter_map(|entry| {
        let path = entry.ok()?.path();
        let name = path.file_name()?.to_str()?.strip_suffix(".rs")?;
        let mut section = toml::Table::new();
        section.insert("name".into(), name.into());
        section.insert("path".into(), path.display().to_string().into());
        Some(toml::Value::Table(section))
    });
    let tests: Vec<_> = tests.collect();
    manifest.insert("test".into(), tests.into());
    manifest.insert("workspace".into(), toml::Table::new().into());
    Ok(toml::to_string(&manifest)?)
}

/// Files of the device crate in cargo's `deps` folder, of this extension or of any.
fn crate_files(deps: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(deps).with_context(|| deps.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.strip_prefix("lib").unwrap_or(&name);
        if name.starts_with(&format!("{CRATE}-"))
            && (extension.is_empty() || path.extension().is_some_and(|found| found == extension))
        {
            found.push(path);
        }
    }
    Ok(found)
}

/// cuda_builder, in the device crate's own toolchain.
fn rust_cuda(project: &Project, tiers: &[&Tier]) -> Result<Built> {
    doctor::require_rust_cuda(project)?;
    let builder = project.root.join("kernel-crate/ptx-builder");
    let made = project.target.join("ptx/build-rust-cuda");
    project::remove_dir(&made)?;
    project::create_dir(&made)?;
    let mut cargo = project.in_toolchain("cargo", None);
    cargo
        .current_dir(&builder)
        .args(["run", "--locked", "--", "--out"])
        .arg(&made);
    for tier in tiers {
        cargo.args(["--tier", tier.name]);
    }
    project::run(&mut cargo)?;
    let mut files = Vec::new();
    for tier in tiers {
        let name = format!("{}.ptx", tier.name);
        files.push((name.clone(), project::read(&made.join(name))?));
    }
    let mut rustc = project.in_toolchain("rustc", None);
    let version = project::output(rustc.current_dir(&builder).arg("--version"))?;
    let manifest = Manifest::describe(
        project,
        "cargo xtask build-ptx",
        "rust-cuda",
        version.trim(),
        &files,
    )?;
    Ok((manifest, files))
}

/// `--check`: is what was built what is there?
fn check(
    project: &Project,
    flags: &BuildPtx,
    out: &Path,
    manifest: &Manifest,
    files: &[(String, String)],
) -> Result<()> {
    let mut differences = Vec::new();
    for (name, text) in files {
        let path = out.join(name);
        let shown = project.show(&path);
        match std::fs::read_to_string(&path) {
            Err(error) => differences.push(format!("{shown}: {error}")),
            Ok(found) if found != *text => {
                let same = found.lines().zip(text.lines()).take_while(|(a, b)| a == b);
                differences.push(format!("{shown}: differs from line {}", same.count() + 1));
            }
            Ok(_) => println!("{shown}: as built"),
        }
    }
    match Manifest::load(out) {
        Err(error) => differences.push(format!("{error:#}")),
        Ok(found) => differences.extend(
            found
                .differences(manifest)
                .into_iter()
                .map(|line| format!("{}: {line}", project.show(&out.join(manifest::FILE)))),
        ),
    }
    conclude(flags, &differences, "the PTX is what the sources give")
}

/// `--check` where the PTX cannot be rebuilt.
fn check_digest(
    project: &Project,
    flags: &BuildPtx,
    out: &Path,
    toolchain: &Toolchain,
) -> Result<()> {
    println!("{}", toolchain.missing_rust_src());
    println!("NOT REBUILT: only the source digest and the files' hashes are compared");
    let found = Manifest::load(out)?;
    let files: Vec<_> = found
        .tiers
        .iter()
        .map(|tier| Ok((tier.file.clone(), project::read(&out.join(&tier.file))?)))
        .collect::<Result<_>>()?;
    let expected = Manifest::describe(
        project,
        &found.generated_by,
        &found.codegen,
        &found.compiler,
        &files,
    )?;
    conclude(
        flags,
        &found.differences(&expected),
        "the sources and the files are those of the manifest (not rebuilt)",
    )
}

fn conclude(flags: &BuildPtx, differences: &[String], agreed: &str) -> Result<()> {
    if differences.is_empty() {
        println!("{agreed}");
        return Ok(());
    }
    bail!(
        "the PTX is not what the sources give:\n  {}\nmake it anew with:  {}",
        differences.join("\n  "),
        command(flags)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standalone_manifest_has_nothing_by_git() {
        let text = r#"
[package]
name = "device"
[lib]
path = "src/lib.rs"
[features]
rust-cuda = ["dep:cuda_std", "glam/libm", "half/nightly"]
[dependencies]
half = { version = "2.7", default-features = false }
cuda_std = { git = "https://example.com/r", rev = "1", optional = true }
glam = { version = "0.30", optional = true }
[dev-dependencies]
proptest = "1"
"#;
        let package = tempfile::tempdir().unwrap();
        project::write(&package.path().join("tests/some.rs"), "").unwrap();
        let made = standalone(text, package.path()).unwrap();
        let made: toml::Table = made.parse().unwrap();
        let dependencies: Vec<_> = made["dependencies"].as_table().unwrap().keys().collect();
        assert_eq!(dependencies, ["half"]);
        assert_eq!(made["features"]["rust-cuda"].as_array().unwrap().len(), 1);
        let path = package.path().join("src/lib.rs");
        assert_eq!(made["lib"]["path"].as_str(), path.to_str());
        assert_eq!(made["test"][0]["name"].as_str(), Some("some"));
        assert!(made.contains_key("workspace") && made.contains_key("dev-dependencies"));
    }
}
