//! The row algorithm over a block of tokens and layers.

use fused_kv_kernels::abi::Status;
use fused_kv_kernels::arith;

use super::element::{Angled, Kind, Level, divide, load_any};
use super::{ANGLES, MAX_TILE, Place, Task};
use crate::DType;
use crate::plan::NormWeight;
use crate::problem::{Operand, PoolStrides, Problem, Target};

/// Most elements that a head has.
const MAX_HEAD_DIM: usize = 1024;
/// Heads that are worked on together.
const MAX_GROUP: usize = 8;
/// Room for their elements.
const SCRATCH: usize = 4096;

/// The address `a * strides[0] + b * strides[1] ...` bytes after the operand's first element. Where
/// there is no such element (asked for by prefetches), some address.
#[inline(always)]
pub(super) fn at(operand: &Operand, indices: &[usize]) -> usize {
    let offset = indices
        .iter()
        .zip(operand.strides)
        .fold(0i64, |offset, (&index, stride)| {
            offset.wrapping_add((index as i64).wrapping_mul(stride))
        });
    operand.address.wrapping_add_signed(offset as isize)
}

/// An integer of type i64 or i32 at an address of any alignment.
///
/// # Safety
///
/// It is readable.
pub(super) unsafe fn read_index(dtype: DType, address: usize) -> i64 {
    // SAFETY: the caller's condition; the reads are unaligned ones.
    unsafe {
        if dtype == DType::I64 {
            (address as *const i64).read_unaligned()
        } else {
            i64::from((address as *const i32).read_unaligned())
        }
    }
}

/// # Safety
///
/// An f32 is readable at the address, which may have any alignment.
unsafe fn read_f32(address: usize) -> f32 {
    // SAFETY: the caller's condition; the read is an unaligned one.
    unsafe { (address as *const f32).read_unaligned() }
}

/// Counts a token in one half of a status record and keeps the lowest.
pub(super) fn note(count: &mut u64, high: &mut u64, low: &mut u64, token: usize, value: i64) {
    let (value_high, value_low) = Status::halves(token as u32, value);
    *count += 1;
    *high = value_high.min(*high);
    *low = value_low.min(*low);
}

/// Where the heads of one token and layer go.
#[derive(Clone, Copy)]
struct Destination {
    address: usize,
    /// Byte stride of a head.
    head: i64,
}

impl Destination {
    #[inline(always)]
    fn head(self, head: usize) -> *mut u8 {
        self.address
            .wrapping_add_signed((head as i64 * self.head) as isize) as *mut u8
    }
}

/// K and V of one token and layer; `place` is the token's in a pool.
#[inline(always)]
fn destinations(
    problem: &Problem,
    layer: usize,
    token: usize,
    place: Option<Place>,
) -> (Destination, Destination) {
    match &problem.target {
        Target::Dense { k, v } => {
            let dense = |operand: &Operand| Destination {
                address: at(operand, &[layer, token]),
                head: operand.strides[2],
            };
            (dense(k), dense(v))
        }
        Target::Pool(pool) => {
            let [k, v] = pool.bases(layer);
            let place = place.unwrap_or_default();
            let paged = |base: usize, offset: i64, strides: &PoolStrides| Destination {
                address: base.wrapping_add_signed(offset as isize),
                head: strides.head,
            };
            (paged(k, place.k, &pool.k), paged(v, place.v, &pool.v))
        }
    }
}

