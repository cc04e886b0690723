//! Measures the kernels on a GPU: CUDA graphs of launches over rotating buffers, medians of
//! replays, a device copy of the same bytes beside each figure.

mod cases;
mod gpu;

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use cases::{Case, Memory, Pool};
use clap::{Args, Parser, Subcommand};
use fused_kv::{DType, Dispatch, Path};
use gpu::{CopyKernel, Gpu, Result};
use serde::Serialize;

#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Rates against token count and over geometries, host cost of a run.
    Dense {
        /// Where to write the figures, as JSON.
        #[arg(long)]
        out: Option<PathBuf>,
        /// Only the cases of this group.
        #[arg(long)]
        group: Option<String>,
        /// Only these token counts.
        #[arg(long, value_delimiter = ',')]
        tokens: Vec<usize>,
        #[command(flatten)]
        forced: Forced,
    },
    /// Time until the first plan exists, and the second. Run it in a fresh process, with the
    /// driver's cache where it is wanted (CUDA_CACHE_PATH, CUDA_CACHE_DISABLE).
    Load {
        /// What the times are of, for the file.
        #[arg(long, default_value = "")]
        label: String,
        /// Where to add the times, as a line of JSON.
        #[arg(long)]
        append: Option<PathBuf>,
    },
}

/// What is forced, in place of the library's choice.
#[derive(Args)]
struct Forced {
    /// Forces a path.
    #[arg(long)]
    path: Option<String>,
    /// Forces block sizes, one row each.
    #[arg(long, value_delimiter = ',')]
    threads: Vec<u32>,
    /// Reserves this much shared memory a block, in KiB.
    #[arg(long)]
    shared: Option<u32>,
    /// Forbids kernels to start before the one in front of them has ended.
    #[arg(long)]
    no_overlap: bool,
    /// Forces the order of the blocks of launches into a pool: all layers of a few tokens first, or
    /// one layer after another (which those into 8-bit pools do in any case).
    #[arg(long)]
    layers_first: Option<bool>,
}

#[derive(Serialize)]
struct Figure {
    #[serde(flatten)]
    case: Case,
    kv_bytes: usize,
    launches: usize,
    sets: usize,
    /// Microseconds a call: median, least and greatest replay.
    ours: Spread,
    memcpy: Spread,
    copy_kernel: Spread,
}

#[derive(Clone, Copy, Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn new(mut times: Vec<f64>, launches: usize) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |index: usize| {
            times
                .get(index)
                .map_or(f64::NAN, |time| time / launches as f64)
        };
        Self {
            median: at(times.len() / 2),
            min: at(0),
            max: at(times.len().saturating_sub(1)),
        }
    }
}

#[derive(Serialize)]
struct Report {
    device: String,
    driver: i32,
    host_cost_us: f64,
    figures: Vec<Figure>,
}

/// Buffers that a graph rotates over are together larger than this: several times any L2.
const ROTATE: usize = 256 << 20;
const REPLAYS: usize = 15;

fn measure(gpu: &Gpu, copy_kernel: &CopyKernel, case: &Case) -> Result<Figure> {
    let memory = Memory::new(gpu, case, ROTATE, 2048)?;
    let launches = memory.sets.max(50);
    let mut plans = (0..memory.sets)
        .map(|set| memory.plan(case, set))
        .collect::<Result<Vec<_>>>()?;
    let warm = 3;
    let graph = gpu.capture(|| {
        for launch in 0..launches {
            plans[launch % memory.sets].run_on(gpu.stream())?;
        }
        Ok(())
    })?;
    let ours = Spread::new(gpu.time(&graph, warm, REPLAYS)?, launches);
    for plan in &mut plans {
        plan.check()?;
    }
    let bytes = case.kv_bytes();
    let graph = gpu.capture(|| {
        for launch in 0..launches {
            let (to, from) = memory.copy_of(case, launch % memory.sets);
            gpu.copy(to, from, bytes)?;
        }
        Ok(())
    })?;
    let memcpy = Spread::new(gpu.time(&graph, warm, REPLAYS)?, launches);
    let graph = gpu.capture(|| {
        for launch in 0..launches {
            let (to, from) = memory.copy_of(case, launch % memory.sets);
            copy_kernel.copy(gpu, to, from, bytes)?;
        }
        Ok(())
    })?;
    let copy_kernel = Spread::new(gpu.time(&graph, warm, REPLAYS)?, launches);
    Ok(Figure {
        case: case.clone(),
        kv_bytes: bytes,
        launches,
        sets: memory.sets,
        ours,
        memcpy,
        copy_kernel,
    })
}

