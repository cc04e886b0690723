//! A problem as kernel launches: the parameter struct and the grid, for a GPU or the emulator.

use fused_kv_kernels::abi::{Code, FastDivisor, Params, flags};
use fused_kv_kernels::launch::{Facts, MAX_LAYERS, Path};

use crate::problem::{Operand, PoolStrides, Problem, Target};
use crate::{DType, Error, NormWeight, RopeStyle};

/// How to dispatch, where a caller does not leave it to the library. For tests and measurements:
/// every path gives the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dispatch {
    /// The path; `None` for the fastest that can serve the job.
    pub path: Option<Path>,
    /// Threads of a block, a multiple of 64 from 64 to 512; `None` for the library's choice.
    pub threads: Option<u32>,
    /// Bytes of shared memory that a block reserves and does not use, which limits how many blocks
    /// a multiprocessor holds; `None` for the library's choice.
    pub shared_bytes: Option<u32>,
    /// The most tokens that one launch takes (a job with more takes several); `None` for the
    /// largest number that a launch can index.
    pub tokens_per_launch: Option<u32>,
    /// The most layers that one launch takes; `None` for the limit of a grid.
    pub layers_per_launch: Option<u32>,
    /// Whether kernels may start before the one in front of them in the stream has ended (they
    /// wait for its end before they load or store anything); `None` for wherever the device can.
    pub overlap: Option<bool>,
    /// How many blocks of a launch, counted in the order of the grid, start to bring what they read
    /// into the second-level cache before they wait for the kernel in front of them; `None` for the
    /// library's choice.
    pub early_blocks: Option<u32>,
    /// The order of the blocks of a launch into a pool. `Some(true)`: all layers of a few tokens, then
    /// the next tokens (a launch with more than 65,535 groups of rows ignores it). `Some(false)`: one
    /// layer after another. `None` for the library's choice. Ignored for workspaces, and by the vector
    /// kernels into 8-bit pools at D = R = 128 (bf16 `kv`, weights and table; neox), which go one layer
    /// after another.
    pub layers_first: Option<bool>,
}

/// One launch.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) entry: &'static str,
    pub(crate) grid: (u32, u32),
    pub(crate) threads: u32,
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "the emulated device has none")
    )]
    pub(crate) shared_bytes: u32,
    pub(crate) params: Params,
}

fn code(dtype: DType) -> Code {
    match dtype {
        DType::Bf16 => Code::Bf16,
        DType::F16 => Code::F16,
        DType::F8E4M3Fn => Code::E4M3,
        DType::F8E5M2 => Code::E5M2,
        // Validation lets no other type through where a float is expected.
        DType::F32 | DType::I32 | DType::I64 => Code::F32,
    }
}

/// Bitwise or of an address and the strides that are stepped along; the same with the address taken
/// one element lower.
fn bits(operand: &Operand, extents: &[usize]) -> [u64; 2] {
    let strides = operand.strides.iter().zip(extents);
    let stepped = strides.filter(|(_, extent)| **extent > 1);
    let strides = stepped.fold(0, |bits, (stride, _)| bits | *stride as u64);
    both_bases(operand.address, operand.dtype).map(|base| base | strides)
}

/// An address, and the one an element before it.
fn both_bases(address: usize, dtype: DType) -> [u64; 2] {
    [
        address as u64,
        (address as u64).wrapping_sub(dtype.size() as u64),
    ]
}

/// Bitwise or, each with its own.
fn or(a: [u64; 2], b: [u64; 2]) -> [u64; 2] {
    [a[0] | b[0], a[1] | b[1]]
}

fn small(what: &'static str, value: usize, limit: u32) -> Result<u32, Error> {
    match u32::try_from(value) {
        Ok(small) if small <= limit => Ok(small),
        _ => Err(Error::TooLarge {
            what,
            found: value as u64,
            limit: u64::from(limit),
        }),
    }
}

/// The same as [`bits`] for every row of one half of a pool.
fn pool_bits(strides: &PoolStrides, dtype: DType, bases: impl Iterator<Item = usize>) -> [u64; 2] {
    let strides = (strides.page | strides.token | strides.head) as u64;
    bases.fold([strides; 2], |bits, base| or(bits, both_bases(base, dtype)))
}

