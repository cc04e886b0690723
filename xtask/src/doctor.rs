//! `cargo xtask doctor`: is everything there that a road to PTX needs?

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::env::{Env, Machine};
use crate::flags::{self, Road};
use crate::project::{self, Project};
use crate::ptxas;

/// Where the installation is described.
const GUIDE: &str = "docs/rust-cuda.md";
/// The code generator's own requirement.
const LLVM_MAJOR: &str = "7";
/// The oldest CUDA toolkit whose libNVVM the code generator takes.
const CUDA_MAJOR: u32 = 12;

/// Prints the findings; fails when a chosen road is not complete.
pub fn run(project: &Project, flags: &flags::Doctor) -> Result<()> {
    let roads: &[Road] = match flags.codegen {
        Road::All => &[Road::Llvm, Road::RustCuda],
        Road::Llvm => &[Road::Llvm],
        Road::RustCuda => &[Road::RustCuda],
    };
    let mut incomplete = Vec::new();
    for &road in roads {
        let (title, findings) = look(project, road)?;
        println!("{title}");
        for finding in &findings {
            println!("{finding}");
        }
        println!();
        if findings.iter().any(Finding::is_fault) {
            incomplete.push(title);
        }
    }
    if !incomplete.is_empty() {
        bail!("not complete: {}", incomplete.join(", "));
    }
    println!("complete");
    Ok(())
}

/// Fails with the findings when the rust-cuda road is not complete.
pub fn require_rust_cuda(project: &Project) -> Result<()> {
    let (title, findings) = look(project, Road::RustCuda)?;
    let faults: Vec<_> = findings.iter().filter(|f| f.is_fault()).collect();
    if faults.is_empty() {
        return Ok(());
    }
    let faults: Vec<_> = faults.iter().map(ToString::to_string).collect();
    bail!(
        "{title} is not complete:\n{}\nall findings:  cargo xtask doctor --codegen rust-cuda\n\
         the road that needs rust-src alone:  cargo xtask build-ptx --codegen llvm",
        faults.join("\n")
    )
}

fn look(project: &Project, road: Road) -> Result<(&'static str, Vec<Finding>)> {
    let env = Machine { project };
    if road == Road::Llvm {
        let channel = project.toolchain()?;
        let mut findings = llvm(&env, &channel);
        findings.push(ptxas_finding(project, &env));
        Ok(("--codegen llvm: rustc's NVPTX back end", findings))
    } else {
        let toolchain = DeviceToolchain::load(project)?;
        let mut findings = rust_cuda(&env, &toolchain);
        findings.push(ptxas_finding(project, &env));
        Ok(("--codegen rust-cuda: cuda_builder and libNVVM", findings))
    }
}

/// One piece of a road.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    piece: String,
    /// Where and in which version it was found, or what is wrong.
    state: Result<String, String>,
    looked: Vec<String>,
    /// The command or page that mends it.
    mend: String,
    /// The road can be taken without.
    optional: bool,
}

impl Finding {
    fn new(piece: &str, state: Result<String, String>, looked: &[String], mend: &str) -> Self {
        Self {
            piece: piece.to_owned(),
            state,
            looked: looked.to_vec(),
            mend: mend.to_owned(),
            optional: false,
        }
    }

    fn is_fault(&self) -> bool {
        self.state.is_err() && !self.optional
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.state {
            Ok(found) => write!(f, "  found    {}: {found}", self.piece),
            Err(wrong) => {
                let word = if self.optional {
                    "optional"
                } else {
                    "MISSING "
                };
                write!(f, "  {word} {}: {wrong}", self.piece)?;
                for place in &self.looked {
                    write!(f, "\n             looked at {place}")?;
                }
                write!(f, "\n             mend it with: {}", self.mend)
            }
        }
    }
}

fn not_found() -> Result<String, String> {
    Err("not found".to_owned())
}

fn show(path: &Path) -> String {
    path.display().to_string()
}

fn first_file(env: &dyn Env, paths: &[PathBuf]) -> Result<String, String> {
    let found = paths.iter().find(|path| env.is_file(path));
    found.map(|path| show(path)).ok_or("not found".to_owned())
}

fn ptxas_finding(project: &Project, env: &dyn Env) -> Finding {
    let candidates = ptxas::candidates(project, env);
    let looked: Vec<_> = candidates.iter().map(|path| show(path)).collect();
    let state = first_file(env, &candidates);
    Finding {
        optional: true,
        ..Finding::new("ptxas (for ptx-report)", state, &looked, ptxas::MEND)
    }
}

