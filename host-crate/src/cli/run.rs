//! `fused-kv run`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use fused_kv::{Config, Inputs, Output, Outputs, Plan, Shape, TensorView};
use serde::Serialize;

use super::pool::{self, PoolJob};
use super::progress::Progress;
use super::report::{self, Table};
use super::verify::{self, Distance};
use super::{BEYOND_CONTRACT, CliError, geometry, print, print_json};
use crate::io::{HostTensor, InputFile, OutputFile, Watch};

/// Where to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// CUDA where this build has it and there is a device, else the CPU
    Auto,
    /// The CPU
    Cpu,
    /// An NVIDIA GPU
    Cuda,
}

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Input: kv, k_norm_weight, eps, cos_sin_cache, positions; optional value_scale, k_out,
    /// v_out. With slots, rows go to a KV pool instead: k_pool and v_pool, or a pool of zeros;
    /// optional k_descale, v_descale
    file: PathBuf,
    /// Write k_out and v_out, or k_pool and v_pool, to this safetensors file
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: Option<PathBuf>,
    /// Where to run
    #[arg(long, value_enum, default_value = "auto")]
    backend: Backend,
    /// Ordinal of the CUDA device
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Compare the result with k_out and v_out, or k_pool_out and v_pool_out, of the input file
    #[arg(long)]
    verify: bool,
    /// Time this many runs
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    geometry: geometry::Flags,
    #[command(flatten)]
    pool: pool::PoolFlags,
}

/// Where the results of a job go.
#[derive(Debug)]
pub(crate) enum Target {
    /// A workspace.
    Dense { k: HostTensor, v: HostTensor },
    /// A KV pool.
    Pool(PoolJob),
}

impl Target {
    /// K and V; a pool may lack one until a plan refuses it.
    pub(crate) fn halves(&self) -> [Option<&HostTensor>; 2] {
        match self {
            Self::Dense { k, v } => [Some(k), Some(v)],
            Self::Pool(pool) => [pool.k.as_ref(), pool.v.as_ref()],
        }
    }

    /// What K and V are called in a file of results.
    pub(crate) fn names(&self) -> [&'static str; 2] {
        match self {
            Self::Dense { .. } => ["k_out", "v_out"],
            Self::Pool(_) => ["k_pool", "v_pool"],
        }
    }

    /// The tensors that are written, by [their names](Self::names).
    pub(crate) fn outputs(&self) -> impl Iterator<Item = (&'static str, &HostTensor)> {
        self.names()
            .into_iter()
            .zip(self.halves())
            .filter_map(|(name, tensor)| Some((name, tensor?)))
    }

    /// What results are called in a file that has them for comparison.
    pub(crate) fn reference_names(&self) -> [&'static str; 2] {
        match self {
            Self::Dense { .. } => ["k_out", "v_out"],
            Self::Pool(_) => ["k_pool_out", "v_pool_out"],
        }
    }

    /// How far K and V are from their references, which have to be like them.
    fn compare(
        &self,
        path: &Path,
        job: &Job,
        references: [Option<&HostTensor>; 2],
    ) -> Result<[Option<Distance>; 2], CliError> {
        let pairs = self.halves().into_iter().zip(references);
        for (tensor, pair) in self.reference_names().into_iter().zip(pairs) {
            if let (Some(ours), Some(theirs)) = pair
                && (ours.dtype, &ours.shape) != (theirs.dtype, &theirs.shape)
            {
                return Err(CliError::Reference {
                    path: path.to_owned(),
                    tensor,
                    found: theirs.describe(),
                    expected: ours.describe(),
                });
            }
        }
        let compare = |is_k: bool| {
            let half = usize::from(!is_k);
            let (ours, theirs) = (self.halves()[half]?, references[half]?);
            match self {
                Self::Dense { .. } if is_k => verify::k(job, ours, theirs),
                Self::Dense { .. } => verify::v(job, ours, theirs),
                Self::Pool(pool) => verify::pool(job, pool, is_k, ours, theirs),
            }
        };
        Ok([compare(true), compare(false)])
    }
}

