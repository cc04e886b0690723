//! `cargo xtask ptx-compare A B`: are two sets of PTX the same kernels?

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::env::Machine;
use crate::flags;
use crate::project::{self, Project};
use crate::ptx::{Entry, Ptx};
use crate::ptx_report;
use crate::ptxas::{self, Usage};

/// Compares two files, or the files of the same names in two folders.
pub fn run(project: &Project, flags: &flags::PtxCompare) -> Result<()> {
    let env = Machine { project };
    let ptxas = ptxas::find(project, &env);
    if ptxas.is_none() {
        println!(
            "no ptxas: registers and spills are not compared ({})",
            ptxas::MEND
        );
    }
    let mut faults = Vec::new();
    for (a, b) in pairs(&flags.a, &flags.b)? {
        println!("A {}\nB {}", a.display(), b.display());
        let sides = [
            Side::load(&a, ptxas.as_deref())?,
            Side::load(&b, ptxas.as_deref())?,
        ];
        let comparison = Comparison::of(&sides);
        for line in &comparison.lines {
            println!("{line}");
        }
        println!();
        faults.extend(comparison.faults);
    }
    if !faults.is_empty() {
        bail!(
            "the two are not the same kernels:\n  {}",
            faults.join("\n  ")
        );
    }
    println!(
        "the same kernels, parameters and 16-byte accesses; nothing through the generic space"
    );
    Ok(())
}

fn pairs(a: &Path, b: &Path) -> Result<Vec<(PathBuf, PathBuf)>> {
    if !a.is_dir() && !b.is_dir() {
        return Ok(vec![(a.to_owned(), b.to_owned())]);
    }
    let names = |folder: &Path| -> Result<BTreeSet<_>> {
        let files = ptx_report::in_folder(folder)?;
        let names = files.iter().filter_map(|path| path.file_name());
        Ok(names.map(std::ffi::OsStr::to_owned).collect())
    };
    let (in_a, in_b) = (names(a)?, names(b)?);
    if in_a != in_b || in_a.is_empty() {
        bail!("the folders hold different files: A {in_a:?}, B {in_b:?}");
    }
    Ok(in_a
        .iter()
        .map(|name| (a.join(name), b.join(name)))
        .collect())
}

struct Side {
    ptx: Ptx,
    usages: Option<Vec<Usage>>,
}

impl Side {
    fn load(path: &Path, ptxas: Option<&Path>) -> Result<Self> {
        let ptx = Ptx::parse(&project::read(path)?).with_context(|| path.display().to_string())?;
        let capability = ptx_report::capability(&ptx.target)?;
        let usages = ptxas
            .map(|ptxas| ptxas::assemble(ptxas, path, capability))
            .transpose()?;
        Ok(Self { ptx, usages })
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        self.ptx.entries.iter().find(|entry| entry.name == name)
    }

    /// Registers, and bytes of spills and stack.
    fn usage(&self, name: &str) -> Option<String> {
        let usages = self.usages.as_ref()?;
        let usage = usages.iter().find(|usage| usage.entry == name)?;
        Some(format!(
            "{} registers, {} B spilled, {} B stack",
            usage.registers,
            usage.spill_stores + usage.spill_loads,
            usage.stack
        ))
    }
}

#[derive(Default)]
struct Comparison {
    lines: Vec<String>,
    faults: Vec<String>,
}