/// A rustup toolchain, and its sysroot where it is there.
fn toolchain(env: &dyn Env, channel: &str, components: &[String]) -> (Finding, Option<PathBuf>) {
    let command = format!("RUSTUP_TOOLCHAIN={channel} rustc --version");
    let version = env.output("rustc", &["--version"], Some(channel));
    let state = match version {
        None => not_found(),
        // Without rustup the variable has no effect and any rustc answers.
        Some(version) if !is_channel(&version, channel) => Err(format!("it is {version}")),
        Some(version) => Ok(version),
    };
    let sysroot = state
        .is_ok()
        .then(|| env.output("rustc", &["--print", "sysroot"], Some(channel)))
        .flatten()
        .map(PathBuf::from);
    let mut mend = format!("rustup toolchain install {channel} --profile minimal");
    if !components.is_empty() {
        mend.push_str(&format!(" --component {}", components.join(",")));
    }
    let piece = format!("Rust {channel}");
    (Finding::new(&piece, state, &[command], &mend), sysroot)
}

/// Whether `rustc --version` fits a channel: a version number, or a dated nightly. A nightly's
/// compiler carries the date of the day before.
fn is_channel(version: &str, channel: &str) -> bool {
    if channel.starts_with("nightly") {
        version.contains("-nightly") || version.contains("-dev")
    } else {
        version.starts_with(&format!("rustc {channel} "))
    }
}

fn rust_src(env: &dyn Env, channel: &str, sysroot: Option<&Path>) -> Finding {
    let mend = format!("rustup component add rust-src --toolchain {channel}");
    let Some(sysroot) = sysroot else {
        let state = Err(format!("needs Rust {channel}"));
        return Finding::new("rust-src", state, &[], &mend);
    };
    let path = sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs");
    let state = first_file(env, std::slice::from_ref(&path));
    Finding::new("rust-src", state, &[show(&path)], &mend)
}

/// The road through rustc's own back end.
fn llvm(env: &dyn Env, channel: &str) -> Vec<Finding> {
    let (rustc, sysroot) = toolchain(env, channel, &["rust-src".to_owned()]);
    vec![rustc, rust_src(env, channel, sysroot.as_deref())]
}

/// What `kernel-crate/rust-toolchain.toml` asks for.
struct DeviceToolchain {
    channel: String,
    components: Vec<String>,
}

impl DeviceToolchain {
    fn load(project: &Project) -> Result<Self> {
        let path = project.root.join("kernel-crate/rust-toolchain.toml");
        let file: toml::Table = project::read(&path)?.parse().with_context(|| show(&path))?;
        let section = file.get("toolchain").context("no [toolchain]")?;
        let channel = section.get("channel").and_then(toml::Value::as_str);
        let components = section.get("components").and_then(toml::Value::as_array);
        Ok(Self {
            channel: channel
                .with_context(|| format!("{} names no channel", show(&path)))?
                .to_owned(),
            components: components
                .into_iter()
                .flatten()
                .filter_map(|component| component.as_str().map(str::to_owned))
                .collect(),
        })
    }
}

/// The road through cuda_builder.
fn rust_cuda(env: &dyn Env, wanted: &DeviceToolchain) -> Vec<Finding> {
    let (rustc, sysroot) = toolchain(env, &wanted.channel, &wanted.components);
    let mut findings = vec![rustc, rust_src(env, &wanted.channel, sysroot.as_deref())];
    findings.extend(compiler_parts(env, wanted, sysroot.as_deref()));
    findings.extend(llvm_config(env));
    findings.extend(cuda(env));
    findings.push(libclang(env));
    findings.push(cxx(env));
    findings
}

/// rustc-dev and llvm-tools, told by a file of each.
fn compiler_parts(env: &dyn Env, wanted: &DeviceToolchain, sysroot: Option<&Path>) -> Vec<Finding> {
    let channel = &wanted.channel;
    let host = sysroot
        .and_then(|_| env.output("rustc", &["-vV"], Some(channel)))
        .and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("host: "));
            line.map(str::to_owned)
        });
    [
        ("rustc-dev", "lib", "librustc_driver"),
        ("llvm-tools", "bin", "llvm-objdump"),
    ]
    .map(|(component, folder, file)| {
        let mend = format!("rustup component add {component} --toolchain {channel}");
        let (Some(sysroot), Some(host)) = (sysroot, &host) else {
            return Finding::new(component, Err(format!("needs Rust {channel}")), &[], &mend);
        };
        let folder = sysroot.join("lib/rustlib").join(host).join(folder);
        let found = env.list(&folder).into_iter().find(|n| n.starts_with(file));
        let state = found
            .map(|name| show(&folder.join(name)))
            .ok_or("not found".to_owned());
        let looked = show(&folder.join(format!("{file}*")));
        Finding::new(component, state, &[looked], &mend)
    })
    .into()
}

