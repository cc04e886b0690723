//! The command lines of all tasks.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Build and check tasks of the workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The tasks.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compile kernel-crate to PTX
    ///
    /// With `--codegen llvm` this writes host-crate/ptx, the PTX that the library embeds; without,
    /// it takes the rust-cuda toolchain and writes target/ptx/rust-cuda.
    BuildPtx(BuildPtx),
    /// Put the GPU tests and programs into one folder that runs without Rust
    GpuBundle(GpuBundle),
    /// Assemble the PTX with ptxas: registers, spills, stack and shared memory of each kernel
    ///
    /// Fails on spills, a stack, local memory, and kernels that the manifest does not list.
    PtxReport(PtxReport),
    /// Compare two PTX files, or two folders of them, kernel by kernel
    ///
    /// Fails where kernels or parameters differ, where a 16-byte access of one is none in the
    /// other, and on any access through the generic space.
    PtxCompare(PtxCompare),
    /// Look for what the roads to PTX need, and tell how to mend what is missing
    Doctor(Doctor),
    /// Measure on a GPU and make the report: a table, JSON, and one HTML page
    ///
    /// Without --json this machine needs an NVIDIA GPU. Figures from another machine come from
    /// `run.sh bench` of the GPU bundle.
    Bench(Bench),
    /// Run all checks: format, tests, clippy, documentation, the committed PTX
    Ci(Ci),
    /// Make a stand-in for a CUDA toolkit, enough to link the feature `cuda`
    StubCuda,
}

/// Code generators that make PTX from kernel-crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Codegen {
    /// rustc's own NVPTX back end; needs rust-src and nothing else
    Llvm,
    /// cuda_builder and NVIDIA's libNVVM
    RustCuda,
}

/// `build-ptx`.
#[derive(Debug, Args)]
pub struct BuildPtx {
    /// Code generator
    #[arg(long, value_enum, default_value_t = Codegen::RustCuda)]
    pub codegen: Codegen,
    /// Rebuild and compare with what is there instead of writing it
    #[arg(long)]
    pub check: bool,
    /// Architecture tiers to build, for example sm_80,sm_90 [default: all]
    #[arg(long, value_delimiter = ',')]
    pub tiers: Vec<String>,
    /// Folder to write instead of the usual one
    #[arg(long)]
    pub out: Option<PathBuf>,
}

/// `gpu-bundle`.
#[derive(Debug, Args)]
pub struct GpuBundle {
    /// Folder to write [default: target/gpu-bundle]
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Only test binaries with one of these in their names, for a small bundle: gpu,unit-fused_kv
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
}

/// `bench`.
#[derive(Debug, Args)]
pub struct Bench {
    /// Figures to make the report from instead of measuring: files, or the folder that `run.sh
    /// bench` filled
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub json: Vec<PathBuf>,
    /// The peers' figures, where they are not among those of --json
    #[arg(long, num_args = 1.., value_name = "FILE")]
    pub peers: Vec<PathBuf>,
    /// Folder for report.json and report.html [default: target/bench]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Measure sglang too: its fused_kv_materialize.py, or a checkout
    #[arg(long, value_name = "PATH", conflicts_with = "json")]
    pub sglang: Option<PathBuf>,
    /// Measure FlagGems too: its fused_norm_rope_stacked.py, or a checkout
    #[arg(long, value_name = "PATH", conflicts_with = "json")]
    pub flaggems: Option<PathBuf>,
    /// Measure tokenspeed too: its _dflash_fused_kv.py, or a checkout
    #[arg(long, value_name = "PATH", conflicts_with = "json")]
    pub tokenspeed: Option<PathBuf>,
}

/// `ptx-report`.
#[derive(Debug, Args)]
pub struct PtxReport {
    /// PTX files or folders [default: host-crate/ptx]
    pub ptx: Vec<PathBuf>,
    /// Install ptxas from PyPI into the target directory when there is none
    #[arg(long)]
    pub install: bool,
}

/// `ptx-compare`.
#[derive(Debug, Args)]
pub struct PtxCompare {
    /// PTX file or folder
    pub a: PathBuf,
    /// PTX file or folder to compare with
    pub b: PathBuf,
}

/// Roads to PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Road {
    /// rustc's own NVPTX back end
    Llvm,
    /// cuda_builder and NVIDIA's libNVVM
    RustCuda,
    /// Both
    All,
}

/// `doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Code generator to look at
    #[arg(long, value_enum, default_value_t = Road::All)]
    pub codegen: Road,
}

/// `ci`.
#[derive(Debug, Args)]
pub struct Ci {
    /// Install ptxas from PyPI into the target directory when there is none
    #[arg(long)]
    pub install: bool,
}