impl Comparison {
    fn of(sides: &[Side; 2]) -> Self {
        let mut made = Self::default();
        let [a, b] = sides;
        made.line(".version", &a.ptx.version, &b.ptx.version);
        made.line(".target", &a.ptx.target, &b.ptx.target);
        let capability = |side: &Side| ptx_report::capability(&side.ptx.target).ok();
        if capability(a) != capability(b) {
            made.faults.push(format!(
                "targets differ: {} and {}",
                a.ptx.target, b.ptx.target
            ));
        }
        let names: BTreeSet<_> = sides
            .iter()
            .flat_map(|side| side.ptx.entry_names())
            .collect();
        for name in &names {
            made.lines.push(name.clone());
            match (a.entry(name), b.entry(name)) {
                (Some(entry_a), Some(entry_b)) => made.entries(entry_a, entry_b),
                (in_a, _) => {
                    let side = if in_a.is_none() { "A" } else { "B" };
                    made.faults.push(format!("{name} is missing in {side}"));
                }
            }
            if let (Some(in_a), Some(in_b)) = (a.usage(name), b.usage(name)) {
                made.line("  ptxas", &in_a, &in_b);
            }
        }
        for (side, label) in sides.iter().zip(["A", "B"]) {
            for usage in side.usages.iter().flatten().filter(|u| u.uses_memory()) {
                made.faults
                    .push(format!("{} of {label} spills or has a stack", usage.entry));
            }
        }
        made
    }

    fn line(&mut self, what: &str, a: &str, b: &str) {
        let mark = if a == b { ' ' } else { '*' };
        self.lines.push(format!("{mark} {what:<34} {a:<40} {b}"));
    }

    fn entries(&mut self, a: &Entry, b: &Entry) {
        let name = &a.name;
        let (in_a, in_b) = (parameters(a), parameters(b));
        self.line("  parameters", &in_a, &in_b);
        if in_a != in_b {
            self.faults
                .push(format!("{name}: parameters differ: {in_a} and {in_b}"));
        }
        let (in_a, in_b) = (accesses(a), accesses(b));
        let kinds: BTreeSet<_> = in_a.keys().chain(in_b.keys()).collect();
        for kind in kinds {
            let count = |side: &BTreeMap<Access, u32>| side.get(kind).copied().unwrap_or(0);
            let (count_a, count_b) = (count(&in_a), count(&in_b));
            self.line(
                &format!("  {kind}"),
                &count_a.to_string(),
                &count_b.to_string(),
            );
            if kind.space == "generic" {
                self.faults
                    .push(format!("{name}: {kind}: {count_a} in A, {count_b} in B"));
            } else if kind.bytes >= 16 && (count_a == 0) != (count_b == 0) {
                self.faults.push(format!(
                    "{name}: {kind} on one side only: {count_a} in A, {count_b} in B"
                ));
            }
        }
    }
}

/// A kind of memory access.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Access {
    /// Opcode: `ld`, `st`, `atom`, `red`.
    operation: String,
    /// State space; `generic` where none is named.
    space: String,
    /// Bytes of one thread.
    bytes: u32,
}

impl std::fmt::Display for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {} B", self.operation, self.space, self.bytes)
    }
}

/// Memory accesses of a kernel by kind. Parameter reads are left out: generators differ there, and
/// they cost nothing.
fn accesses(entry: &Entry) -> BTreeMap<Access, u32> {
    let mut found = BTreeMap::new();
    for instruction in &entry.instructions {
        if let Some(access) = access(instruction) {
            *found.entry(access).or_insert(0) += 1;
        }
    }
    found
}

fn access(instruction: &str) -> Option<Access> {
    let opcode = instruction.split_whitespace().next()?;
    let mut parts = opcode.split('.');
    let operation = parts.next()?;
    if !matches!(operation, "ld" | "st" | "atom" | "red" | "ldu") {
        return None;
    }
    let mut access = Access {
        operation: operation.to_owned(),
        space: "generic".to_owned(),
        bytes: 0,
    };
    let mut vector = 1;
    for part in parts {
        // `shared::cta` and kin.
        let plain = part.split("::").next().unwrap_or(part);
        match plain {
            "global" | "shared" | "local" | "const" => plain.clone_into(&mut access.space),
            "param" => return None,
            "v2" => vector = 2,
            "v4" => vector = 4,
            "v8" => vector = 8,
            _ => {
                let bits = plain.trim_start_matches(['b', 'u', 's', 'f']);
                if bits.len() < plain.len()
                    && let Ok(bits) = bits.parse::<u32>()
                {
                    access.bytes = bits / 8;
                }
            }
        }
    }
    access.bytes *= vector;
    Some(access)
}

