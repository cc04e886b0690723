//! NVIDIA's assembler: where it is, and what it says about kernels.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::env::{Env, Machine};
use crate::project::{self, Project};

/// The PyPI package that holds ptxas, at the version of CI's figures.
pub const PACKAGE: &str = "nvidia-cuda-nvcc==13.0.88";

/// What to do where ptxas is missing.
pub const MEND: &str =
    "cargo xtask ptx-report --install (PyPI), or install a CUDA toolkit and set CUDA_PATH";

/// Folder of what `--install` brings.
fn tools(project: &Project) -> PathBuf {
    project.target.join("tools/ptxas")
}

/// Where ptxas is looked for, in this order.
pub fn candidates(project: &Project, env: &dyn Env) -> Vec<PathBuf> {
    const IN_PACKAGE: [&str; 2] = ["nvidia/cu13/bin/ptxas", "nvidia/cuda_nvcc/bin/ptxas"];
    let mut found: Vec<_> = env.on_path("ptxas").into_iter().collect();
    let roots = env.var("CUDA_PATH").map(PathBuf::from);
    let roots = roots.into_iter().chain([PathBuf::from("/usr/local/cuda")]);
    found.extend(roots.map(|root| root.join("bin/ptxas")));
    let mut packages = vec![tools(project)];
    let site = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
    packages.extend(
        env.output("python3", &["-c", site], None)
            .map(PathBuf::from),
    );
    for folder in packages {
        found.extend(IN_PACKAGE.map(|path| folder.join(path)));
    }
    found
}

/// The first ptxas that is there.
pub fn find(project: &Project, env: &dyn Env) -> Option<PathBuf> {
    candidates(project, env)
        .into_iter()
        .find(|path| env.is_file(path))
}

/// Installs ptxas from PyPI into the target directory, unless there is one.
pub fn install(project: &Project) -> Result<()> {
    let env = Machine { project };
    if find(project, &env).is_some() {
        return Ok(());
    }
    project::run(
        Command::new("python3")
            .args(["-m", "pip", "install", "--quiet", "--no-deps"])
            .args(["--disable-pip-version-check", "--root-user-action=ignore"])
            .arg("--target")
            .arg(tools(project))
            .arg(PACKAGE),
    )
}

/// What ptxas says about one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Kernel.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of spilled registers written.
    pub spill_stores: u32,
    /// Bytes of spilled registers read.
    pub spill_loads: u32,
    /// Bytes of stack of a thread.
    pub stack: u32,
    /// Bytes of static shared memory of a block.
    pub shared: u32,
}

impl Usage {
    /// Whether the kernel keeps values in memory for want of registers.
    pub fn uses_memory(&self) -> bool {
        self.spill_stores + self.spill_loads + self.stack > 0
    }
}

/// Assembles a PTX file for `sm_<capability>`.
pub fn assemble(ptxas: &Path, ptx: &Path, capability: u32) -> Result<Vec<Usage>> {
    let output = Command::new(ptxas)
        .args(["-v", "-o", "/dev/null"])
        .arg(format!("-arch=sm_{capability}"))
        .arg(ptx)
        .output()
        .with_context(|| format!("cannot start {}", ptxas.display()))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stdout);
        bail!(
            "ptxas refuses {} for sm_{capability}:\n{said}{text}",
            ptx.display()
        );
    }
    let mut usages = parse(&text);
    usages.sort_by(|a, b| a.entry.cmp(&b.entry));
    Ok(usages)
}

/// Reads what `ptxas -v` prints.
fn parse(text: &str) -> Vec<Usage> {
    let mut usages: Vec<Usage> = Vec::new();
    for line in text.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            usages.push(Usage {
                entry: rest.split('\'').next().unwrap_or_default().to_owned(),
                ..Usage::default()
            });
        }
        let Some(usage) = usages.last_mut() else {
            continue;
        };
        for part in line.split([':', ',']) {
            let Some((number, what)) = part.trim().trim_start_matches("Used ").split_once(' ')
            else {
                continue;
            };
            let Ok(number) = number.parse() else { continue };
            match what {
                "registers" => usage.registers = number,
                "bytes stack frame" => usage.stack = number,
                "bytes spill stores" => usage.spill_stores = number,
                "bytes spill loads" => usage.spill_loads = number,
                "bytes smem" => usage.shared = number,
                _ => (),
            }
        }
    }
    usages
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::fake::Fake;

    #[test]
    fn what_ptxas_says_is_read() {
        let text = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_90'
ptxas info    : Function properties for b
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 102 registers, used 1 barriers, 24 bytes cumulative stack size, 1024 bytes smem, 656 bytes cmem[0]
ptxas info    : Compile time = 345.811 ms
ptxas info    : Compiling entry function 'a' for 'sm_90'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
";
        let usages = parse(text);
        let b = Usage {
            entry: "b".into(),
            registers: 102,
            spill_stores: 8,
            spill_loads: 12,
            stack: 24,
            shared: 1024,
        };
        assert_eq!(usages[0], b);
        assert!(usages[0].uses_memory() && !usages[1].uses_memory());
        assert_eq!((&*usages[1].entry, usages[1].registers), ("a", 40));
    }

    #[test]
    fn path_comes_before_the_toolkit_and_the_package() {
        let project = Project {
            root: "/p".into(),
            target: "/p/target".into(),
        };
        let site = "python3 -c import sysconfig; print(sysconfig.get_paths()['purelib'])";
        let mut env = Fake::default()
            .var("PATH", "/bin:/opt/bin")
            .var("CUDA_PATH", "/cuda")
            .output(site, "/site")
            .file("/opt/bin/ptxas", "")
            .file("/cuda/bin/ptxas", "")
            .file("/site/nvidia/cu13/bin/ptxas", "");
        for expected in [
            "/opt/bin/ptxas",
            "/cuda/bin/ptxas",
            "/site/nvidia/cu13/bin/ptxas",
        ] {
            assert_eq!(find(&project, &env), Some(expected.into()));
            env.files.remove(Path::new(expected));
        }
        assert_eq!(find(&project, &env), None);
    }
}
