//! `fused-kv synth`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use fused_kv::half::{bf16, f16};
use fused_kv::{Config, DType, NormWeight};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use serde::Serialize;

use super::presets::{self, Preset};
use super::progress::Progress;
use super::report::Table;
use super::run::{Job, Target};
use super::{CliError, Style, geometry, pool, print, print_json, report};
use crate::io::{HostTensor, OutputFile};

/// Element type of kv, weights and table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Float {
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "float16")]
    F16,
    #[value(alias = "float32")]
    F32,
}

impl From<Float> for DType {
    fn from(float: Float) -> Self {
        match float {
            Float::Bf16 => Self::Bf16,
            Float::F16 => Self::F16,
            Float::F32 => Self::F32,
        }
    }
}

/// Element type of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Index {
    #[value(alias = "int32")]
    I32,
    #[value(alias = "int64")]
    I64,
}

#[derive(Debug, Args)]
#[command(after_help = presets::SOURCE)]
pub(crate) struct Options {
    /// The file to make
    #[arg(short, long, value_name = "FILE.safetensors")]
    output: PathBuf,
    /// Tokens (T)
    #[arg(long, value_name = "T")]
    tokens: usize,
    /// Geometry of a real drafter; the flags below change parts of it
    #[arg(long, value_enum, value_name = "NAME")]
    preset: Option<Preset>,
    /// Layers (L) [default: 8, or the preset's]
    #[arg(long, value_name = "L")]
    layers: Option<usize>,
    /// KV heads a layer (H) [default: 8, or the preset's]
    #[arg(long, visible_alias = "num-kv-heads", value_name = "H")]
    heads: Option<usize>,
    /// Elements of a head (D) [default: 128, or the preset's]
    #[arg(long, value_name = "D")]
    head_dim: Option<usize>,
    /// Rotated elements of a head (R) [default: head_dim]
    #[arg(long, value_name = "R")]
    rotary_dim: Option<usize>,
    /// Which elements are rotated together
    #[arg(long, visible_alias = "rope-style", value_enum, default_value = "neox")]
    style: Style,
    /// Element type of kv
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Float,
    /// Element type of cos_sin_cache [default: that of kv]
    #[arg(long, value_enum)]
    table_dtype: Option<Float>,
    /// Element type of k_norm_weight [default: that of kv]
    #[arg(long, value_enum)]
    weight_dtype: Option<Float>,
    /// Element type of positions
    #[arg(long, value_enum, default_value = "i64")]
    positions: Index,
    /// Rows of cos_sin_cache (P)
    #[arg(long, value_name = "P", default_value_t = 4096)]
    table_rows: usize,
    /// Base of the RoPE frequencies [default: 10000, or the preset's]
    #[arg(long, value_name = "BASE")]
    rope_theta: Option<f64>,
    /// RMSNorm epsilon, one for all layers or one for each [default: 1e-6, or the preset's]
    #[arg(long, value_name = "EPS,...", value_delimiter = ',')]
    eps: Option<Vec<f32>>,
    /// Value scale, one for all layers or one for each [default: none, V is copied]
    #[arg(long, value_name = "SCALE,...", value_delimiter = ',')]
    value_scale: Option<Vec<f32>>,
    /// Weights of which the effective weight is 1 + w
    #[arg(long)]
    offset_weights: bool,
    /// Seed: the same seed and geometry give the same file
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Also write the result, computed by the CPU backend: k_out and v_out, or k_pool_out and
    /// v_pool_out
    #[arg(long)]
    with_output: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// With --num-slots the file gets a pool and a random slot for each token
    #[command(flatten)]
    pool: pool::PoolFlags,
}

/// Random streams, so that no tensor depends on the size of another.
#[derive(Clone, Copy)]
enum Stream {
    Slots = 0,
    Weights = 1,
    Positions = 2,
    /// Rows of kv follow, one stream each.
    Kv = 3,
}

fn stream(seed: u64, stream: Stream, row: u64) -> ChaCha8Rng {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(stream as u64 + row);
    random
}

/// Stores `value` as the `index`-th element of `bytes`, rounded once.
fn store(bytes: &mut [u8], dtype: Float, index: usize, value: f64) {
    match dtype {
        Float::Bf16 => {
            bytes[2 * index..][..2].copy_from_slice(&bf16::from_f64(value).to_le_bytes());
        }
        Float::F16 => bytes[2 * index..][..2].copy_from_slice(&f16::from_f64(value).to_le_bytes()),
        Float::F32 => bytes[4 * index..][..4].copy_from_slice(&(value as f32).to_le_bytes()),
    }
}

fn normal(random: &mut ChaCha8Rng) -> f64 {
    StandardNormal.sample(random)
}

