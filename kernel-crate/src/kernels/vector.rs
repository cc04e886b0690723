//! 16 bytes at a time: `2^lane_shift` lanes share a row, each holds two chunks of 8 elements.
//!
//! Lane j holds chunks a and b of K. Rotated lanes of the neox style hold the two chunks that are
//! rotated together, R/2 elements apart, so a rotation never leaves a lane; in the interleaved
//! style it never leaves a chunk. The other lanes hold two chunks `rest` apart. V is copied in
//! units of 16 bytes, lane after lane.

use super::{
    BF16, E4M3, E5M2, F16, F32, Place, at, is_early, layer_and_group, load_f32, load_reciprocal,
    narrow, narrow_8, pool_f32, report_skipped, size, widen,
};
use crate::abi::{Params, flags};
use crate::arith;
use crate::gpu::{Device, Policy};

/// Stands for "read it from the parameters" where a kernel is specialised for a dtype.
pub const ANY: u32 = u32::MAX;

/// What a kernel is specialised for.
pub trait Spec {
    /// Dtype of `kv`.
    const KV: u32;
    /// Dtype of weights and table, or [`ANY`].
    const AUX: u32;
    /// Dtype of the outputs, or [`ANY`].
    const OUT: u32;
    /// D = R = 128 in the neox style.
    const D128: bool;
    /// The outputs are a pool.
    const POOL: bool;
}

/// Eight elements as they were loaded: four words of a 16-bit type, eight of f32.
#[derive(Clone, Copy)]
struct Words([u32; 8]);

impl Words {
    /// # Safety
    ///
    /// As for [`Device::load_16`], for eight elements, aligned to 16 bytes.
    #[inline(always)]
    unsafe fn load(
        d: impl Device,
        when: bool,
        address: u64,
        dtype: u32,
        policy: Option<Policy>,
    ) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let a = d.load_128(when, address, policy);
            let b = if dtype == F32 {
                d.load_128(when, address + 16, policy)
            } else {
                [0; 4]
            };
            Self([a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]])
        }
    }

    /// # Safety
    ///
    /// As for [`Device::load_16`], for four elements, aligned to their size together.
    #[inline(always)]
    unsafe fn load_half(
        d: impl Device,
        when: bool,
        address: u64,
        dtype: u32,
        policy: Option<Policy>,
    ) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            if dtype == F32 {
                let a = d.load_128(when, address, policy);
                Self([a[0], a[1], a[2], a[3], 0, 0, 0, 0])
            } else {
                let a = d.load_64(when, address, policy);
                Self([a[0], a[1], 0, 0, 0, 0, 0, 0])
            }
        }
    }

    /// As [`Words::load`], of memory that is read once.
    ///
    /// # Safety
    ///
    /// As for [`Words::load`].
    #[inline(always)]
    unsafe fn load_once(d: impl Device, address: u64, dtype: u32, policy: Policy) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let a = d.load_128_once(address, policy);
            let b = if dtype == F32 {
                d.load_128_once(address + 16, policy)
            } else {
                [0; 4]
            };
            Self([a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]])
        }
    }

    #[inline(always)]
    fn decode(self, d: impl Device, dtype: u32) -> [f32; 8] {
        let w = self.0;
        if dtype == F32 {
            [
                f32::from_bits(w[0]),
                f32::from_bits(w[1]),
                f32::from_bits(w[2]),
                f32::from_bits(w[3]),
                f32::from_bits(w[4]),
                f32::from_bits(w[5]),
                f32::from_bits(w[6]),
                f32::from_bits(w[7]),
            ]
        } else {
            let low = |word: u32| widen(d, dtype, word as u16);
            let high = |word: u32| widen(d, dtype, (word >> 16) as u16);
            [
                low(w[0]),
                high(w[0]),
                low(w[1]),
                high(w[1]),
                low(w[2]),
                high(w[2]),
                low(w[3]),
                high(w[3]),
            ]
        }
    }
}

