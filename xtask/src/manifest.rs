//! The manifest beside a set of PTX files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::project::{self, Project};
use crate::ptx::Ptx;

/// Name of the manifest in its folder.
pub const FILE: &str = "manifest.json";

/// What a folder of PTX files was made from, and what is in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// How the folder is made.
    pub generated_by: String,
    /// Code generator: `llvm` or `rust-cuda`.
    pub codegen: String,
    /// `rustc --version` of the compiler.
    pub compiler: String,
    /// SHA-256 of the device crate's sources and locked dependencies, see [`source_digest`].
    pub source_sha256: String,
    /// Version of the parameter struct's layout.
    pub abi_version: u32,
    /// Bytes of the parameter struct.
    pub params_size: usize,
    /// The files, lowest architecture first.
    pub tiers: Vec<File>,
}

/// One PTX file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Name within the folder.
    pub file: String,
    /// `.target` of the PTX.
    pub target: String,
    /// `.version` of the PTX.
    pub ptx_version: String,
    /// SHA-256 of the file.
    pub sha256: String,
    /// Kernels, sorted.
    pub entries: Vec<String>,
}

impl Manifest {
    /// Describes PTX files that were just made; `files` holds their names and contents.
    pub fn describe(
        project: &Project,
        generated_by: &str,
        codegen: &str,
        compiler: &str,
        files: &[(String, String)],
    ) -> Result<Self> {
        Ok(Self {
            generated_by: generated_by.to_owned(),
            codegen: codegen.to_owned(),
            compiler: compiler.to_owned(),
            source_sha256: source_digest(project)?,
            abi_version: fused_kv_kernels::abi::ABI_VERSION,
            params_size: size_of::<fused_kv_kernels::abi::Params>(),
            tiers: files
                .iter()
                .map(|(name, text)| File::describe(name, text))
                .collect::<Result<_>>()?,
        })
    }

    /// Reads the manifest of a folder.
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        serde_json::from_str(&project::read(&path)?).with_context(|| path.display().to_string())
    }

    /// What `expected` says otherwise, one line each. Tiers that `expected` does not have are not
    /// looked at.
    pub fn differences(&self, expected: &Self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut compare =
            |what: &str, found: &dyn std::fmt::Debug, expected: &dyn std::fmt::Debug| {
                let (found, expected) = (format!("{found:?}"), format!("{expected:?}"));
                if found != expected {
                    lines.push(format!("{what} is {found}, expected {expected}"));
                }
            };
        compare("codegen", &self.codegen, &expected.codegen);
        compare("compiler", &self.compiler, &expected.compiler);
        compare(
            "source_sha256",
            &self.source_sha256,
            &expected.source_sha256,
        );
        compare("abi_version", &self.abi_version, &expected.abi_version);
        compare("params_size", &self.params_size, &expected.params_size);
        for tier in &expected.tiers {
            let found = self.tiers.iter().find(|found| found.file == tier.file);
            compare(&tier.file, &found, &Some(tier));
        }
        lines
    }

    /// The manifest's text.
    pub fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}

impl File {
    fn describe(name: &str, text: &str) -> Result<Self> {
        let ptx = Ptx::parse(text).with_context(|| name.to_owned())?;
        Ok(Self {
            file: name.to_owned(),
            entries: ptx.entry_names(),
            target: ptx.target,
            ptx_version: ptx.version,
            sha256: hex(Sha256::digest(text)),
        })
    }
}

/// SHA-256 over what the PTX is compiled from: the sources of the device crate in the order of
/// their paths, its Cargo.toml, and the locked packages that it depends on. Line ends count as
/// newlines, so that a checkout's settings do not matter.
pub fn source_digest(project: &Project) -> Result<String> {
    let crate_root = project.root.join("kernel-crate");
    let mut paths = vec![crate_root.join("Cargo.toml")];
    rust_files(&crate_root.join("src"), &mut paths)?;
    paths.sort();
    let mut digest = Sha256::new();
    let mut part = |name: &str, text: &str| {
        let text = text.replace("\r\n", "\n");
        // Lengths keep the end of one part and the start of the next apart.
        digest.update(format!("{name} {}\n", text.len()));
        digest.update(text);
    };
    for path in &paths {
        let name = path.strip_prefix(&crate_root).unwrap_or(path);
        let name: Vec<_> = name
            .iter()
            .map(|component| component.to_string_lossy())
            .collect();
        part(&name.join("/"), &project::read(path)?);
    }
    let lock = project::read(&project.root.join("Cargo.lock"))?;
    part(
        "Cargo.lock",
        &locked_dependencies(&lock, "fused-kv-kernels")?,
    );
    Ok(hex(digest.finalize()))
}