pub(super) fn floats(values: &[f32]) -> HostTensor {
    HostTensor {
        dtype: DType::F32,
        shape: vec![values.len()],
        bytes: values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
    }
}

/// One value for each of `layers`, from one for all or one for each.
pub(super) fn per_layer(flag: &str, given: &[f32], layers: usize) -> Result<Vec<f32>, CliError> {
    if let Some(value) = given.iter().find(|value| !value.is_finite()) {
        return Err(CliError::Usage(format!(
            "{flag} {value}, expected finite numbers of 32 bits"
        )));
    }
    match given {
        [one] => Ok(vec![*one; layers]),
        many if many.len() == layers => Ok(many.to_vec()),
        many => Err(CliError::Usage(format!(
            "{flag} has {} values, expected 1 or {layers} (one for each layer)",
            many.len()
        ))),
    }
}

/// Rows of `[P, R]`: R/2 cosines, then R/2 sines, of `position * base^(-2i/R)`.
fn table(rows: usize, rotary_dim: usize, base: f64, dtype: Float) -> Result<HostTensor, CliError> {
    let mut table = HostTensor::zeros(dtype.into(), &[rows, rotary_dim])?;
    let half = rotary_dim / 2;
    let row_bytes = rotary_dim * table.dtype.size();
    table
        .bytes
        .par_chunks_mut(row_bytes)
        .enumerate()
        .for_each(|(position, row)| {
            for i in 0..half {
                let frequency = base.powf(-2.0 * i as f64 / rotary_dim as f64);
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                store(row, dtype, i, cos);
                store(row, dtype, i + half, sin);
            }
        });
    Ok(table)
}

/// Random rows of the table; the first token has row 0 and the last token the last row.
fn positions(options: &Options) -> Result<HostTensor, CliError> {
    let mut random = stream(options.seed, Stream::Positions, 0);
    let (tokens, rows) = (options.tokens, options.table_rows as u64);
    let dtype = match options.positions {
        Index::I32 => DType::I32,
        Index::I64 => DType::I64,
    };
    let mut positions = HostTensor::zeros(dtype, &[tokens])?;
    for (token, bytes) in positions.bytes.chunks_exact_mut(dtype.size()).enumerate() {
        // Drawn in any case, so that a token's row does not depend on the number of tokens.
        let drawn = random.next_u64() % rows;
        let position = match token {
            0 => 0,
            _ if token + 1 == tokens => rows - 1,
            _ => drawn,
        };
        // Little endian: an i32 is the low half of the i64, and `rows` was checked to fit.
        bytes.copy_from_slice(&position.to_le_bytes()[..dtype.size()]);
    }
    Ok(positions)
}

fn generate(options: &Options) -> Result<Job, CliError> {
    let preset = options.preset.map(Preset::geometry);
    let layers = options.layers.or(preset.map(|p| p.layers)).unwrap_or(8);
    let heads = options.heads.or(preset.map(|p| p.heads)).unwrap_or(8);
    let head_dim = options
        .head_dim
        .or(preset.map(|p| p.head_dim))
        .unwrap_or(128);
    let rotary_dim = options.rotary_dim.unwrap_or(head_dim);
    let base = options
        .rope_theta
        .or(preset.map(|p| p.rope_theta))
        .unwrap_or(1e4);
    check(options, layers, heads, head_dim, rotary_dim, base)?;

    let default_eps = [preset.map_or(1e-6, |p| p.eps)];
    let eps = per_layer(
        "--eps",
        options.eps.as_deref().unwrap_or(&default_eps),
        layers,
    )?;
    let value_scale = options
        .value_scale
        .as_deref()
        .map(|scale| per_layer("--value-scale", scale, layers))
        .transpose()?;

    let weight_dtype = options.weight_dtype.unwrap_or(options.dtype);
    let mut weight = HostTensor::zeros(weight_dtype.into(), &[layers, head_dim])?;
    let mut random = stream(options.seed, Stream::Weights, 0);
    let middle = if options.offset_weights { 0.0 } else { 1.0 };
    for index in 0..weight.elements() {
        let value = middle + 0.1 * normal(&mut random);
        store(&mut weight.bytes, weight_dtype, index, value);
    }

    // heads and head_dim were checked to be small enough.
    let width = 2 * heads * head_dim;
    let mut kv = HostTensor::zeros(options.dtype.into(), &[options.tokens, layers, width])?;
    let row_bytes = width * kv.dtype.size();
    let progress = Progress::bytes("generating", kv.bytes.len() as u64);
    kv.bytes
        .par_chunks_mut(row_bytes)
        .enumerate()
        .for_each(|(index, row)| {
            let mut random = stream(options.seed, Stream::Kv, index as u64);
            for i in 0..width {
                store(row, options.dtype, i, normal(&mut random));
            }
            progress.advance(row_bytes as u64);
        });
    drop(progress);

    Ok(Job {
        config: Config {
            num_kv_heads: heads,
            head_dim,
            rotary_dim,
            rope_style: options.style.into(),
            norm_weight: match options.offset_weights {
                true => NormWeight::Offset,
                false => NormWeight::Plain,
            },
        },
        kv,
        k_norm_weight: weight,
        eps: floats(&eps),
        cos_sin_cache: table(
            options.table_rows,
            rotary_dim,
            base,
            options.table_dtype.unwrap_or(options.dtype),
        )?,
        positions: positions(options)?,
        value_scale: value_scale.as_deref().map(floats),
    })
}

