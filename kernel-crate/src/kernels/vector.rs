//! 16 bytes at a time: `2^lane_shift` lanes share a row, one chunk of 8 elements a lane.
//!
//! One half of a block takes K, the other half V of the same rows: a thread moves 16 bytes, which
//! keeps the addresses in flight close together (memory is fastest so), and few registers, which
//! keeps all threads resident. In the neox style a lane gets the elements that its own are rotated
//! with by shuffles; in the interleaved style a rotation never leaves a chunk.

use super::{BF16, F16, F32, at, load_f32, narrow, narrow_8, size, token, widen};
use crate::abi::{Params, flags};
use crate::arith;
use crate::gpu::Device;

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
    unsafe fn load(d: impl Device, when: bool, address: u64, dtype: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let a = d.load_128(when, address);
            let b = if dtype == F32 {
                d.load_128(when, address + 16)
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
    unsafe fn load_half(d: impl Device, when: bool, address: u64, dtype: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            if dtype == F32 {
                let a = d.load_128(when, address);
                Self([a[0], a[1], a[2], a[3], 0, 0, 0, 0])
            } else {
                let a = d.load_64(when, address);
                Self([a[0], a[1], 0, 0, 0, 0, 0, 0])
            }
        }
    }

    /// The same elements with the other sign.
    #[inline(always)]
    fn negated(self, dtype: u32) -> Self {
        let signs = if dtype == F32 {
            0x8000_0000
        } else {
            0x8000_8000
        };
        Self(self.0.map(|word| word ^ signs))
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
unsafe fn store(d: impl Device, when: bool, address: u64, y: [f32; 8], dtype: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            F32 => {
                let w = y.map(f32::to_bits);
                d.store_128(when, address, [w[0], w[1], w[2], w[3]]);
                d.store_128(when, address + 16, [w[4], w[5], w[6], w[7]]);
            }
            BF16 | F16 => {
                let pair = |low, high| narrow(d, dtype, low, high);
                let words = [
                    pair(y[0], y[1]),
                    pair(y[2], y[3]),
                    pair(y[4], y[5]),
                    pair(y[6], y[7]),
                ];
                d.store_128(when, address, words);
            }
            _ => {
                let pair = |low, high| narrow_8(d, dtype, low, high) as u32;
                let words = [
                    pair(y[0], y[1]) | pair(y[2], y[3]) << 16,
                    pair(y[4], y[5]) | pair(y[6], y[7]) << 16,
                ];
                d.store_64(when, address, words);
            }
        }
    }
}

/// One thread of the kernel.
///
/// # Safety
///
/// `p` describes live tensors that do not overlap, whose rows are aligned to 16 bytes and whose
/// D and R satisfy [`crate::launch`]'s conditions for this kernel; the grid is the one that
/// [`crate::launch`] gives.
#[inline(always)]
pub unsafe fn run<D: Device, S: Spec>(d: D, p: &Params) {
    let lane_shift = if S::D128 { 4 } else { p.lane_shift };
    let head_dim = if S::D128 { 128 } else { p.head_dim };

    let thread = d.thread();
    let half = d.block_threads() / 2;
    let moves_values = thread >= half;
    let member = if moves_values { thread - half } else { thread };
    let lane = member & ((1 << lane_shift) - 1);
    let layer = d.layer();
    let row = d.block() * (half >> lane_shift) + (member >> lane_shift);
    let active = row < p.rows;
    let (token_index, head) = p.row_divisor.div_rem(row);
    let source = at(at(p.kv, token_index, p.kv_token), layer, p.kv_layer)
        .wrapping_add((head * head_dim * size(S::KV)) as u64);
    let place = Place {
        lane,
        layer,
        head,
        token_index,
        active,
        source,
    };

    d.begin();
    // Whole warps do the one or the other: the block's halves are multiples of 32 threads.
    // SAFETY: this function's contract.
    unsafe {
        if moves_values {
            value::<D, S>(d, p, place);
        } else {
            key::<D, S>(d, p, place);
        }
    }
}

/// What a thread works on.
#[derive(Clone, Copy)]
struct Place {
    lane: u32,
    layer: u32,
    head: u32,
    token_index: u32,
    active: bool,
    /// The row of K in `kv`.
    source: u64,
}