/// The inputs of a job, in host memory.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) config: Config,
    pub(crate) kv: HostTensor,
    pub(crate) k_norm_weight: HostTensor,
    pub(crate) eps: HostTensor,
    pub(crate) cos_sin_cache: HostTensor,
    pub(crate) positions: HostTensor,
    pub(crate) value_scale: Option<HostTensor>,
}

impl Job {
    fn read(
        config: Config,
        file: &mut InputFile,
        watch: &impl Watch,
    ) -> Result<Self, crate::io::FileError> {
        Ok(Self {
            config,
            kv: file.required("kv", watch)?,
            k_norm_weight: file.required("k_norm_weight", watch)?,
            eps: file.required("eps", watch)?,
            cos_sin_cache: file.required("cos_sin_cache", watch)?,
            positions: file.required("positions", watch)?,
            value_scale: file.optional("value_scale", watch)?,
        })
    }

    /// The tensors with their names; `value_scale` last, where there is one.
    pub(crate) fn tensors(&self) -> Vec<(&'static str, &HostTensor)> {
        let mut tensors = vec![
            ("kv", &self.kv),
            ("k_norm_weight", &self.k_norm_weight),
            ("eps", &self.eps),
            ("cos_sin_cache", &self.cos_sin_cache),
            ("positions", &self.positions),
        ];
        tensors.extend(
            self.value_scale
                .as_ref()
                .map(|scale| ("value_scale", scale)),
        );
        tensors
    }

    /// `[L, T, H, D]`; an empty shape where `kv` does not fit the geometry, which the plan refuses
    /// before it looks at its outputs.
    fn output_shape(&self) -> [usize; 4] {
        let Config {
            num_kv_heads: heads,
            head_dim,
            ..
        } = self.config;
        match *self.kv.shape.as_slice() {
            [tokens, layers, width]
                if heads
                    .checked_mul(head_dim)
                    .and_then(|half| half.checked_mul(2))
                    == Some(width) =>
            {
                [layers, tokens, heads, head_dim]
            }
            _ => [0; 4],
        }
    }

    /// Zeros to write K or V into.
    pub(crate) fn output(&self) -> Result<HostTensor, CliError> {
        Ok(HostTensor::zeros(self.kv.dtype, &self.output_shape())?)
    }