/// Microseconds of host time for one run of a plan, without a graph.
fn host_cost(gpu: &Gpu) -> Result<f64> {
    let case = Case {
        tokens: 1,
        ..Case::default()
    };
    let memory = Memory::new(gpu, &case, 0, 1)?;
    let mut plan = memory.plan(&case, 0)?;
    let mut batches = Vec::new();
    for _ in 0..500 {
        gpu.wait()?;
        let start = Instant::now();
        for _ in 0..200 {
            plan.run_on(gpu.stream())?;
        }
        batches.push(start.elapsed().as_secs_f64() * 1e6 / 200.0);
    }
    gpu.wait()?;
    batches.sort_by(f64::total_cmp);
    Ok(batches[batches.len() / 2])
}

fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = [1, 16, 128, 512, 2048, 8192, 32_768]
        .map(|tokens| Case {
            tokens,
            ..Case::default()
        })
        .into();
    let geometry = |name: &str, case: Case| Case {
        group: "geometry",
        name: name.into(),
        ..case
    };
    let base = Case::default;
    for dim in [64, 96, 192, 256] {
        let name = format!("D = R = {dim}");
        cases.push(geometry(
            &name,
            Case {
                head_dim: dim,
                rotary_dim: dim,
                ..base()
            },
        ));
    }
    for dim in [64, 96, 128, 192, 256] {
        let name = format!("D = {dim}, R = D/2");
        cases.push(geometry(
            &name,
            Case {
                head_dim: dim,
                rotary_dim: dim / 2,
                ..base()
            },
        ));
    }
    let f16 = Case {
        dtype: DType::F16,
        table: DType::F16,
        weight: DType::F16,
        ..base()
    };
    cases.push(geometry("f16", f16));
    let f32 = Case {
        dtype: DType::F32,
        table: DType::F32,
        weight: DType::F32,
        ..base()
    };
    cases.push(geometry("f32", f32));
    let mixed = Case {
        table: DType::F32,
        weight: DType::F32,
        ..base()
    };
    cases.push(geometry("f32 table and weights", mixed));
    cases.push(geometry(
        "f32 table",
        Case {
            table: DType::F32,
            ..base()
        },
    ));
    for heads in [1, 2, 4] {
        cases.push(geometry(&format!("H = {heads}"), Case { heads, ..base() }));
    }
    for layers in [1, 5] {
        cases.push(geometry(
            &format!("L = {layers}"),
            Case { layers, ..base() },
        ));
    }
    cases.push(geometry(
        "interleaved",
        Case {
            interleaved: true,
            ..base()
        },
    ));
    cases.push(geometry(
        "strided workspace",
        Case {
            spare_capacity: 1000,
            ..base()
        },
    ));
    cases.push(geometry(
        "padded kv rows",
        Case {
            kv_padding: 64,
            ..base()
        },
    ));
    let odd = |name: &str, case: Case| Case {
        group: "odd",
        name: name.into(),
        ..case
    };
    cases.push(odd(
        "D = 80, R = 32",
        Case {
            head_dim: 80,
            rotary_dim: 32,
            ..base()
        },
    ));
    cases.push(odd(
        "D = R = 46",
        Case {
            head_dim: 46,
            rotary_dim: 46,
            ..base()
        },
    ));
    cases.push(odd("bases off by one element", Case { shift: 1, ..base() }));
    cases.push(odd(
        "bases off by two elements",
        Case { shift: 2, ..base() },
    ));
    cases.extend(pools());
    cases
}

/// Straight into a pool of 65,536 slots, to random ones.
fn pools() -> Vec<Case> {
    let pool = |name: &str, tokens, dtype, hnd, page_size| Case {
        group: "pool",
        name: name.into(),
        tokens,
        pool: Some(Pool {
            dtype,
            hnd,
            page_size,
        }),
        ..Case::default()
    };
    let mut cases = Vec::new();
    for (name, dtype) in [("bf16 pool", DType::Bf16), ("e4m3fn pool", DType::F8E4M3Fn)] {
        for tokens in [1, 16, 128, 512, 2048, 8192, 32_768] {
            cases.push(pool(name, tokens, dtype, false, 1));
        }
    }
    for page in [16, 64] {
        for (name, dtype) in [("bf16", DType::Bf16), ("e4m3fn", DType::F8E4M3Fn)] {
            for tokens in [2048, 8192] {
                let name = format!("{name} pool, HND, page of {page}");
                cases.push(pool(&name, tokens, dtype, true, page));
            }
        }
    }
    cases
}

