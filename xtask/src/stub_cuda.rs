//! `cargo xtask stub-cuda`: a stand-in for a CUDA toolkit.
//!
//! cust's build script stops where it finds no toolkit, and a binary with the feature `cuda` needs
//! a libcuda to link. The stand-in is a folder that cust takes for a toolkit, with a `libcuda.so`
//! whose functions all return `CUDA_ERROR_STUB_LIBRARY`: enough to build everywhere, and to see
//! "no device" where such a binary is started with it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::project::{self, Project};

/// `CUDA_ERROR_STUB_LIBRARY`.
const STUB_LIBRARY: u32 = 34;

/// Makes the stand-in and prints how to use it.
pub fn run(project: &Project) -> Result<()> {
    let root = make(project)?;
    println!("export CUDA_LIBRARY_PATH={}", root.display());
    println!(
        "export LD_LIBRARY_PATH={}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",
        root.join("lib64").display()
    );
    eprintln!(
        "The first line is for building with the feature `cuda`, the second for starting what was \
         built on a machine without a driver."
    );
    Ok(())
}

/// Makes the stand-in where it is missing or out of date; returns the folder for
/// `CUDA_LIBRARY_PATH`.
pub fn make(project: &Project) -> Result<PathBuf> {
    let root = project.target.join("cuda-stub");
    let lib = root.join("lib64");
    let source_path = root.join("stub.rs");
    let source = source(&symbols(project)?);
    let library = lib.join("libcuda.so");
    let soname = lib.join("libcuda.so.1");
    let fresh = std::fs::read_to_string(&source_path).is_ok_and(|text| text == source);
    if fresh && soname.is_file() && library.is_file() {
        return Ok(root);
    }
    project::write(
        &root.join("include/cuda.h"),
        "/* Stand-in: only its presence matters. */\n",
    )?;
    project::create_dir(&lib)?;
    let draft = root.join("stub.new.rs");
    project::write(&draft, &source)?;
    let built = root.join("libcuda.new.so");
    project::run(
        Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
            .current_dir(&project.root)
            .args(["--edition", "2024", "--crate-type", "cdylib"])
            .args(["--crate-name", "cuda", "-O", "-C", "panic=abort"])
            .args([
                "-C",
                "strip=symbols",
                "-C",
                "link-arg=-Wl,-soname,libcuda.so.1",
            ])
            .arg("-o")
            .args([&built, &draft]),
    )?;
    // Renamed into place: another build may be reading the old one.
    copy_into_place(&built, &soname)?;
    copy_into_place(&built, &library)?;
    std::fs::rename(&draft, &source_path)?;
    std::fs::remove_file(&built)?;
    Ok(root)
}

fn copy_into_place(from: &Path, to: &Path) -> Result<()> {
    let draft = to.with_extension("new");
    std::fs::copy(from, &draft)
        .and_then(|_| std::fs::rename(&draft, to))
        .with_context(|| format!("cannot write {}", to.display()))
}

/// The driver functions that a binary may refer to: those that cust_raw declares, and those that
/// the workspace declares itself.
fn symbols(project: &Project) -> Result<BTreeSet<String>> {
    #[derive(serde::Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(serde::Deserialize)]
    struct Package {
        name: String,
        manifest_path: PathBuf,
    }
    let json = project::output(project.cargo().args([
        "metadata",
        "--format-version=1",
        "--features=fused-kv/cuda",
    ]))?;
    let metadata: Metadata = serde_json::from_str(&json).context("cargo metadata")?;
    let cust_raw = metadata
        .packages
        .iter()
        .find(|package| package.name == "cust_raw")
        .context("the feature `cuda` does not depend on cust_raw")?;
    let mut found = BTreeSet::new();
    let own = ["host-crate/src", "tests/src", "tests/tests"].map(|path| project.root.join(path));
    let bindings = cust_raw.manifest_path.with_file_name("src");
    for folder in own.iter().chain([&bindings]) {
        scan(folder, &mut found)?;
    }
    Ok(found)
}

fn scan(folder: &Path, found: &mut BTreeSet<String>) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Ok(());
    };
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            scan(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            driver_functions(&project::read(&path)?, found);
        }
    }
    Ok(())
}

/// Names after `fn ` that are the driver's: `cu` and a capital letter.
fn driver_functions(text: &str, found: &mut BTreeSet<String>) {
    for rest in text.split("fn cu").skip(1) {
        let name: String = rest
            .chars()
            .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
            .collect();
        if name.starts_with(|c: char| c.is_ascii_uppercase()) {
            found.insert(format!("cu{name}"));
        }
    }
}

/// The source of the stand-in library. A caller's arguments are ignored, which the C calling
/// convention of every supported host allows.
fn source(symbols: &BTreeSet<String>) -> String {
    let mut text = String::from("#![no_std]\n#![allow(non_snake_case)]\n");
    text.push_str("#[panic_handler]\nfn panic(_: &core::panic::PanicInfo) -> ! { loop {} }\n");
    for name in symbols {
        text.push_str(&format!(
            "#[unsafe(no_mangle)]\npub extern \"C\" fn {name}() -> u32 {{ {STUB_LIBRARY} }}\n"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_functions_are_found() {
        let mut found = BTreeSet::new();
        driver_functions(
            "extern \"C\" { pub fn cuInit(f: u32) -> u32; fn cuMemAlloc_v2(); } \
             fn custom() {} fn cut() {} // cuNot",
            &mut found,
        );
        let found: Vec<_> = found.into_iter().collect();
        assert_eq!(found, ["cuInit", "cuMemAlloc_v2"]);
    }
}