/// Moves 16 bytes (32 of f32) of one row of V.
///
/// # Safety
///
/// As for [`run`].
#[inline(always)]
unsafe fn value<D: Device, S: Spec>(d: D, p: &Params, place: Place) {
    let Place {
        lane,
        layer,
        head,
        token_index,
        active,
        source,
    } = place;
    let head_dim = if S::D128 { 128 } else { p.head_dim };
    let lanes = 1 << if S::D128 { 4 } else { p.lane_shift };
    let out_dtype = if S::OUT == ANY { p.out_dtype } else { S::OUT };
    // Units of 16 bytes; a lane of f32 moves two, so that neighbouring lanes are neighbours in
    // memory, too.
    let elements = 16 / size(S::KV);
    let units = head_dim / elements;
    let unit = |index: u32| source.wrapping_add(p.kv_value as u64 + (index * 16) as u64);
    let moves = |index: u32| active && (S::D128 || index < units);
    // SAFETY: units of active rows exist (this function's contract).
    unsafe {
        let first = d.load_128(moves(lane), unit(lane));
        let second = if S::KV == F32 {
            d.load_128(moves(lane + lanes), unit(lane + lanes))
        } else {
            [0; 4]
        };
        let token = token(d, p, S::POOL, active, false, token_index, layer);
        let row = at(token.destination.v, head, p.v_head);
        let to = |index: u32| row.wrapping_add((index * elements * size(out_dtype)) as u64);
        let scaled = p.value_scale != 0;
        if !scaled && (!S::POOL || out_dtype == S::KV) {
            d.store_128(token.write && moves(lane), to(lane), first);
            if S::KV == F32 {
                d.store_128(token.write && moves(lane + lanes), to(lane + lanes), second);
            }
            return;
        }
        let scale = load_f32(d, scaled && active, p.value_scale, layer);
        let descaled = S::POOL && p.v_descale != 0;
        let descale = load_f32(d, descaled && active, p.v_descale, layer);
        let convert = |raw: [u32; 4], index: u32| {
            let words = Words([raw[0], raw[1], raw[2], raw[3], 0, 0, 0, 0]);
            let mut y = words.decode(d, S::KV);
            if scaled {
                y = y.map(|y| y * scale);
            }
            if descaled {
                y = y.map(|y| y / descale);
            }
            let when = token.write && moves(index);
            if S::KV == F32 {
                store_half(d, when, to(index), y, out_dtype);
            } else {
                store(d, when, to(index), y, out_dtype);
            }
        };
        convert(first, lane);
        if S::KV == F32 {
            convert(second, lane + lanes);
        }
    }
}