    /// The inputs as views that `view` makes of each tensor.
    pub(crate) fn inputs<'a>(
        &'a self,
        mut view: impl FnMut(&'static str, &'a HostTensor) -> Result<TensorView<'a>, CliError>,
    ) -> Result<Inputs<'a>, CliError> {
        Ok(Inputs {
            kv: view("kv", &self.kv)?,
            k_norm_weight: view("k_norm_weight", &self.k_norm_weight)?,
            eps: view("eps", &self.eps)?,
            cos_sin_cache: view("cos_sin_cache", &self.cos_sin_cache)?,
            positions: view("positions", &self.positions)?,
            value_scale: self
                .value_scale
                .as_ref()
                .map(|scale| view("value_scale", scale))
                .transpose()?,
        })
    }

    /// Runs on the CPU; gives the time of each run.
    pub(crate) fn run_on_cpu(
        &self,
        path: &Path,
        target: &mut Target,
        repeat: u32,
    ) -> Result<Vec<Duration>, CliError> {
        let named = |tensor, source| CliError::Tensor {
            path: path.to_owned(),
            tensor,
            source,
        };
        let inputs =
            self.inputs(|name, tensor| tensor.view().map_err(|source| named(name, source)))?;
        let fail = |source| CliError::Job {
            path: path.to_owned(),
            source,
        };
        let mut plan = match target {
            Target::Dense { k, v } => {
                let outputs = Outputs {
                    k: Output::Into(k.view_mut().map_err(|source| named("k_out", source))?),
                    v: Output::Into(v.view_mut().map_err(|source| named("v_out", source))?),
                };
                Plan::new(self.config, inputs, outputs).map_err(fail)?
            }
            Target::Pool(pool) => {
                // Out of the pool for the run, so that the rest of it can be read meanwhile.
                let (mut k, mut v) = (pool.k.take(), pool.v.take());
                let result = self.run_pool_on_cpu(path, inputs, pool, [&mut k, &mut v], repeat);
                (pool.k, pool.v) = (k, v);
                return result;
            }
        };
        timed(repeat, || {
            let start = Instant::now();
            plan.run().map_err(fail)?;
            let time = start.elapsed();
            plan.check().map_err(fail)?;
            Ok(time)
        })
    }

    fn run_pool_on_cpu(
        &self,
        path: &Path,
        inputs: Inputs<'_>,
        pool: &PoolJob,
        [k, v]: [&mut Option<HostTensor>; 2],
        repeat: u32,
    ) -> Result<Vec<Duration>, CliError> {
        let named = |tensor, source| CliError::Tensor {
            path: path.to_owned(),
            tensor,
            source,
        };
        let fail = |source| CliError::Job {
            path: path.to_owned(),
            source,
        };
        let (k, v) = (
            k.as_mut().map(HostTensor::view_mut),
            v.as_mut().map(HostTensor::view_mut),
        );
        let k = k.transpose().map_err(|source| named("k_pool", source))?;
        let v = v.transpose().map_err(|source| named("v_pool", source))?;
        let slots = pool.slots.view().map_err(|source| named("slots", source))?;
        let target = pool.target(k, v, slots);
        let mut plan = Plan::paged(self.config, inputs, target).map_err(fail)?;
        timed(repeat, || {
            let start = Instant::now();
            plan.run().map_err(fail)?;
            let time = start.elapsed();
            plan.check().map_err(fail)?;
            Ok(time)
        })
    }

    /// Bytes that one run reads of kv and writes to the target.
    fn bytes(&self, target: &Target) -> u64 {
        let written = match target {
            Target::Dense { k, v } => k.bytes.len() + v.bytes.len(),
            Target::Pool(pool) => {
                let layers = self.kv.shape.get(1).copied().unwrap_or(0);
                let row = 2 * self.config.num_kv_heads * self.config.head_dim;
                let size = pool.k.as_ref().map_or(0, |pool| pool.dtype.size());
                pool.writers(self).len() * layers * row * size
            }
        };
        (self.kv.bytes.len() + written) as u64
    }
}

/// Calls `run` `repeat` times and collects what it measured.
pub(crate) fn timed(
    repeat: u32,
    mut run: impl FnMut() -> Result<Duration, CliError>,
) -> Result<Vec<Duration>, CliError> {
    let progress = Progress::steps("running", u64::from(repeat));
    (0..repeat)
        .map(|_| {
            let time = run();
            progress.advance(1);
            time
        })
        .collect()
}

/// What ran the job.
#[derive(Debug, Serialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub(crate) enum Ran {
    Cpu {
        /// Threads of the pool.
        threads: usize,
    },
    #[cfg(feature = "cuda")]
    Cuda {
        /// Ordinal.
        device: u32,
        /// The driver's name of the device.
        device_name: String,
    },
}

impl std::fmt::Display for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu { threads: 1 } => write!(f, "cpu (1 thread)"),
            Self::Cpu { threads } => write!(f, "cpu ({threads} threads)"),
            #[cfg(feature = "cuda")]
            Self::Cuda {
                device,
                device_name,
            } => write!(f, "cuda:{device} ({device_name})"),
        }
    }
}

fn cpu() -> Ran {
    Ran::Cpu {
        threads: rayon::current_num_threads(),
    }
}