/// LLVM 7 with the parts that the code generator links.
fn llvm_config(env: &dyn Env) -> Vec<Finding> {
    const PARTS: [&str; 5] = ["ipo", "bitreader", "bitwriter", "lto", "nvptx"];
    let mend = format!(
        "build LLVM 7.1 with the targets X86 and NVPTX and set LLVM_CONFIG to its llvm-config: {GUIDE}"
    );
    let (program, looked) = match env.var("LLVM_CONFIG") {
        Some(path) => (path.clone(), format!("LLVM_CONFIG={path}")),
        None => (
            "llvm-config".to_owned(),
            "llvm-config on PATH (LLVM_CONFIG is not set)".to_owned(),
        ),
    };
    let version = env.output(&program, &["--version"], None);
    let state = match version {
        None => not_found(),
        Some(version) if version.split('.').next() != Some(LLVM_MAJOR) => Err(format!(
            "it is version {version}, the code generator needs {LLVM_MAJOR}"
        )),
        Some(version) => Ok(format!("{program}, version {version}")),
    };
    let there = state.is_ok();
    let mut findings = vec![Finding::new(
        "LLVM 7",
        state,
        std::slice::from_ref(&looked),
        &mend,
    )];
    if there {
        let found = env.output(&program, &["--components"], None);
        let found = found.unwrap_or_default();
        let lacking: Vec<_> = PARTS
            .into_iter()
            .filter(|part| !found.split_whitespace().any(|word| word == *part))
            .collect();
        let state = if lacking.is_empty() {
            Ok(PARTS.join(", "))
        } else {
            Err(format!("built without {}", lacking.join(", ")))
        };
        findings.push(Finding::new("parts of LLVM", state, &[looked], &mend));
    }
    findings
}