fn rust_files(folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder)
        .with_context(|| format!("cannot read the folder {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            rust_files(&path, paths)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            paths.push(path);
        }
    }
    Ok(())
}

#[derive(Deserialize)]
struct Lock {
    package: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    checksum: Option<String>,
    #[serde(default)]
    dependencies: Vec<String>,
}

/// One line for each package of a Cargo.lock that `root` depends on, with version and checksum.
fn locked_dependencies(lock: &str, root: &str) -> Result<String> {
    let lock: Lock = toml::from_str(lock).context("cannot read Cargo.lock")?;
    let mut found: Vec<&Package> = Vec::new();
    let mut open = vec![root.to_owned()];
    while let Some(wanted) = open.pop() {
        // `name`, or `name version` where several versions are locked.
        let mut words = wanted.split(' ');
        let (name, version) = (words.next().unwrap_or_default(), words.next());
        let package = lock
            .package
            .iter()
            .find(|package| package.name == name && version.is_none_or(|v| package.version == v))
            .with_context(|| format!("Cargo.lock has no package `{wanted}`"))?;
        if !found.iter().any(|known| std::ptr::eq(*known, package)) {
            found.push(package);
            open.extend(package.dependencies.iter().cloned());
        }
    }
    let mut lines: Vec<_> = found
        .iter()
        .filter(|package| package.name != root)
        .map(|package| {
            let checksum = package.checksum.as_deref().unwrap_or("-");
            format!("{} {} {checksum}\n", package.name, package.version)
        })
        .collect();
    lines.sort();
    Ok(lines.concat())
}

fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = r#"
version = 4
[[package]]
name = "device"
version = "0.1.0"
dependencies = ["half 2.7.1"]
[[package]]
name = "half"
version = "1.8.3"
checksum = "aa"
[[package]]
name = "half"
version = "2.7.1"
checksum = "bb"
dependencies = ["cfg-if"]
[[package]]
name = "cfg-if"
version = "1.0.0"
checksum = "cc"
[[package]]
name = "clap"
version = "4.6.0"
checksum = "dd"
"#;

    #[test]
    fn only_the_packages_in_use_count() {
        let lines = locked_dependencies(LOCK, "device").unwrap();
        assert_eq!(lines, "cfg-if 1.0.0 cc\nhalf 2.7.1 bb\n");
        let error = locked_dependencies(LOCK, "host").unwrap_err();
        assert!(error.to_string().contains("`host`"));
    }

    fn checkout(source: &str, lock: &str) -> (tempfile::TempDir, Project) {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            project::write(&folder.path().join(path), text).unwrap();
        };
        write("kernel-crate/Cargo.toml", "[package]\n");
        write("kernel-crate/src/lib.rs", source);
        write("kernel-crate/src/gpu/mod.rs", "// gpu\n");
        write("kernel-crate/src/notes.txt", source);
        write("Cargo.lock", lock);
        let project = Project {
            root: folder.path().to_owned(),
            target: folder.path().join("target"),
        };
        (folder, project)
    }

    #[test]
    fn the_digest_follows_sources_and_dependencies_only() {
        let lock = LOCK.replace("device", "fused-kv-kernels");
        let digest = |source: &str, lock: &str| {
            let (_folder, project) = checkout(source, lock);
            source_digest(&project).unwrap()
        };
        let reference = digest("a\nb\n", &lock);
        assert_eq!(digest("a\r\nb\r\n", &lock), reference);
        assert_eq!(digest("a\nb\n", &lock.replace("4.6.0", "4.7.0")), reference);
        assert_ne!(digest("a\nc\n", &lock), reference);
        assert_ne!(digest("a\nb\n", &lock.replace("bb", "ee")), reference);
    }

    #[test]
    fn a_manifest_survives_its_text() {
        let (_folder, project) = checkout("a", &LOCK.replace("device", "fused-kv-kernels"));
        let text = ".version 7.8\n.target sm_80\n.visible .entry k(\n)\n{\n}\n";
        let files = [("sm_80.ptx".to_owned(), text.to_owned())];
        let manifest = Manifest::describe(&project, "cmd", "llvm", "rustc 1", &files).unwrap();
        assert_eq!(manifest.tiers[0].entries, ["k"]);
        project::write(&project.root.join(FILE), manifest.to_json().unwrap()).unwrap();
        let loaded = Manifest::load(&project.root).unwrap();
        assert_eq!(loaded, manifest);
        assert_eq!(loaded.differences(&manifest), [""; 0]);
        let other = Manifest {
            abi_version: 0,
            ..manifest.clone()
        };
        let lines = other.differences(&manifest);
        assert_eq!(lines.len(), 1);
        assert!(lines[0].starts_with("abi_version is 0, expected"));
    }
}
