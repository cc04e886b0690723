//! Builds the PTX of the device crate through rust-cuda: `cuda_builder`, rust-cuda's code
//! generator for rustc, and NVIDIA's libNVVM.
//!
//! `cargo xtask build-ptx` starts it in this folder's own toolchain and writes the manifest next to
//! what it leaves. What has to be installed is in `docs/rust-cuda.md`.

mod backend;
mod ptx;
mod stage;
mod tier;

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;
use cuda_builder::{CudaBuilder, CudaBuilderError};

use tier::Tier;

macro_rules! names {
    ($($name:ident => $body:expr;)*) => { &[$(stringify!($name)),*] };
}

/// The kernels that each PTX file must hold.
const KERNELS: &[&str] = fused_kv_kernels::for_each_entry!(names);

/// Build the PTX of fused-kv's kernels through rust-cuda.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Folder that gets one `<tier>.ptx` for each tier; made when it is missing.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Architecture tier, such as sm_80; once for each file wanted.
    #[arg(long = "tier", value_name = "TIER", required = true)]
    tiers: Vec<Tier>,

    /// Folder for what the compiler leaves on the way [default: `device` next to this program].
    #[arg(long, value_name = "DIR")]
    build_dir: Option<PathBuf>,

    /// Also keep the LLVM IR that libNVVM was given, as `<tier>.ll`.
    #[arg(long)]
    keep_ir: bool,
}

/// Why no PTX was written.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{tier}: rust-cuda did not compile the device crate: {source}")]
    Compile { tier: Tier, source: CompileError },
    #[error("{tier}: the PTX breaks the contract: {}", faults.join("; "))]
    Contract { tier: Tier, faults: Vec<String> },
    #[error("{} has no line {line:?}", path.display())]
    Manifest { path: PathBuf, line: &'static str },
    #[error("{} has white space, which the code generator's argument list cannot carry", .0.display())]
    WhiteSpace(PathBuf),
}

/// `CudaBuilderError` as a standard error, which it is not.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct CompileError(CudaBuilderError);

impl Error {
    /// For `map_err` on an operation on a file.
    fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File {
            action,
            path,
            source,
        }
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Error> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let device_crate = package
        .parent()
        .expect("this package lies in the device crate");

    // The compiler runs in the folder of the device crate: it must not see relative paths.
    let absolute = |path: &Path| {
        std::path::absolute(path).map_err(Error::file("find the absolute path of", path))
    };
    let out = absolute(&arguments.out)?;
    let build_dir = match &arguments.build_dir {
        Some(dir) => absolute(dir)?,
        None => env::current_exe()
            .map_err(Error::file("find", Path::new("this program")))?
            .with_file_name("device"),
    };
    fs::create_dir_all(&out).map_err(Error::file("make", &out))?;
    backend::select(&build_dir)?;
    let staged = stage::stage(device_crate, &build_dir.join("package"))?;

    let mut built = Vec::new();
    for &tier in &arguments.tiers {
        let final_ir = arguments.keep_ir.then(|| out.join(format!("{tier}.ll")));
        let ptx = build(tier, &staged, &build_dir, final_ir)?;
        let text = fs::read_to_string(&ptx).map_err(Error::file("read", &ptx))?;
        let faults = ptx::faults(&text, &tier.to_string(), KERNELS);
        if !faults.is_empty() {
            return Err(Error::Contract { tier, faults });
        }
        built.push((tier, text));
    }

    // Only now: a failed tier leaves the folder as it was.
    for (tier, text) in built {
        let path = out.join(format!("{tier}.ptx"));
        fs::write(&path, &text).map_err(Error::file("write", &path))?;
        println!(
            "{}: {} entries",
            path.display(),
            ptx::entries(&text).count()
        );
    }
    Ok(())
}

/// Compiles the device crate for one tier and returns the path of the PTX among the compiler's own
/// files.
fn build(
    tier: Tier,
    device_crate: &Path,
    build_dir: &Path,
    final_ir: Option<PathBuf>,
) -> Result<PathBuf, Error> {
    // Apart for each tier, so that no tier sees another's `core`.
    let target_dir = build_dir.join(tier.to_string());
    let target_dir = target_dir.to_string_lossy();
    let mut builder = CudaBuilder::new(device_crate)
        .arch(tier.arch())
        .release(true)
        // The bit contract: every f32 operation is rounded on its own, none is approximate.
        .fma_contraction(false)
        .ftz(false)
        .fast_sqrt(false)
        .fast_div(false)
        // --locked: a newer glam than the lock file's does not build with this cuda_std.
        .build_args(&[
            "--locked",
            "--features",
            "rust-cuda",
            "--target-dir",
            &target_dir,
        ]);
    if let Some(path) = final_ir {
        if path.to_string_lossy().contains(char::is_whitespace) {
            return Err(Error::WhiteSpace(path));
        }
        builder = builder.final_module_path(path);
    }
    builder.build().map_err(|source| Error::Compile {
        tier,
        source: CompileError(source),
    })
}