fn dense(
    out: Option<PathBuf>,
    group: Option<String>,
    tokens: &[usize],
    forced: &Forced,
) -> Result<()> {
    let gpu = Gpu::new()?;
    let copy_kernel = CopyKernel::new(&gpu)?;
    let path = match &forced.path {
        Some(name) => Some(
            Path::ALL
                .into_iter()
                .find(|path| path.name() == *name)
                .ok_or_else(|| format!("no path {name}"))?,
        ),
        None => None,
    };
    let mut figures = Vec::new();
    println!(
        "{:<10} {:<28} {:>6} {:>10} {:>9} {:>9} {:>9} {:>7} {:>7}",
        "group", "case", "T", "bytes MB", "ours us", "memcpy", "kernel", "of copy", "TB/s"
    );
    for case in cases() {
        if group.as_deref().is_some_and(|group| group != case.group)
            || !tokens.is_empty() && !tokens.contains(&case.tokens)
        {
            continue;
        }
        let variants: Vec<Option<u32>> = if forced.threads.is_empty() {
            vec![None]
        } else {
            forced.threads.iter().copied().map(Some).collect()
        };
        for threads in variants {
            let case = Case {
                dispatch: Dispatch {
                    path,
                    threads,
                    shared_bytes: forced.shared.map(|kib| kib * 1024),
                    overlap: forced.no_overlap.then_some(false),
                    layers_first: forced.layers_first,
                    ..Dispatch::default()
                },
                ..case.clone()
            };
            let figure = measure(&gpu, &copy_kernel, &case)?;
            let copy = figure.memcpy.median.min(figure.copy_kernel.median);
            println!(
                "{:<10} {:<28} {:>6} {:>10.2} {:>9.2} {:>9.2} {:>9.2} {:>7.3} {:>7.2} {}",
                case.group,
                case.name,
                case.tokens,
                2.0 * figure.kv_bytes as f64 / 1e6,
                figure.ours.median,
                figure.memcpy.median,
                figure.copy_kernel.median,
                copy / figure.ours.median,
                2.0 * figure.kv_bytes as f64 / figure.ours.median / 1e6,
                threads.map_or(String::new(), |threads| format!("threads {threads}")),
            );
            figures.push(figure);
        }
    }
    let host_cost_us = host_cost(&gpu)?;
    println!("host time of one run: {host_cost_us:.2} us");
    let device = fused_kv::cuda::devices()?
        .first()
        .map_or(String::new(), |d| d.name.clone());
    let report = Report {
        device,
        driver: fused_kv::cuda::driver_version()?,
        host_cost_us,
        figures,
    };
    if let Some(path) = out {
        std::fs::write(path, serde_json::to_string_pretty(&report)?)?;
    }
    Ok(())
}

/// Times of one process, in milliseconds.
#[derive(Serialize)]
struct Load {
    label: String,
    first_plan_ms: f64,
    second_plan_ms: f64,
}

fn load(label: String, append: Option<PathBuf>) -> Result<()> {
    let gpu = Gpu::new()?;
    let case = Case {
        tokens: 1,
        ..Case::default()
    };
    let memory = Memory::new(&gpu, &case, 0, 1)?;
    let time = || -> Result<f64> {
        let start = Instant::now();
        memory.plan(&case, 0)?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    };
    let load = Load {
        label,
        first_plan_ms: time()?,
        second_plan_ms: time()?,
    };
    println!(
        "first plan {:.2} ms, second plan {:.3} ms",
        load.first_plan_ms, load.second_plan_ms
    );
    if let Some(path) = append {
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)?;
        writeln!(file, "{}", serde_json::to_string(&load)?)?;
    }
    Ok(())
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Dense {
            out,
            group,
            tokens,
            forced,
        } => dense(out, group, &tokens, &forced),
        Command::Load { label, append } => load(label, append),
    }
}
