//! Build and check tasks of the workspace: `cargo xtask <COMMAND>`.
//!
//! One module a command; the command lines of all of them are in [`flags`].

mod bench;
mod build_ptx;
mod ci;
mod doctor;
mod env;
mod flags;
mod gpu_bundle;
mod manifest;
mod project;
mod ptx;
mod ptx_compare;
mod ptx_report;
mod ptxas;
mod stub_cuda;
mod tiers;

use std::process::ExitCode;

use clap::Parser;
use flags::{Cli, Command};

fn main() -> ExitCode {
    let project = project::Project::locate();
    let result = match Cli::parse().command {
        Command::BuildPtx(flags) => build_ptx::run(&project, &flags),
        Command::GpuBundle(flags) => gpu_bundle::run(&project, &flags),
        Command::PtxReport(flags) => ptx_report::run(&project, &flags),
        Command::PtxCompare(flags) => ptx_compare::run(&project, &flags),
        Command::Doctor(flags) => doctor::run(&project, &flags),
        Command::Bench(flags) => bench::run(&project, &flags),
        Command::Ci(flags) => ci::run(&project, &flags),
        Command::StubCuda => stub_cuda::run(&project),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