/// Computes the rows of a block; returns what the rows tell (from blocks with layer 0 only, so
/// that each token is counted once).
///
/// # Safety
///
/// The CPU has what `L` is compiled for; `In` and `Out` are the types of the problem's `kv` and
/// target, which is [`super::aligned`] if [`Task::stream`]; the memory that the problem names is
/// live, and nobody else accesses the rows that the block writes or writes what it reads.
#[inline(always)]
pub(super) unsafe fn rows<L: Level, In: Kind, Out: Kind>(task: &Task<'_>) -> Status {
    let problem = task.problem;
    let config = &problem.config;
    let (heads, head_dim, rotary_dim) = (config.num_kv_heads, config.head_dim, config.rotary_dim);
    let mut status = Status::CLEAR;

    // The table rows of the block's tokens, for all its layers; no row for a bad position.
    let mut angles = [0f32; ANGLES];
    let mut valid = [false; MAX_TILE];
    let rows = angles.chunks_exact_mut(rotary_dim).zip(&mut valid);
    for (token, (angles, valid)) in task.tokens.clone().zip(rows) {
        // The positions of tokens that have a place in a pool were found good then.
        if task.places.is_some_and(|places| !places[token].write) {
            continue;
        }
        // SAFETY: token < T, and positions has T elements.
        let position =
            unsafe { read_index(problem.positions.dtype, at(&problem.positions, &[token])) };
        match usize::try_from(position) {
            Ok(row) if row < problem.table_rows => {
                *valid = true;
                let row = at(&problem.table, &[row]) as *const u8;
                // SAFETY: the row is one of the table's, which is R wide.
                unsafe { load_any::<L>(problem.table.dtype, row, angles) };
            }
            _ if task.layers.start == 0 => note(
                &mut status.bad_positions,
                &mut status.position_high,
                &mut status.position_low,
                token,
                position,
            ),
            _ => {}
        }
    }

    let mut weight = [0f32; MAX_HEAD_DIM];
    let weight = &mut weight[..head_dim];
    // Some heads at a time, so that their square roots and divisions are done together.
    let mut scratch = [0f32; SCRATCH];
    let group = (SCRATCH / head_dim).min(MAX_GROUP);
    let head_bytes = head_dim * In::DTYPE.size();
    for layer in task.layers.clone() {
        // SAFETY: layer < L; a weight row has D elements, eps and value_scale have L.
        let (eps, scale) = unsafe {
            load_any::<L>(
                problem.weight.dtype,
                at(&problem.weight, &[layer]) as *const u8,
                weight,
            );
            let scalar = |operand: &Operand| read_f32(operand.address + layer * size_of::<f32>());
            (
                scalar(&problem.eps),
                problem.value_scale.as_ref().map(scalar),
            )
        };
        let descales = match &problem.target {
            Target::Dense { .. } => None,
            Target::Pool(pool) => pool.descales(layer),
        };
        let offset = config.norm_weight == NormWeight::Offset;
        for weight in weight.iter_mut() {
            *weight = arith::effective_weight(*weight, offset);
        }

        let rows = angles.chunks_exact(rotary_dim).zip(valid);
        for (token, (angles, valid)) in task.tokens.clone().zip(rows) {
            if !valid {
                continue;
            }
            let (cos, sin) = angles.split_at(rotary_dim / 2);
            let angled = Angled {
                weight,
                cos,
                sin,
                style: config.rope_style,
                descale: descales.map(|[k, _]| k),
            };
            let keys = at(&problem.kv, &[token, layer]) as *const u8;
            let place = task.places.map(|places| places[token]);
            let (k, v) = destinations(problem, layer, token, place);
            let next = match token + 1 {
                next if next < task.tokens.end => at(&problem.kv, &[next, layer]),
                _ => at(&problem.kv, &[task.tokens.start, layer + 1]),
            } as *const u8;
            for first in (0..heads).step_by(group) {
                let group = first..heads.min(first + group);
                let mut sums = [0f32; MAX_GROUP];
                for ((head, row), sum) in group
                    .clone()
                    .zip(scratch.chunks_exact_mut(head_dim))
                    .zip(&mut sums)
                {
                    L::prefetch(next.wrapping_add(head * head_bytes), head_bytes);
                    // SAFETY: a row of kv holds 2 * H * D elements.
                    *sum = unsafe {
                        In::load::<L>(keys.wrapping_add(head * head_bytes), row);
                        L::sum_of_squares(row)
                    };
                }
                let inv = sums.map(|sum| arith::inverse_rms(sum, head_dim as u32, eps, f32::sqrt));
                for ((head, row), inv) in group.zip(scratch.chunks_exact_mut(head_dim)).zip(inv) {
                    let next = next.wrapping_add((heads + head) * head_bytes);
                    L::prefetch(next, head_bytes);
                    // SAFETY: the destination has H heads of D elements.
                    unsafe { L::finish::<Out>(row, inv, &angled, k.head(head), task.stream) };
                }
            }
            let values = keys.wrapping_add(heads * head_bytes);
            // SAFETY: as above; V is the second half of the row.
            unsafe {
                let row = &mut scratch[..head_dim];
                let descale = descales.map(|[_, v]| v);
                value::<L, In, Out>(values, v, heads, [scale, descale], row, task.stream);
            }
        }
    }
    status
}

/// Copies, or scales and converts V of one token and layer. Only FP8 has a descale.
///
/// # Safety
///
/// `heads` rows of `row.len()` elements are readable at `values` and writable at `v`, where they
/// are aligned to vectors if `stream`; the CPU has what `L` is compiled for.
#[inline(always)]
unsafe fn value<L: Level, In: Kind, Out: Kind>(
    values: *const u8,
    v: Destination,
    heads: usize,
    [scale, descale]: [Option<f32>; 2],
    row: &mut [f32],
    stream: bool,
) {
    let head_bytes = row.len() * In::DTYPE.size();
    // SAFETY (of all blocks): the caller's condition; outputs never overlap inputs.
    match scale {
        None if In::DTYPE == Out::DTYPE && v.head == head_bytes as i64 => {
            // SAFETY: the heads follow each other on both sides.
            unsafe { L::copy(values, v.head(0), heads * head_bytes, stream) };
        }
        None if In::DTYPE == Out::DTYPE => {
            for head in 0..heads {
                let from = values.wrapping_add(head * head_bytes);
                // SAFETY: one head on both sides.
                unsafe { L::copy(from, v.head(head), head_bytes, stream) };
            }
        }
        _ => {
            for head in 0..heads {
                // SAFETY: one head on both sides.
                unsafe { In::load::<L>(values.wrapping_add(head * head_bytes), row) };
                if let Some(scale) = scale {
                    for x in row.iter_mut() {
                        *x *= scale;
                    }
                }
                if let Some(descale) = descale {
                    divide(row, descale);
                }
                // SAFETY: one head on both sides.
                unsafe { Out::store::<L>(row, v.head(head)) };
            }
        }
    }
}
