//! `cargo xtask ptx-report`: what ptxas makes of the PTX.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::env::Machine;
use crate::flags;
use crate::manifest::{self, Manifest};
use crate::project::{self, Project};
use crate::ptx::Ptx;
use crate::ptxas::{self, Usage};

/// Architectures that every PTX which can run there is assembled for.
const TARGETS: [u32; 3] = [80, 90, 100];

/// Prints the table; fails on anything in local memory, and on kernels missing or unexpected.
pub fn run(project: &Project, flags: &flags::PtxReport) -> Result<()> {
    if flags.install {
        ptxas::install(project)?;
    }
    let env = Machine { project };
    let ptxas = ptxas::find(project, &env).with_context(|| {
        let looked: Vec<_> = ptxas::candidates(project, &env)
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        format!(
            "no ptxas on PATH nor at {}\nbring it with:  {}",
            looked.join(", "),
            ptxas::MEND
        )
    })?;
    println!("{}", ptxas.display());

    let mut files = Vec::new();
    for path in &flags.ptx {
        let path = std::env::current_dir()?.join(path);
        if path.is_dir() {
            files.extend(in_folder(&path)?);
        } else {
            files.push(path);
        }
    }
    if flags.ptx.is_empty() {
        files = in_folder(&project.root.join("host-crate/ptx"))?;
    }
    if files.is_empty() {
        bail!("no PTX to report on");
    }

    let mut faults = Vec::new();
    for path in &files {
        let shown = project.show(path).to_string();
        let ptx = Ptx::parse(&project::read(path)?).context(shown.clone())?;
        println!("\n{shown}: PTX {} for {}", ptx.version, ptx.target);
        for fault in text_faults(&ptx, expected_entries(path)?.as_deref()) {
            faults.push(format!("{shown}: {fault}"));
        }
        println!("{}", header());
        for target in targets(&ptx)? {
            let usages = ptxas::assemble(&ptxas, path, target)?;
            if usages.len() != ptx.entries.len() {
                faults.push(format!("{shown}: ptxas reports {} kernels", usages.len()));
            }
            for usage in usages {
                println!("{}", row(&usage, target));
                if usage.uses_memory() {
                    faults.push(format!(
                        "{shown}: {} spills or has a stack on sm_{target}",
                        usage.entry
                    ));
                }
            }
        }
    }
    if !faults.is_empty() {
        bail!("ptx-report found faults:\n  {}", faults.join("\n  "));
    }
    println!("\nno spills, no stack, no local memory; the kernels are those of the manifest");
    Ok(())
}

/// PTX files of a folder in the order of their names.
pub fn in_folder(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)
        .with_context(|| format!("cannot read the folder {}", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "ptx") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The kernels that the manifest beside the file lists, where there is one.
fn expected_entries(path: &Path) -> Result<Option<Vec<String>>> {
    let folder = path.parent().unwrap_or(Path::new("."));
    if !folder.join(manifest::FILE).is_file() {
        println!("(no manifest beside it: the list of kernels is not checked)");
        return Ok(None);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let manifest = Manifest::load(folder)?;
    let tier = manifest.tiers.into_iter().find(|tier| tier.file == name);
    let tier = tier.with_context(|| format!("the manifest does not list {name}"))?;
    Ok(Some(tier.entries))
}

/// What the text alone tells.
fn text_faults(ptx: &Ptx, expected: Option<&[String]>) -> Vec<String> {
    let mut faults: Vec<_> = ptx
        .entries
        .iter()
        .filter(|entry| entry.local)
        .map(|entry| format!("{} has variables in local memory", entry.name))
        .collect();
    for name in &ptx.unresolved {
        faults.push(format!("{name} is called but not there"));
    }
    let found = ptx.entry_names();
    for name in expected.unwrap_or_default() {
        if !found.contains(name) {
            faults.push(format!("the kernel {name} is missing"));
        }
    }
    if let Some(expected) = expected {
        for name in found.iter().filter(|name| !expected.contains(name)) {
            faults.push(format!("the kernel {name} is not in the manifest"));
        }
    }
    faults
}

/// Architectures to assemble for: the file's own, and those of [`TARGETS`] above it.
fn targets(ptx: &Ptx) -> Result<Vec<u32>> {
    let own = capability(&ptx.target)?;
    let above = TARGETS.into_iter().filter(|target| *target > own);
    Ok([own].into_iter().chain(above).collect())
}

/// `sm_90a` or `compute_90` as 90.
pub fn capability(target: &str) -> Result<u32> {
    let digits: String = target.chars().filter(char::is_ascii_digit).collect();
    digits
        .parse()
        .with_context(|| format!("`{target}` names no architecture"))
}

fn header() -> String {
    format!(
        "{:<32} {:>7} {:>9} {:>12} {:>11} {:>6} {:>7}",
        "kernel", "target", "registers", "spill stores", "spill loads", "stack", "shared"
    )
}

fn row(usage: &Usage, target: u32) -> String {
    format!(
        "{:<32} {:>7} {:>9} {:>12} {:>11} {:>6} {:>7}",
        usage.entry,
        format!("sm_{target}"),
        usage.registers,
        usage.spill_stores,
        usage.spill_loads,
        usage.stack,
        usage.shared
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ptx(target: &str) -> Ptx {
        let text = format!(
            ".version 7.8\n.target {target}\n.visible .entry a(\n)\n{{\n\t.local .b8 x[8];\n}}\n\
             .visible .entry b(\n)\n{{\n\tret;\n}}\n"
        );
        Ptx::parse(&text).unwrap()
    }

    #[test]
    fn the_text_is_checked_against_the_manifest() {
        let expected = ["b".to_owned(), "c".to_owned()];
        assert_eq!(
            text_faults(&ptx("sm_80"), Some(&expected)),
            [
                "a has variables in local memory",
                "the kernel c is missing",
                "the kernel a is not in the manifest",
            ]
        );
        assert_eq!(text_faults(&ptx("sm_80"), None).len(), 1);
    }

    #[test]
    fn files_are_assembled_from_their_own_architecture_up() {
        assert_eq!(targets(&ptx("sm_80")).unwrap(), [80, 90, 100]);
        assert_eq!(targets(&ptx("sm_89")).unwrap(), [89, 90, 100]);
        assert_eq!(targets(&ptx("sm_90a")).unwrap(), [90, 100]);
    }
}