/// Parameters with their types, whatever a generator calls the type: `u64` and `b64` are the same.
fn parameters(entry: &Entry) -> String {
    let plain = entry.parameters.iter().map(|parameter| {
        parameter
            .replace(".u", ".b")
            .replace(".s", ".b")
            .replace(".f", ".b")
    });
    plain.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(body: &str) -> Side {
        let text = format!(
            ".version 7.8\n.target sm_80\n.visible .entry k(\n\t.param .align 8 .b8 k_param_0[304]\n)\n\
             {{\n{body}\n}}\n"
        );
        Side {
            ptx: Ptx::parse(&text).unwrap(),
            usages: None,
        }
    }

    #[test]
    fn accesses_are_read_by_width_and_space() {
        let read = |text| access(text).map(|access| access.to_string());
        let cases = [
            (
                "ld.global.L1::no_allocate.v4.u32 {a, b, c, d}, [e]",
                "ld global 16 B",
            ),
            ("st.global.cs.v2.b64 [a], {b, c}", "st global 16 B"),
            ("ld.global.nc.b16 a, [b]", "ld global 2 B"),
            ("ld.v4.b32 {a, b, c, d}, [e]", "ld generic 16 B"),
            ("st.shared::cta.f32 [a], b", "st shared 4 B"),
            ("atom.global.min.u64 a, [b], c", "atom global 8 B"),
            ("red.global.add.u64 [b], c", "red global 8 B"),
        ];
        for (text, expected) in cases {
            assert_eq!(read(text).as_deref(), Some(expected), "{text}");
        }
        assert_eq!(read("ld.param.u64 a, [b+8]"), None);
        assert_eq!(read("mov.b32 a, b"), None);
    }

    #[test]
    fn a_missing_wide_access_and_a_generic_one_are_faults() {
        let wide = "\tld.global.v4.u32 {a, b, c, d}, [e];\n\tst.global.v4.b32 [e], {a, b, c, d};";
        let same = Comparison::of(&[side(wide), side(&wide.replace("u32", "b32"))]);
        assert!(same.faults.is_empty(), "{:?}", same.faults);

        let narrow = "\tld.global.v2.u32 {a, b}, [e];\n\tst.global.v4.b32 [e], {a, b, c, d};";
        let faults = Comparison::of(&[side(wide), side(narrow)]).faults;
        assert_eq!(
            faults,
            ["k: ld global 16 B on one side only: 1 in A, 0 in B"]
        );

        let generic = wide.to_owned() + "\n\tld.b64 a, [b];";
        let faults = Comparison::of(&[side(wide), side(&generic)]).faults;
        assert_eq!(faults, ["k: ld generic 8 B: 0 in A, 1 in B"]);
    }

    #[test]
    fn entries_and_parameters_must_agree() {
        let mut other = side("\tret;");
        other.ptx.entries[0].parameters = vec![".b64".into(), ".f32".into()];
        let faults = Comparison::of(&[side("\tret;"), other]).faults;
        assert_eq!(
            faults,
            ["k: parameters differ: .align 8 .b8[304] and .b64, .b32"]
        );

        let mut other = side("\tret;");
        other.ptx.entries[0].name = "l".into();
        let faults = Comparison::of(&[side("\tret;"), other]).faults;
        assert_eq!(faults, ["k is missing in B", "l is missing in A"]);
    }

    #[test]
    fn spills_are_faults() {
        let mut spilling = side("\tret;");
        spilling.usages = Some(vec![Usage {
            entry: "k".into(),
            spill_loads: 8,
            ..Usage::default()
        }]);
        let faults = Comparison::of(&[side("\tret;"), spilling]).faults;
        assert_eq!(faults, ["k of B spills or has a stack"]);
    }
}