/// Stores eight elements.
///
/// # Safety
///
/// As for [`Device::store_8`], for eight elements, aligned to 16 bytes (8 for 8-bit types).
#[inline(always)]
unsafe fn store(d: impl Device, when: bool, address: u64, y: [f32; 8], dtype: u32, policy: Policy) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            F32 => {
                let w = y.map(f32::to_bits);
                d.store_128(when, address, [w[0], w[1], w[2], w[3]], policy);
                d.store_128(when, address + 16, [w[4], w[5], w[6], w[7]], policy);
            }
            BF16 | F16 => {
                let pair = |low, high| narrow(d, dtype, low, high);
                let words = [
                    pair(y[0], y[1]),
                    pair(y[2], y[3]),
                    pair(y[4], y[5]),
                    pair(y[6], y[7]),
                ];
                d.store_128(when, address, words, policy);
            }
            _ => {
                let pair = |low, high| narrow_8(d, dtype, low, high) as u32;
                let words = [
                    pair(y[0], y[1]) | pair(y[2], y[3]) << 16,
                    pair(y[4], y[5]) | pair(y[6], y[7]) << 16,
                ];
                d.store_64(when, address, words, policy);
            }
        }
    }
}

/// One thread of the kernel.
///
/// Loads stand together at the top, but for those that wait for the position and most of those of V
/// on its way into a pool. They are unconditional wherever some valid address can stand in for one
/// that does not exist: a predicate would cost registers to be cleared.
///
/// # Safety
///
/// `p` describes live tensors that do not overlap, whose rows are aligned to 16 bytes and whose
/// D and R satisfy [`crate::launch`]'s conditions for this kernel; the grid is the one that
/// [`crate::launch`] gives, with at least one row.
#[inline(always)]
pub unsafe fn run<D: Device, S: Spec>(d: D, p: &Params) {
    let lane_shift = if S::D128 { 3 } else { p.lane_shift };
    let head_dim = if S::D128 { 128 } else { p.head_dim };
    let rotary_dim = if S::D128 { 128 } else { p.rotary_dim };
    let rotated = if S::D128 { 8 } else { p.rotated };
    let rest = if S::D128 { 0 } else { p.rest };
    let interleaved = !S::D128 && p.flags & flags::INTERLEAVED != 0;
    let weight_dtype = if S::AUX == ANY {
        p.weight_dtype
    } else {
        S::AUX
    };
    let table_dtype = if S::AUX == ANY { p.table_dtype } else { S::AUX };
    let out_dtype = if S::OUT == ANY { p.out_dtype } else { S::OUT };
    // Specialised for a pool of 8-bit floats.
    let to_8_bits = S::OUT == E4M3 || S::OUT == E5M2;

    let lanes = 1u32 << lane_shift;
    let thread = d.thread();
    let lane = thread & (lanes - 1);
    // The choice costs the kernels for 8-bit pools up to 0.16 us: `launch` knows that they have none.
    let (layer, group) = layer_and_group(d, p, S::POOL && !to_8_bits);
    let wanted = group * (d.block_threads() >> lane_shift) + (thread >> lane_shift);
    let active = wanted < p.rows;
    // Threads past the end do the last row again, without storing it.
    let row = if active { wanted } else { p.rows - 1 };
    let (token_index, head) = p.row_divisor.div_rem(row);

    // The two chunks of this lane; chunk 0 stands in for one that does not exist.
    let chunks = head_dim / 8;
    let is_rotated = S::D128 || lane < rotated;
    let own_a = if is_rotated { lane } else { lane + rotated };
    let own_b = own_a + if is_rotated { rotated } else { rest };
    let has_a = S::D128 || (is_rotated || lane < rotated + rest) && own_a < chunks;
    let has_b = S::D128 || has_a && own_b < chunks;
    let a = if has_a { own_a } else { 0 };
    let b = if has_b { own_b } else { 0 };
    let chunk = |base: u64, chunk: u32, dtype| base.wrapping_add((chunk * 8 * size(dtype)) as u64);

    let source = at(at(p.kv, token_index, p.kv_token), layer, p.kv_layer)
        .wrapping_add((head * head_dim * size(S::KV)) as u64);
    let value = source.wrapping_add(p.kv_value as u64);
    // Units of 16 bytes of one row of V: neighbouring lanes take neighbouring ones.
    let elements = 16 / size(S::KV);
    let units = head_dim / elements;
    let moves = |index: u32| S::D128 || index < units;
    let unit = |step: u32| {
        let index = lane + step * lanes;
        if moves(index) { index } else { 0 }
    };
    // A lane for each line, of K and then of V, as far as the lanes go: one for rows of 8 elements.
    let lines = if S::D128 { 2 } else { p.row_lines };
    if is_early(d, p) && lane < 2 * lines {
        let (base, line) = if lane < lines {
            (source, lane)
        } else {
            (value, lane - lines)
        };
        // SAFETY: lines of a row (this function's contract).
        unsafe { d.prefetch(base.wrapping_add((line * 128) as u64)) };
    }
    // A small job leaves its lines in the cache; so does one into a pool (measured).
    let policy = d.policy(S::POOL || p.early_blocks > 0);
    let load_unit = |step: u32| {
        let address = value.wrapping_add((unit(step) * 16) as u64);
        // SAFETY: units below D * size / 16 of a row exist (this function's contract).
        unsafe { d.load_128_once(address, policy) }
    };

    d.begin();

    // SAFETY: rows below `p.rows` and chunks below D / 8 exist (this function's contract).
    unsafe {
        let raw_a = Words::load_once(d, chunk(source, a, S::KV), S::KV, policy);
        let raw_b = Words::load_once(d, chunk(source, b, S::KV), S::KV, policy);
        // Into a pool V (of f32, its first half) is asked for behind the other loads, but in the
        // kernels for 8-bit pools at D = R = 128: measured for bf16.
        let v_first = !S::POOL || to_8_bits;
        let mut v = [[0; 4]; 2];
        if v_first {
            v = [load_unit(0), load_unit(1)];
        }
        let v_more = if S::KV == F32 {
            [load_unit(2), load_unit(3)]
        } else {
            [[0; 4]; 2]
        };
        let place = Place::load(d, p, S::POOL, token_index, layer);
        let weight = at(p.k_norm_weight, layer, p.weight_layer);
        let w_a = Words::load(d, true, chunk(weight, a, weight_dtype), weight_dtype, None);
        let w_b = Words::load(d, true, chunk(weight, b, weight_dtype), weight_dtype, None);
        let eps = load_f32(d, true, p.eps, layer);
        // Only 8-bit pools have descales.
        let narrow = S::POOL && size(out_dtype) == 1;
        let k_descale = load_reciprocal(d, narrow, p.k_descale, layer);
        let v_descale = load_reciprocal(d, narrow, p.v_descale, layer);

        d.keep_order();
        if !v_first {
            v = [load_unit(0), load_unit(1)];
        }
        let token = place.resolve(p, S::POOL, token_index);

        // Angles: rotated neox lanes have eight for their pair of chunks, interleaved ones four
        // for each chunk.
        let known = token.write;
        let sines = token
            .table
            .wrapping_add((rotary_dim / 2 * size(table_dtype)) as u64);
        // Into a pool the table stays in the cache: measured. Into a workspace that is slower.
        let reused = S::POOL.then(|| d.policy_reused());
        let angle = |base: u64, index: u32| base.wrapping_add((index * size(table_dtype)) as u64);
        let turns_a = interleaved && a * 8 < rotary_dim;
        let turns_b = interleaved && b * 8 < rotary_dim;
        let (cos_a, sin_a, cos_b, sin_b);
        if interleaved {
            let four = |when, base, chunk: u32| {
                Words::load_half(
                    d,
                    known && when,
                    angle(base, chunk * 4),
                    table_dtype,
                    reused,
                )
            };
            cos_a = four(turns_a, token.table, a);
            sin_a = four(turns_a, sines, a);
            cos_b = four(turns_b, token.table, b);
            sin_b = four(turns_b, sines, b);
        } else {
            let turns = known && is_rotated;
            cos_a = Words::load(d, turns, angle(token.table, lane * 8), table_dtype, reused);
            sin_a = Words::load(d, turns, angle(sines, lane * 8), table_dtype, reused);
            (cos_b, sin_b) = (Words([0; 8]), Words([0; 8]));
        }

        if !token.write && active && lane == 0 && head == 0 && layer == 0 {
            report_skipped(d, p, S::POOL, token_index);
        }
        // The sum of squares: chunks in a lane, then the tree over the lanes. A chunk that does
        // not exist counts as the padding of the tree.
        let x_a = raw_a.decode(d, S::KV);
        let x_b = raw_b.decode(d, S::KV);
        let sum_a = if has_a { arith::chunk_sum(&x_a) } else { 0.0 };
        let sum_b = if has_b { arith::chunk_sum(&x_b) } else { 0.0 };
        let mut sum = if S::D128 || rotated == lanes || rotated == 0 && rest == lanes {
            // Every lane's two chunks are the two that the tree adds first.
            sum_a + sum_b
        } else {
            gather(d, [rotated, rest, chunks], lane, lanes, sum_a, sum_b)
        };
        let mut mask = lanes / 2;
        while mask > 0 {
            sum += d.shuffle_xor(sum, mask);
            mask /= 2;
        }
        let inv = arith::inverse_rms(sum, head_dim, eps, |x| d.sqrt(x));

        let offset = p.flags & flags::OFFSET_WEIGHT != 0;
        let normalize = |x: [f32; 8], w: Words| {
            let w = w.decode(d, weight_dtype);
            let one = |i: usize| arith::normalize(x[i], inv, arith::effective_weight(w[i], offset));
            [
                one(0),
                one(1),
                one(2),
                one(3),
                one(4),
                one(5),
                one(6),
                one(7),
            ]
        };
        let (mut y_a, mut y_b) = (normalize(x_a, w_a), normalize(x_b, w_b));
        if interleaved {
            if turns_a {
                y_a = rotate_within(d, y_a, cos_a, sin_a, table_dtype);
            }
            if turns_b {
                y_b = rotate_within(d, y_b, cos_b, sin_b, table_dtype);
            }
        } else if is_rotated {
            let (cos, sin) = (cos_a.decode(d, table_dtype), sin_a.decode(d, table_dtype));
            let one = |i: usize| arith::rotate(y_a[i], y_b[i], cos[i], sin[i]);
            let pairs = [
                one(0),
                one(1),
                one(2),
                one(3),
                one(4),
                one(5),
                one(6),
                one(7),
            ];
            (y_a, y_b) = (
                pairs.map(|(first, _)| first),
                pairs.map(|(_, second)| second),
            );
        }
        let fma = |a, b, c| d.fma(a, b, c);
        if narrow {
            (y_a, y_b) = (k_descale.quotients(y_a, fma), k_descale.quotients(y_b, fma));
        }
        if S::POOL && out_dtype == F32 {
            (y_a, y_b) = (y_a.map(pool_f32), y_b.map(pool_f32));
        }
        let write = active && token.write;
        let k_row = at(token.destination.k, head, p.k_head);
        store(
            d,
            write && has_a,
            chunk(k_row, a, out_dtype),
            y_a,
            out_dtype,
            policy,
        );
        store(
            d,
            write && has_b,
            chunk(k_row, b, out_dtype),
            y_b,
            out_dtype,
            policy,
        );

        let v_row = at(token.destination.v, head, p.v_head);
        let to = |step: u32| v_row.wrapping_add((unit(step) * elements * size(out_dtype)) as u64);
        let when = |step: u32| write && moves(lane + step * lanes);
        if p.value_scale == 0 && (!S::POOL || out_dtype == S::KV) {
            d.store_128(when(0), to(0), v[0], policy);
            d.store_128(when(1), to(1), v[1], policy);
            if S::KV == F32 {
                d.store_128(when(2), to(2), v_more[0], policy);
                d.store_128(when(3), to(3), v_more[1], policy);
            }
        } else {
            let scaled = p.value_scale != 0;
            let scale = load_f32(d, scaled, p.value_scale, layer);
            let convert = |raw: [u32; 4], step: u32| {
                let words = Words([raw[0], raw[1], raw[2], raw[3], 0, 0, 0, 0]);
                let mut y = words.decode(d, S::KV);
                if scaled {
                    y = y.map(|y| y * scale);
                }
                if narrow {
                    y = v_descale.quotients(y, fma);
                }
                if S::POOL && out_dtype == F32 {
                    y = y.map(pool_f32);
                }
                if S::KV == F32 {
                    store_half(d, when(step), to(step), y, out_dtype, policy);
                } else {
                    store(d, when(step), to(step), y, out_dtype, policy);
                }
            };
            convert(v[0], 0);
            convert(v[1], 1);
            if S::KV == F32 {
                convert(v_more[0], 2);
                convert(v_more[1], 3);
            }
        }
    }
}