/// The launches of a job, in order; none where there is nothing to do. `table` is where the
/// kernels find the table of a pool.
///
/// # Errors
///
/// [`Error::Path`] when the path asked for cannot serve the job, [`Error::TooLarge`] when a row of
/// `kv` is too large to index.
pub(crate) fn launches(
    problem: &Problem,
    dispatch: Dispatch,
    status: u64,
    table: u64,
) -> Result<Vec<Call>, Error> {
    let config = &problem.config;
    let (tokens, layers) = (problem.tokens, problem.layers);
    let kv_size = problem.kv.dtype.size();
    let head_bytes = config.head_dim * kv_size;
    // Offsets within a row of kv are 32 bit on the device.
    let row = config.num_kv_heads.saturating_mul(2 * head_bytes);
    small("bytes of kv for one token and layer", row, i32::MAX as u32)?;
    let heads = config.num_kv_heads as u32;
    let target = &problem.target;
    let (out, out_bits) = match target {
        Target::Dense { k, v } => {
            let extents = [layers, tokens, config.num_kv_heads];
            (k.dtype, or(bits(k, &extents), bits(v, &extents)))
        }
        Target::Pool(pool) => {
            let bases = |half: usize| (0..layers).map(move |layer| pool.bases(layer)[half]);
            let bits = |half: usize, strides| pool_bits(strides, pool.dtype, bases(half));
            let bits = or(bits(0, &pool.k), bits(1, &pool.v));
            (pool.dtype, bits)
        }
    };

    let kv_bits = bits(&problem.kv, &[tokens, layers]).map(|bits| bits | head_bytes as u64);
    let facts = Facts {
        heads,
        head_dim: config.head_dim as u32,
        rotary_dim: config.rotary_dim as u32,
        interleaved: config.rope_style == RopeStyle::Interleaved,
        kv: code(problem.kv.dtype),
        weight: code(problem.weight.dtype),
        table: code(problem.table.dtype),
        out: code(out),
        pool: matches!(target, Target::Pool(_)),
        kv_bits: kv_bits[0],
        out_bits: out_bits[0],
        weight_bits: bits(&problem.weight, &[layers])[0],
        table_bits: bits(&problem.table, &[problem.table_rows])[0],
        kv_shifted_bits: kv_bits[1],
        out_shifted_bits: out_bits[1],
    };
    let path = dispatch.path.unwrap_or_else(|| facts.best_path());
    if let Some(reason) = facts.obstacle(path) {
        return Err(Error::Path {
            path: path.name(),
            reason,
        });
    }
    if tokens == 0 || layers == 0 {
        return Ok(Vec::new());
    }
    let threads = dispatch.threads;
    if threads.is_some_and(|threads| threads % 64 != 0 || !(64..=512).contains(&threads)) {
        return Err(Error::Path {
            path: path.name(),
            reason: "a block has a multiple of 64 threads, 64 to 512",
        });
    }
    let mut launch = facts.launch(path, tokens as u64 * layers as u64, threads);
    // Where the kernel has a choice.
    launch.layers_first = launch
        .layers_first
        .map(|order| dispatch.layers_first.unwrap_or(order));

    let flag = |on: bool, flag: u32| if on { flag } else { 0 };
    let mut params = Params {
        kv: problem.kv.address as u64,
        k_norm_weight: problem.weight.address as u64,
        eps: problem.eps.address as u64,
        cos_sin_cache: problem.table.address as u64,
        positions: problem.positions.address as u64,
        value_scale: problem.value_scale.map_or(0, |scale| scale.address as u64),
        status,
        kv_token: problem.kv.strides[0],
        kv_layer: problem.kv.strides[1],
        kv_value: (config.num_kv_heads * head_bytes) as i64,
        weight_layer: problem.weight.strides[0],
        table_row: problem.table.strides[0],
        table_rows: problem.table_rows as i64,
        position: problem.positions.strides[0],
        reserved_slot: -1,
        heads,
        head_dim: config.head_dim as u32,
        rotary_dim: config.rotary_dim as u32,
        kv_dtype: facts.kv as u32,
        weight_dtype: facts.weight as u32,
        table_dtype: facts.table as u32,
        out_dtype: facts.out as u32,
        flags: flag(facts.interleaved, flags::INTERLEAVED)
            | flag(
                config.norm_weight == NormWeight::Offset,
                flags::OFFSET_WEIGHT,
            )
            | flag(problem.positions.dtype == DType::I64, flags::POSITIONS_I64),
        ..Params::default()
    };
    match target {
        Target::Dense { k, v } => {
            (params.k_out, params.v_out) = (k.address as u64, v.address as u64);
            [params.k_outer, params.k_token, params.k_head] = k.strides;
            [params.v_outer, params.v_token, params.v_head] = v.strides;
        }
        Target::Pool(pool) => {
            [
                params.k_out,
                params.v_out,
                params.k_descale,
                params.v_descale,
            ] = pool.table_at(table);
            [params.k_outer, params.k_token, params.k_head] =
                [pool.k.page, pool.k.token, pool.k.head];
            [params.v_outer, params.v_token, params.v_head] =
                [pool.v.page, pool.v.token, pool.v.head];
            params.slots = pool.slots.address as u64;
            params.slot = pool.slots.strides[0];
            params.flags |= flag(pool.slots.dtype == DType::I64, flags::SLOTS_I64);
            params.num_slots = pool.num_slots as i64;
            params.reserved_slot = pool.reserved_slot;
            if pool.page_size.is_power_of_two() {
                // (A pool without pages may name pages of 2^63.)
                params.page_shift = pool.page_size.trailing_zeros().min(62);
            } else {
                // Validation bounds such page sizes.
                params.page_shift = u32::MAX;
                params.page_divisor = FastDivisor::new(pool.page_size as u32);
            }
        }
    }
    launch.apply(&mut params);
    params.early_blocks = dispatch.early_blocks.unwrap_or(params.early_blocks);

    let token_step = dispatch
        .tokens_per_launch
        .unwrap_or(u32::MAX)
        .clamp(1, launch.max_tokens);
    let layer_step = dispatch
        .layers_per_launch
        .unwrap_or(u32::MAX)
        .clamp(1, MAX_LAYERS);
    let mut calls = Vec::new();
    for first_layer in (0..layers).step_by(layer_step as usize) {
        for first_token in (0..tokens).step_by(token_step as usize) {
            let call_tokens = (tokens - first_token).min(token_step as usize) as u32;
            let call_layers = (layers - first_layer).min(layer_step as usize) as u32;
            let mut params = params;
            let grid = launch.grid(&mut params, call_tokens, call_layers);
            params.first_token = first_token as u32;
            // Every layer sees the same tokens: one launch of each group of tokens reports.
            params.flags |= flag(first_layer == 0, flags::REPORT);
            let (token, layer) = (first_token as i64, first_layer as i64);
            let advance = |address: &mut u64, steps: &[(i64, i64)]| {
                for (index, stride) in steps {
                    *address = address.wrapping_add(index.wrapping_mul(*stride) as u64);
                }
            };
            advance(
                &mut params.kv,
                &[(token, params.kv_token), (layer, params.kv_layer)],
            );
            advance(&mut params.positions, &[(token, params.position)]);
            advance(&mut params.k_norm_weight, &[(layer, params.weight_layer)]);
            advance(&mut params.eps, &[(layer, 4)]);
            if params.value_scale != 0 {
                advance(&mut params.value_scale, &[(layer, 4)]);
            }
            if facts.pool {
                advance(&mut params.k_out, &[(layer, 8)]);
                advance(&mut params.v_out, &[(layer, 8)]);
                advance(&mut params.slots, &[(token, params.slot)]);
                if params.k_descale != 0 {
                    advance(&mut params.k_descale, &[(layer, 16)]);
                    advance(&mut params.v_descale, &[(layer, 16)]);
                }
            } else {
                advance(
                    &mut params.k_out,
                    &[(layer, params.k_outer), (token, params.k_token)],
                );
                advance(
                    &mut params.v_out,
                    &[(layer, params.v_outer), (token, params.v_token)],
                );
            }
            calls.push(Call {
                entry: launch.entry,
                grid,
                threads: launch.threads,
                shared_bytes: dispatch.shared_bytes.unwrap_or(0),
                params,
            });
        }
    }
    Ok(calls)
}