fn execute(
    options: &Options,
    job: &Job,
    target: &mut Target,
) -> Result<(Ran, Vec<Duration>), CliError> {
    let path = &options.file;
    match options.backend {
        Backend::Cpu => {}
        #[cfg(feature = "cuda")]
        Backend::Cuda => {
            return super::cuda::run(path, job, target, options.device, options.repeat);
        }
        #[cfg(feature = "cuda")]
        Backend::Auto => {
            if super::cuda::available(options.device) {
                return super::cuda::run(path, job, target, options.device, options.repeat);
            }
        }
        #[cfg(not(feature = "cuda"))]
        Backend::Cuda => {
            return Err(CliError::Library(fused_kv::Error::BackendNotCompiled {
                backend: "cuda",
                remedy: "build fused-kv with --features cuda",
            }));
        }
        #[cfg(not(feature = "cuda"))]
        Backend::Auto => {}
    }
    Ok((cpu(), job.run_on_cpu(path, target, options.repeat)?))
}

#[derive(Debug, Serialize)]
struct TensorReport {
    shape: Vec<usize>,
    dtype: &'static str,
}

impl From<&HostTensor> for TensorReport {
    fn from(tensor: &HostTensor) -> Self {
        Self {
            shape: tensor.shape.clone(),
            dtype: tensor.dtype.name(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Verification {
    /// By the name of the reference, where the file has one and it can be compared.
    #[serde(flatten)]
    distances: BTreeMap<&'static str, Distance>,
    within_contract: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    file: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    case: Option<String>,
    geometry: BTreeMap<String, String>,
    tensors: BTreeMap<&'static str, TensorReport>,
    backend: Ran,
    runs: usize,
    best_seconds: f64,
    median_seconds: f64,
    /// Read of kv and written to the outputs, in one run.
    bytes: u64,
    /// At the median time.
    bytes_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    verify: Option<Verification>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<String>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, CliError> {
    let path = &options.file;
    let mut file = InputFile::open(path)?;
    let config = options.geometry.resolve(path, &file)?;
    // Before the work: a destination that cannot be written is known now.
    let destination = options
        .output
        .as_deref()
        .map(OutputFile::create)
        .transpose()?;

    const NAMES: [&str; 10] = [
        "kv",
        "k_norm_weight",
        "eps",
        "cos_sin_cache",
        "positions",
        "value_scale",
        "k_out",
        "v_out",
        "k_pool_out",
        "v_pool_out",
    ];
    let all = NAMES.iter().chain(&pool::NAMES);
    let total = all.map(|name| file.tensor_len(name)).sum();
    let progress = Progress::bytes("reading", total);
    let watch = |bytes| progress.advance(bytes);
    let job = Job::read(config, &mut file, &watch)?;
    let pool = PoolJob::read(&options.pool, path, &mut file, &job, &watch)?;
    let names = match pool {
        None => ["k_out", "v_out"],
        Some(_) => ["k_pool_out", "v_pool_out"],
    };
    let k_reference = file.optional(names[0], &watch)?;
    let v_reference = file.optional(names[1], &watch)?;
    drop(progress);
    if options.verify && k_reference.is_none() && v_reference.is_none() {
        return Err(CliError::NothingToVerify {
            path: path.clone(),
            names,
        });
    }

    // Outputs that the file brings along are taken at their word: the plan checks their shape and
    // dtype as it would check a caller's tensors.
    let destination_like = |reference: &Option<HostTensor>| match reference {
        Some(reference) => Ok(HostTensor::zeros(reference.dtype, &reference.shape)?),
        None => job.output(),
    };
    let mut target = match pool {
        None => Target::Dense {
            k: destination_like(&k_reference)?,
            v: destination_like(&v_reference)?,
        },
        Some(pool) => Target::Pool(pool),
    };
    let (ran, mut times) = execute(options, &job, &mut target)?;
    times.sort_unstable();

    let verify = if options.verify {
        let references = [k_reference.as_ref(), v_reference.as_ref()];
        let distances = target.compare(path, &job, references)?;
        let compared = distances
            .iter()
            .zip(references)
            .all(|(distance, reference)| distance.is_some() == reference.is_some());
        let within = distances.iter().flatten().all(Distance::within_contract);
        Some(Verification {
            distances: names
                .into_iter()
                .zip(distances)
                .filter_map(|(name, distance)| Some((name, distance?)))
                .collect(),
            within_contract: compared && within,
        })
    } else {
        None
    };

    if let Some(mut destination) = destination {
        let tensors: Vec<_> = target.outputs().collect();
        let total = tensors
            .iter()
            .map(|(_, tensor)| tensor.bytes.len())
            .sum::<usize>();
        let progress = Progress::bytes("writing", total as u64);
        let mut metadata = match &target {
            Target::Dense { .. } => geometry::metadata(&job.config),
            Target::Pool(pool) => pool.metadata(&job),
        };
        if let Some(case) = file.metadata("case") {
            metadata.insert("case".to_owned(), case.to_owned());
        }
        destination.write(&tensors, &metadata, &|bytes| progress.advance(bytes))?;
        destination.commit()?;
    }

    let best = times.first().copied().unwrap_or_default();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    let bytes = job.bytes(&target);
    let rate = match median.as_secs_f64() {
        0.0 => 0.0,
        seconds => bytes as f64 / seconds,
    };
    let within = verify.as_ref().is_none_or(|verify| verify.within_contract);
    if options.json {
        let mut tensors: BTreeMap<_, _> = job
            .tensors()
            .into_iter()
            .map(|(name, tensor)| (name, tensor.into()))
            .collect();
        tensors.extend(target.outputs().map(|(name, tensor)| (name, tensor.into())));
        if let Target::Pool(pool) = &target {
            tensors.insert("slots", (&pool.slots).into());
        }
        print_json(&Report {
            file: path.display().to_string(),
            case: file.metadata("case").map(str::to_owned),
            geometry: geometry::metadata(&job.config),
            tensors,
            backend: ran,
            runs: times.len(),
            best_seconds: best.as_secs_f64(),
            median_seconds: median.as_secs_f64(),
            bytes,
            bytes_per_second: rate,
            verify,
            output: options
                .output
                .as_ref()
                .map(|path| path.display().to_string()),
        })?;
    } else {
        let mut table = Table::default();
        if let Some(case) = file.metadata("case") {
            table.row("case", case);
        }
        table.row("kv", job.kv.describe());
        table.row(
            "weights, table",
            format!(
                "{}, {} {}",
                job.k_norm_weight.dtype,
                Shape(job.cos_sin_cache.shape.clone()),
                job.cos_sin_cache.dtype
            ),
        );
        let outputs: Vec<_> = target.outputs().collect();
        if let [(k_name, k), (v_name, _)] = outputs[..] {
            table.row(format!("{k_name}, {v_name}"), k.describe());
        }
        if let Target::Pool(pool) = &target {
            table.row("slots", pool.slots.describe());
        }
        table.row("backend", ran.to_string());
        table.row(
            "time",
            format!(
                "best {}, median {} of {}",
                report::time(best),
                report::time(median),
                match times.len() {
                    1 => "1 run".to_owned(),
                    runs => format!("{runs} runs"),
                }
            ),
        );
        table.row(
            "rate",
            format!(
                "{}/s at the median ({} read and written)",
                report::bytes(rate),
                report::bytes(bytes as f64)
            ),
        );
        if let Some(verify) = &verify {
            for name in names {
                let distance = verify.distances.get(name);
                table.row(format!("verify {name}"), describe(distance));
            }
            table.row(
                "verdict",
                if verify.within_contract {
                    "within the contract"
                } else {
                    "BEYOND THE CONTRACT"
                },
            );
        }
        if let Some(output) = &options.output {
            table.row("written", output.display().to_string());
        }
        print(&table.render())?;
    }
    Ok(if within {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(BEYOND_CONTRACT)
    })
}

fn describe(distance: Option<&Distance>) -> String {
    let Some(distance) = distance else {
        return "not in the file".to_owned();
    };
    let mut text = format!(
        "{} of {} elements differ, by at most {} ulp; {} beyond the contract",
        distance.differing, distance.elements, distance.max_ulp, distance.beyond_contract
    );
    if distance.nan_mismatches > 0 {
        text.push_str(&format!(
            "; {} NaN on one side only",
            distance.nan_mismatches
        ));
    }
    text
}