/// The first step of the tree where the chunks lie otherwise: lane j fetches the sums of chunks j
/// and j + lanes from whoever holds them.
#[inline(always)]
fn gather(
    d: impl Device,
    [rotated, rest, chunks]: [u32; 3],
    lane: u32,
    lanes: u32,
    sum_a: f32,
    sum_b: f32,
) -> f32 {
    let first = d.thread() & 31 & !(lanes - 1);
    let fetch = |chunk: u32| {
        let (holder, is_b) = if chunk < rotated {
            (chunk, false)
        } else if chunk < 2 * rotated {
            (chunk - rotated, true)
        } else if chunk < 2 * rotated + rest {
            (chunk - rotated, false)
        } else {
            (chunk - rotated - rest, true)
        };
        let holder = first + (holder & (lanes - 1));
        let from_a = d.shuffle_from(sum_a, holder);
        let from_b = d.shuffle_from(sum_b, holder);
        match (chunk < chunks, is_b) {
            (false, _) => 0.0,
            (true, false) => from_a,
            (true, true) => from_b,
        }
    };
    fetch(lane) + fetch(lane + lanes)
}

/// Rotates the four pairs of one chunk in the interleaved style.
#[inline(always)]
fn rotate_within(d: impl Device, y: [f32; 8], cos: Words, sin: Words, dtype: u32) -> [f32; 8] {
    let (cos, sin) = (cos.decode(d, dtype), sin.decode(d, dtype));
    let one = |i: usize| arith::rotate(y[2 * i], y[2 * i + 1], cos[i], sin[i]);
    let (p0, p1, p2, p3) = (one(0), one(1), one(2), one(3));
    [p0.0, p0.1, p1.0, p1.1, p2.0, p2.1, p3.0, p3.1]
}

/// Stores the first four of eight elements.
///
/// # Safety
///
/// As for [`Device::store_8`], for four elements, aligned to their size together.
#[inline(always)]
unsafe fn store_half(
    d: impl Device,
    when: bool,
    address: u64,
    y: [f32; 8],
    dtype: u32,
    policy: Policy,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            F32 => {
                let w = y.map(f32::to_bits);
                d.store_128(when, address, [w[0], w[1], w[2], w[3]], policy);
            }
            BF16 | F16 => {
                let words = [narrow(d, dtype, y[0], y[1]), narrow(d, dtype, y[2], y[3])];
                d.store_64(when, address, words, policy);
            }
            _ => {
                let pair = |low, high| narrow_8(d, dtype, low, high) as u32;
                let words = pair(y[0], y[1]) | pair(y[2], y[3]) << 16;
                d.store_32(when, address, words, policy);
            }
        }
    }
}