/// Normalizes and rotates one chunk of one row of K.
///
/// # Safety
///
/// As for [`run`].
#[inline(always)]
unsafe fn key<D: Device, S: Spec>(d: D, p: &Params, place: Place) {
    let Place {
        lane,
        layer,
        head,
        token_index,
        active,
        source,
    } = place;
    let lanes = 1 << if S::D128 { 4 } else { p.lane_shift };
    let head_dim = if S::D128 { 128 } else { p.head_dim };
    let rotary_dim = if S::D128 { 128 } else { p.rotary_dim };
    let interleaved = !S::D128 && p.flags & flags::INTERLEAVED != 0;
    let weight_dtype = if S::AUX == ANY {
        p.weight_dtype
    } else {
        S::AUX
    };
    let table_dtype = if S::AUX == ANY { p.table_dtype } else { S::AUX };
    let out_dtype = if S::OUT == ANY { p.out_dtype } else { S::OUT };
    let holds = active && (S::D128 || lane * 8 < head_dim);
    let chunk = |base: u64, dtype: u32| base.wrapping_add((lane * 8 * size(dtype)) as u64);

    // SAFETY: chunks of active rows exist (this function's contract).
    unsafe {
        let raw = Words::load(d, holds, chunk(source, S::KV), S::KV);
        let speaker = lane == 0 && head == 0 && layer == 0 && p.flags & flags::REPORT != 0;
        let token = token(d, p, S::POOL, active, speaker, token_index, layer);
        let weight = at(p.k_norm_weight, layer, p.weight_layer);
        let w = Words::load(d, holds, chunk(weight, weight_dtype), weight_dtype);
        let eps = load_f32(d, active, p.eps, layer);

        // Angles: a chunk has four in the interleaved style. In the neox style the chunks of the
        // first and of the second half of R have the same eight.
        let rotates = token.write && (S::D128 || lane * 8 < rotary_dim);
        let half = if S::D128 { 8 } else { rotary_dim / 16 };
        let is_first = lane < half;
        let sines = token
            .table
            .wrapping_add((rotary_dim / 2 * size(table_dtype)) as u64);
        let (cos, mut sin);
        if interleaved {
            let offset = (lane * 4 * size(table_dtype)) as u64;
            cos = Words::load_half(d, rotates, token.table.wrapping_add(offset), table_dtype);
            sin = Words::load_half(d, rotates, sines.wrapping_add(offset), table_dtype);
        } else {
            let index = if is_first { lane } else { lane - half };
            let offset = (index * 8 * size(table_dtype)) as u64;
            cos = Words::load(d, rotates, token.table.wrapping_add(offset), table_dtype);
            sin = Words::load(d, rotates, sines.wrapping_add(offset), table_dtype);
        }

        let x = raw.decode(d, S::KV);
        // Lanes without a chunk have zeros: the padding of the tree.
        let mut sum = arith::chunk_sum(&x);
        let mut mask = lanes / 2;
        while mask > 0 {
            sum += d.shuffle_xor(sum, mask);
            mask /= 2;
        }
        let inv = arith::inverse_rms(sum, head_dim, eps, |x| d.sqrt(x));

        let offset = p.flags & flags::OFFSET_WEIGHT != 0;
        let w = w.decode(d, weight_dtype);
        let normal = |i: usize| arith::normalize(x[i], inv, arith::effective_weight(w[i], offset));
        let mut y = [
            normal(0),
            normal(1),
            normal(2),
            normal(3),
            normal(4),
            normal(5),
            normal(6),
            normal(7),
        ];
        if interleaved {
            if rotates {
                y = rotate_within(d, y, cos, sin, table_dtype);
            }
        } else {
            // first * cos - second * sin, second * cos + first * sin: both are own * cos +
            // other * sin once the sine of the first half is negated, which is exact.
            if is_first {
                sin = sin.negated(table_dtype);
            }
            let first_lane = d.thread() & 31 & !(lanes - 1);
            let partner = first_lane + if is_first { lane + half } else { lane - half } % lanes;
            let other = |i: usize| d.shuffle_from(y[i], partner);
            let other = [
                other(0),
                other(1),
                other(2),
                other(3),
                other(4),
                other(5),
                other(6),
                other(7),
            ];
            if S::D128 || rotates {
                let (cos, sin) = (cos.decode(d, table_dtype), sin.decode(d, table_dtype));
                let turn = |i: usize| y[i] * cos[i] + other[i] * sin[i];
                y = [
                    turn(0),
                    turn(1),
                    turn(2),
                    turn(3),
                    turn(4),
                    turn(5),
                    turn(6),
                    turn(7),
                ];
            }
        }
        if S::POOL && p.k_descale != 0 {
            let descale = load_f32(d, active, p.k_descale, layer);
            y = y.map(|y| y / descale);
        }
        let row = at(token.destination.k, head, p.k_head);
        store(d, token.write && holds, chunk(row, out_dtype), y, out_dtype);
    }
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
unsafe fn store_half(d: impl Device, when: bool, address: u64, y: [f32; 8], dtype: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            F32 => {
                let w = y.map(f32::to_bits);
                d.store_128(when, address, [w[0], w[1], w[2], w[3]]);
            }
            BF16 | F16 => {
                let words = [narrow(d, dtype, y[0], y[1]), narrow(d, dtype, y[2], y[3])];
                d.store_64(when, address, words);
            }
            _ => {
                let pair = |low, high| narrow_8(d, dtype, low, high) as u32;
                d.store_32(when, address, pair(y[0], y[1]) | pair(y[2], y[3]) << 16);
            }
        }
    }
}