/// Refuses what no job could use, before memory is asked for.
fn check(
    options: &Options,
    layers: usize,
    heads: usize,
    head_dim: usize,
    rotary_dim: usize,
    base: f64,
) -> Result<(), CliError> {
    let usage = |text: String| Err(CliError::Usage(text));
    let even_within =
        |value: usize, limit: usize| value.is_multiple_of(2) && (2..=limit).contains(&value);
    if layers == 0 || heads == 0 {
        return usage("--layers and --heads must be at least 1".to_owned());
    }
    if heads > 1 << 20 {
        return usage(format!("--heads {heads} is too large"));
    }
    if !even_within(head_dim, 1024) {
        return usage(format!(
            "--head-dim {head_dim}, expected an even number from 2 to 1024"
        ));
    }
    if !even_within(rotary_dim, head_dim) {
        return usage(format!(
            "--rotary-dim {rotary_dim}, expected an even number from 2 to head_dim ({head_dim})"
        ));
    }
    let limit = match options.positions {
        Index::I32 => 1 << 31,
        Index::I64 => 1 << 40,
    };
    if options.table_rows == 0 || options.table_rows as u64 > limit {
        return usage(format!(
            "--table-rows {}, expected a number from 1 to {limit}",
            options.table_rows
        ));
    }
    if !(base.is_finite() && base > 0.0) {
        return usage(format!("--rope-theta {base}, expected a positive number"));
    }
    Ok(())
}

#[derive(Debug, Serialize)]
struct Report {
    output: String,
    bytes: u64,
    seed: u64,
    tensors: BTreeMap<&'static str, String>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, CliError> {
    let mut destination = OutputFile::create(&options.output)?;
    let job = generate(options)?;
    let mut slots = stream(options.seed, Stream::Slots, 0);
    let pool = options.pool.generate(&job, || slots.next_u64())?;
    let mut metadata = geometry::metadata(&job.config);
    let mut target = match pool {
        Some(pool) => Some(Target::Pool(pool)),
        None if options.with_output => Some(Target::Dense {
            k: job.output()?,
            v: job.output()?,
        }),
        None => None,
    };
    let mut extra = Vec::new();
    if let Some(target) = &mut target {
        if let Target::Pool(pool) = &*target {
            metadata = pool.metadata(&job);
            extra = pool.descales();
            if options.with_output {
                for (name, before) in target.outputs() {
                    extra.push((name, before.try_clone()?));
                }
            }
        }
        // Without a run as well: the plan refuses what no job could use.
        job.run_on_cpu(&options.output, target, u32::from(options.with_output))?;
    }
    let mut tensors = job.tensors();
    tensors.extend(extra.iter().map(|(name, tensor)| (*name, tensor)));
    if let Some(target) = &target {
        if let Target::Pool(pool) = target {
            tensors.push(("slots", &pool.slots));
        }
        let names = match options.with_output {
            true => target.reference_names(),
            false => target.names(),
        };
        tensors.extend(names.into_iter().zip(target.halves().into_iter().flatten()));
    }
    // Wide elements first: each tensor then starts at a multiple of its element size.
    tensors.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype.size()));

    metadata.insert("case".to_owned(), format!("synth seed {}", options.seed));
    let bytes = tensors
        .iter()
        .map(|(_, tensor)| tensor.bytes.len() as u64)
        .sum();
    let progress = Progress::bytes("writing", bytes);
    destination.write(&tensors, &metadata, &|bytes| progress.advance(bytes))?;
    destination.commit()?;
    drop(progress);

    let described = tensors
        .iter()
        .map(|(name, tensor)| (*name, tensor.describe()));
    if options.json {
        print_json(&Report {
            output: options.output.display().to_string(),
            bytes,
            seed: options.seed,
            tensors: described.collect(),
        })?;
    } else {
        let mut table = Table::default();
        for (name, text) in described {
            table.row(name, text);
        }
        table.row("written", options.output.display().to_string());
        table.row("size", report::bytes(bytes as f64));
        print(&table.render())?;
    }
    Ok(ExitCode::SUCCESS)
}
