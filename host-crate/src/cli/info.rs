//! `fused-kv info`.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::report::Table;
use super::{CliError, print, print_json};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    /// Backends compiled in.
    backends: Vec<&'static str>,
    cpu: Cpu,
    cuda: Cuda,
}

#[derive(Debug, Serialize)]
struct Cpu {
    threads: usize,
    architecture: &'static str,
    /// Vector extensions that matter here and that this processor has.
    features: Vec<&'static str>,
}

/// What the CUDA side offers; empty in a build without it.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Cuda {
    pub(crate) compiled_in: bool,
    /// CUDA version that the driver supports, for example `13.0`.
    pub(crate) driver: Option<String>,
    /// Why there is no device to use.
    pub(crate) unavailable: Option<String>,
    pub(crate) devices: Vec<Device>,
    /// Architecture tiers of the embedded PTX.
    pub(crate) ptx_tiers: Vec<String>,
}

/// One CUDA device.
#[derive(Debug, Serialize)]
pub(crate) struct Device {
    pub(crate) ordinal: u32,
    pub(crate) name: String,
    /// For example `9.0`.
    pub(crate) compute_capability: String,
    pub(crate) memory_bytes: u64,
    /// The embedded PTX that it gets; none where it is too old.
    pub(crate) ptx_tier: Option<String>,
}

fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        [
            ("avx2", is_x86_feature_detected!("avx2")),
            ("f16c", is_x86_feature_detected!("f16c")),
            ("avx512f", is_x86_feature_detected!("avx512f")),
        ]
        .into_iter()
        .filter_map(|(name, found)| found.then_some(name))
        .collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

#[cfg(feature = "cuda")]
fn cuda() -> Cuda {
    super::cuda::info()
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Cuda {
    Cuda {
        unavailable: Some("not compiled in: build with --features cuda".to_owned()),
        ..Cuda::default()
    }
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, CliError> {
    let cuda = cuda();
    let mut backends = vec!["cpu"];
    if cuda.compiled_in {
        backends.push("cuda");
    }
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        backends,
        cpu: Cpu {
            threads: rayon::current_num_threads(),
            architecture: std::env::consts::ARCH,
            features: cpu_features(),
        },
        cuda,
    };
    if options.json {
        print_json(&report)?;
    } else {
        print(&table(&report).render())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(report: &Report) -> Table {
    let mut table = Table::default();
    let or_none = |list: &[&str]| match list {
        [] => "none".to_owned(),
        list => list.join(" "),
    };
    table.row("version", report.version);
    table.row("backends", report.backends.join(", "));
    table.row(
        "cpu",
        format!(
            "{}, {} threads, vector extensions: {}",
            report.cpu.architecture,
            report.cpu.threads,
            or_none(&report.cpu.features)
        ),
    );
    let cuda = &report.cuda;
    if let Some(driver) = &cuda.driver {
        table.row("driver", format!("CUDA {driver}"));
    }
    for device in &cuda.devices {
        table.row(
            "device",
            format!(
                "cuda:{} {}, compute capability {}, {}, {}",
                device.ordinal,
                device.name,
                device.compute_capability,
                super::report::bytes(device.memory_bytes as f64),
                match &device.ptx_tier {
                    Some(tier) => format!("PTX of {tier}"),
                    None => "too old for the embedded PTX".to_owned(),
                }
            ),
        );
    }
    if let Some(reason) = &cuda.unavailable {
        table.row("cuda", reason.clone());
    }
    let tiers: Vec<&str> = cuda.ptx_tiers.iter().map(String::as_str).collect();
    table.row("ptx tiers", or_none(&tiers));
    table
}