/// The CUDA toolkit: the places and the order of cust_raw's build script.
fn cuda(env: &dyn Env) -> Vec<Finding> {
    const VARIABLES: [&str; 3] = ["CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_ROOT_DIR"];
    const FOLDERS: [&str; 3] = ["/usr/lib/cuda", "/usr/local/cuda", "/opt/cuda"];
    let mend = format!("install a CUDA toolkit of 12 or newer and set CUDA_PATH: {GUIDE}");
    let mut looked = Vec::new();
    let mut roots = Vec::new();
    for name in VARIABLES {
        match env.var(name) {
            Some(value) => {
                looked.push(format!("{name}={value}"));
                roots.push(PathBuf::from(value));
            }
            None => looked.push(format!("{name} (not set)")),
        }
    }
    looked.extend(FOLDERS.map(str::to_owned));
    roots.extend(FOLDERS.map(PathBuf::from));
    let is_root = |root: &&PathBuf| env.is_file(&root.join("include/cuda.h"));
    let Some(root) = roots.iter().find(is_root) else {
        let state = Err("no folder with include/cuda.h".to_owned());
        return vec![Finding::new("CUDA toolkit", state, &looked, &mend)];
    };
    let header = env.read(&root.join("include/cuda.h")).unwrap_or_default();
    let version = header
        .lines()
        .find_map(|line| line.strip_prefix("#define CUDA_VERSION"))
        .and_then(|rest| rest.trim().parse::<u32>().ok());
    let state = match version {
        None => Err(format!("{}/include/cuda.h states no version", show(root))),
        Some(version) => {
            let shown = format!("{}.{}", version / 1000, version / 10 % 100);
            if version / 1000 < CUDA_MAJOR {
                Err(format!("{} is {shown}, too old", show(root)))
            } else {
                Ok(format!("{}, version {shown}", show(root)))
            }
        }
    };
    let mut findings = vec![Finding::new("CUDA toolkit", state, &looked, &mend)];
    let part = |piece: &str, path: &str| {
        let path = root.join(path);
        let state = first_file(env, std::slice::from_ref(&path));
        Finding::new(piece, state, &[show(&path)], &mend)
    };
    findings.push(part("CUDA runtime headers", "include/cuda_runtime_api.h"));
    findings.push(part("libdevice", "nvvm/libdevice/libdevice.10.bc"));

    let folder = root.join("nvvm/lib64");
    let is_nvvm = |name: &String| name.starts_with("libnvvm.so");
    let library = env.list(&folder).into_iter().find(is_nvvm);
    let state = library
        .map(|name| show(&folder.join(name)))
        .ok_or("not found".to_owned());
    let place = show(&folder.join("libnvvm.so*"));
    findings.push(Finding::new("libNVVM", state, &[place], &mend));

    // The code generator is loaded by rustc and finds libNVVM only through the library path.
    let search = env.var("LD_LIBRARY_PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&search).find(|f| env.list(f).iter().any(is_nvvm));
    let known = env.output("ldconfig", &["-p"], None).unwrap_or_default();
    let state = match on_path {
        Some(folder) => Ok(show(&folder)),
        None if known.contains("libnvvm.so") => Ok("ldconfig knows it".to_owned()),
        None => not_found(),
    };
    findings.push(Finding::new(
        "libNVVM in the library path",
        state,
        &[
            format!("LD_LIBRARY_PATH={search}"),
            "ldconfig -p".to_owned(),
        ],
        &format!(
            "export LD_LIBRARY_PATH={}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",
            show(&folder)
        ),
    ));
    findings
}

/// libclang, which bindgen loads.
fn libclang(env: &dyn Env) -> Finding {
    // `libclang.so`, `libclang-18.so.1`; not `libclang-cpp.so`, another interface.
    let is_library = |name: &str| {
        let rest = name.strip_prefix("libclang").unwrap_or_default();
        let rest = rest.trim_start_matches(|c: char| c == '-' || c == '.' || c.is_ascii_digit());
        rest.starts_with("so")
    };
    let mut looked = Vec::new();
    let mut folders = Vec::new();
    match env.var("LIBCLANG_PATH") {
        Some(path) => {
            looked.push(format!("LIBCLANG_PATH={path}"));
            let path = PathBuf::from(path);
            // Either the library or its folder.
            if env.is_file(&path) {
                return Finding::new("libclang", Ok(show(&path)), &looked, "");
            }
            folders.push(path);
        }
        None => looked.push("LIBCLANG_PATH (not set)".to_owned()),
    }
    let lib = PathBuf::from("/usr/lib");
    folders.extend(
        env.list(&lib)
            .iter()
            .filter(|name| name.starts_with("llvm-"))
            .map(|name| lib.join(name).join("lib")),
    );
    let machine = std::env::consts::ARCH;
    folders.push(lib.join(format!("{machine}-linux-gnu")));
    folders.extend(["/usr/lib64", "/usr/lib", "/usr/local/lib"].map(PathBuf::from));
    looked.extend(folders.iter().map(|folder| show(folder)));
    let found = folders.iter().find_map(|folder| {
        let name = env.list(folder).into_iter().find(|name| is_library(name))?;
        Some(show(&folder.join(name)))
    });
    let mend = "apt-get install libclang-dev, or set LIBCLANG_PATH to the folder of libclang.so";
    Finding::new(
        "libclang",
        found.ok_or("not found".to_owned()),
        &looked,
        mend,
    )
}

/// A C++ compiler, for the code generator's wrapper of LLVM.
fn cxx(env: &dyn Env) -> Finding {
    let (program, looked) = match env.var("CXX") {
        Some(program) => (program.clone(), format!("CXX={program}")),
        None => ("c++".to_owned(), "c++ on PATH (CXX is not set)".to_owned()),
    };
    let version = env.output(&program, &["--version"], None);
    let state = version
        .map(|text| text.lines().next().unwrap_or_default().to_owned())
        .ok_or("not found".to_owned());
    Finding::new("C++ compiler", state, &[looked], "apt-get install g++")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::fake::Fake;

    const NIGHTLY: &str = "nightly-2026-04-02";

    fn wanted() -> DeviceToolchain {
        DeviceToolchain {
            channel: NIGHTLY.into(),
            components: ["rust-src", "rustc-dev", "llvm-tools"]
                .map(Into::into)
                .into(),
        }
    }

    /// A machine on which both roads are complete.
    fn complete() -> Fake {
        let host = "/rust/lib/rustlib/x86_64-unknown-linux-gnu";
        Fake::default()
            .output(
                "rustc +1.95.0 --version",
                "rustc 1.95.0 (59807616e 2026-04-14)",
            )
            .output("rustc +1.95.0 --print sysroot", "/stable")
            .file("/stable/lib/rustlib/src/rust/library/core/src/lib.rs", "")
            .output(
                &format!("rustc +{NIGHTLY} --version"),
                "rustc 1.96.0-nightly (0123456789 2026-04-01)",
            )
            .output(&format!("rustc +{NIGHTLY} --print sysroot"), "/rust")
            .output(
                &format!("rustc +{NIGHTLY} -vV"),
                "rustc 1.96.0-nightly\nhost: x86_64-unknown-linux-gnu\nrelease: 1.96.0",
            )
            .file("/rust/lib/rustlib/src/rust/library/core/src/lib.rs", "")
            .file(&format!("{host}/lib/librustc_driver-1234.so"), "")
            .file(&format!("{host}/bin/llvm-objdump"), "")
            .var("LLVM_CONFIG", "/llvm/bin/llvm-config")
            .output("/llvm/bin/llvm-config --version", "7.1.0")
            .output(
                "/llvm/bin/llvm-config --components",
                "all ipo bitreader bitwriter lto nvptx x86",
            )
            .var("CUDA_PATH", "/cuda")
            .file("/cuda/include/cuda.h", "// x\n#define CUDA_VERSION 12080\n")
            .file("/cuda/include/cuda_runtime_api.h", "")
            .file("/cuda/nvvm/lib64/libnvvm.so.4", "")
            .file("/cuda/nvvm/libdevice/libdevice.10.bc", "")
            .var("LD_LIBRARY_PATH", "/other:/cuda/nvvm/lib64")
            .file("/usr/lib/llvm-18/lib/libclang-18.so.1", "")
            .output("c++ --version", "c++ 13.3.0\nCopyright")
    }

    /// Faults of the rust-cuda road as `piece: what is wrong`.
    fn faults(env: &Fake) -> Vec<String> {
        rust_cuda(env, &wanted())
            .into_iter()
            .filter(Finding::is_fault)
            .map(|finding| format!("{}: {}", finding.piece, finding.state.unwrap_err()))
            .collect()
    }

    fn without_file(path: &str) -> Fake {
        let mut env = complete();
        assert!(env.files.remove(Path::new(path)).is_some(), "{path}");
        env
    }

    fn without_output(command: &str) -> Fake {
        let mut env = complete();
        assert!(env.outputs.remove(command).is_some(), "{command}");
        env
    }

    #[test]
    fn a_complete_machine_has_no_faults() {
        assert_eq!(faults(&complete()), [""; 0]);
        assert!(!llvm(&complete(), "1.95.0").iter().any(Finding::is_fault));
        let found = rust_cuda(&complete(), &wanted());
        let cuda = found.iter().find(|f| f.piece == "CUDA toolkit").unwrap();
        assert_eq!(cuda.state.as_deref(), Ok("/cuda, version 12.8"));
    }

    #[test]
    fn the_llvm_road_needs_its_compiler_and_rust_src() {
        let states = |env: &Fake| {
            let findings = llvm(env, "1.95.0");
            findings
                .into_iter()
                .map(|f| (f.is_fault(), f.mend))
                .collect::<Vec<_>>()
        };
        let path = "/stable/lib/rustlib/src/rust/library/core/src/lib.rs";
        let found = states(&without_file(path));
        assert!(!found[0].0 && found[1].0);
        assert_eq!(
            found[1].1,
            "rustup component add rust-src --toolchain 1.95.0"
        );

        let found = states(&without_output("rustc +1.95.0 --version"));
        assert!(found[0].0 && found[1].0);
        assert!(found[0].1.starts_with("rustup toolchain install 1.95.0"));

        let other = complete().output("rustc +1.95.0 --version", "rustc 1.96.0 (abc 2026-05-28)");
        let found = llvm(&other, "1.95.0");
        let wrong = "it is rustc 1.96.0 (abc 2026-05-28)";
        assert_eq!(found[0].state.as_ref().unwrap_err(), wrong);
    }

    #[test]
    fn every_missing_file_is_found_out() {
        let host = "/rust/lib/rustlib/x86_64-unknown-linux-gnu";
        let cases = [
            (
                "/rust/lib/rustlib/src/rust/library/core/src/lib.rs".to_owned(),
                "rust-src: not found",
            ),
            (
                format!("{host}/lib/librustc_driver-1234.so"),
                "rustc-dev: not found",
            ),
            (format!("{host}/bin/llvm-objdump"), "llvm-tools: not found"),
            (
                "/cuda/include/cuda_runtime_api.h".to_owned(),
                "CUDA runtime headers: not found",
            ),
            (
                "/cuda/nvvm/libdevice/libdevice.10.bc".to_owned(),
                "libdevice: not found",
            ),
            (
                "/cuda/include/cuda.h".to_owned(),
                "CUDA toolkit: no folder with include/cuda.h",
            ),
            (
                "/usr/lib/llvm-18/lib/libclang-18.so.1".to_owned(),
                "libclang: not found",
            ),
        ];
        for (path, expected) in cases {
            assert_eq!(faults(&without_file(&path)), [expected]);
        }
        assert_eq!(
            faults(&without_file("/cuda/nvvm/lib64/libnvvm.so.4")),
            [
                "libNVVM: not found",
                "libNVVM in the library path: not found"
            ]
        );
    }

    #[test]
    fn every_missing_program_is_found_out() {
        let needs = format!("needs Rust {NIGHTLY}");
        assert_eq!(
            faults(&without_output(&format!("rustc +{NIGHTLY} --version"))),
            [
                format!("Rust {NIGHTLY}: not found"),
                format!("rust-src: {needs}"),
                format!("rustc-dev: {needs}"),
                format!("llvm-tools: {needs}"),
            ]
        );
        assert_eq!(
            faults(&without_output("/llvm/bin/llvm-config --version")),
            ["LLVM 7: not found"]
        );
        assert_eq!(
            faults(&without_output("c++ --version")),
            ["C++ compiler: not found"]
        );
    }

    #[test]
    fn wrong_versions_are_found_out() {
        let stable = format!("rustc +{NIGHTLY} --version");
        let env = complete().output(&stable, "rustc 1.95.0 (59807616e 2026-04-14)");
        assert!(faults(&env)[0].starts_with(&format!("Rust {NIGHTLY}: it is rustc 1.95.0")));

        let env = complete().output("/llvm/bin/llvm-config --version", "18.1.3");
        assert_eq!(
            faults(&env),
            ["LLVM 7: it is version 18.1.3, the code generator needs 7"]
        );
        let env = complete().output("/llvm/bin/llvm-config --components", "ipo lto x86");
        assert_eq!(
            faults(&env),
            ["parts of LLVM: built without bitreader, bitwriter, nvptx"]
        );
        let env = complete().file("/cuda/include/cuda.h", "#define CUDA_VERSION 11040");
        assert_eq!(faults(&env), ["CUDA toolkit: /cuda is 11.4, too old"]);
        let env = complete().file("/cuda/include/cuda.h", "");
        assert_eq!(
            faults(&env),
            ["CUDA toolkit: /cuda/include/cuda.h states no version"]
        );
    }

    #[test]
    fn the_library_path_must_reach_libnvvm() {
        let env = complete().var("LD_LIBRARY_PATH", "/other");
        assert_eq!(faults(&env), ["libNVVM in the library path: not found"]);
        let mend = rust_cuda(&env, &wanted())
            .into_iter()
            .find(Finding::is_fault)
            .unwrap()
            .mend;
        assert!(mend.starts_with("export LD_LIBRARY_PATH=/cuda/nvvm/lib64"));
        let env = env.output("ldconfig -p", "\tlibnvvm.so.4 (libc6) => /x/libnvvm.so.4");
        assert_eq!(faults(&env), [""; 0]);
    }

    #[test]
    fn the_variables_come_before_the_usual_places() {
        let mut env = complete()
            .file("/opt/llvm/libclang.so", "")
            .file("/usr/lib/libclang-cpp.so.18", "");
        env.files
            .remove(Path::new("/usr/lib/llvm-18/lib/libclang-18.so.1"));
        for value in ["/opt/llvm", "/opt/llvm/libclang.so"] {
            assert_eq!(faults(&env.clone().var("LIBCLANG_PATH", value)), [""; 0]);
        }
        let mut env = complete().output("llvm-config --version", "7.0.1");
        env.vars.remove("LLVM_CONFIG");
        let env = env.output(
            "llvm-config --components",
            "ipo bitreader bitwriter lto nvptx",
        );
        assert_eq!(faults(&env), [""; 0]);
    }

    #[test]
    fn a_fault_says_where_it_looked_and_what_mends_it() {
        let env = without_output("c++ --version");
        let finding = cxx(&env).to_string();
        assert_eq!(
            finding,
            "  MISSING  C++ compiler: not found\n             looked at c++ on PATH (CXX is not set)\n             \
             mend it with: apt-get install g++"
        );
    }
}
