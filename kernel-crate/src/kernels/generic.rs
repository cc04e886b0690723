//! Every shape, stride and alignment: one warp takes a token, a layer and a batch of heads.
//!
//! First the lanes add squares in the order of the contract: `2^lane_shift` lanes share a head,
//! lane j takes chunks j, j + lanes, ... Then, head after head, lane j computes and stores `E`
//! elements at `j * E`, so that neighbouring lanes write neighbouring bytes whatever the
//! alignment. Where every row starts one element behind a pair (`SHIFT` 1), the pairs in memory are
//! elements 1 and 2, 3 and 4, ...: lane j takes those at `2 * j + 1`, and the lane of element D - 1,
//! which has no neighbour, takes element 0 with it, both as singles. K and the element that it is rotated with are read again for that: they are in the
//! first-level cache.

use super::vector::ANY;
use super::{F32, Place, at, load_f32, narrow, narrow_8, size, widen};
use crate::abi::{Params, flags};
use crate::arith;
use crate::convert;
use crate::gpu::Device;

/// `E` (1 or 2) elements at `index`, as stored: `[first, second]`, raw.
///
/// # Safety
///
/// As for [`Device::load_16`], for those elements, aligned to their size together.
#[inline(always)]
unsafe fn load_raw<const E: u32>(
    d: impl Device,
    when: bool,
    row: u64,
    index: u32,
    dtype: u32,
) -> [u32; 2] {
    let address = row.wrapping_add((index * size(dtype)) as u64);
    // SAFETY: the caller's promise.
    unsafe {
        match (E, dtype == F32) {
            (1, true) => [d.load_32(when, address), 0],
            (1, false) => [d.load_16(when, address) as u32, 0],
            (_, true) => d.load_64(when, address),
            (_, false) => {
                let pair = d.load_32(when, address);
                [pair & 0xffff, pair >> 16]
            }
        }
    }
}

/// Stores what [`load_raw`] loaded.
///
/// # Safety
///
/// As for [`Device::store_8`], for those elements, aligned to their size together.
#[inline(always)]
unsafe fn store_raw<const E: u32>(
    d: impl Device,
    when: bool,
    address: u64,
    raw: [u32; 2],
    dtype: u32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match (E, size(dtype)) {
            (1, 4) => d.store_32(when, address, raw[0]),
            (1, 2) => d.store_16(when, address, raw[0] as u16),
            (1, _) => d.store_8(when, address, raw[0] as u8),
            (_, 4) => d.store_64(when, address, raw),
            (_, 2) => d.store_32(when, address, raw[0] | raw[1] << 16),
            (_, _) => d.store_16(when, address, (raw[0] | raw[1] << 8) as u16),
        }
    }
}

/// The elements of a lane, raw: `E` of them at `at[0]`, or, where they are `apart`, singles at
/// `at[0]` and `at[1]`.
///
/// # Safety
///
/// As for [`load_raw`].
#[inline(always)]
unsafe fn load_slot<const E: u32, const SHIFT: u32>(
    d: impl Device,
    when: bool,
    apart: bool,
    at: [u64; 2],
    dtype: u32,
) -> [u32; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        if SHIFT == 0 {
            return load_raw::<E>(d, when, at[0], 0, dtype);
        }
        let pair = load_raw::<2>(d, when && !apart, at[0], 0, dtype);
        let single = |i: usize| load_raw::<1>(d, when && apart, at[i], 0, dtype)[0];
        // What is not loaded is zero.
        [pair[0] | single(0), pair[1] | single(1)]
    }
}

/// Stores what [`load_slot`] loaded.
///
/// # Safety
///
/// As for [`store_raw`].
#[inline(always)]
unsafe fn store_slot<const E: u32, const SHIFT: u32>(
    d: impl Device,
    when: bool,
    apart: bool,
    at: [u64; 2],
    raw: [u32; 2],
    dtype: u32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if SHIFT == 0 {
            return store_raw::<E>(d, when, at[0], raw, dtype);
        }
        store_raw::<2>(d, when && !apart, at[0], raw, dtype);
        store_raw::<1>(d, when && apart, at[0], [raw[0], 0], dtype);
        store_raw::<1>(d, when && apart, at[1], [raw[1], 0], dtype);
    }
}

#[inline(always)]
fn decode(d: impl Device, raw: u32, dtype: u32) -> f32 {
    if dtype == F32 {
        f32::from_bits(raw)
    } else {
        widen(d, dtype, raw as u16)
    }
}

/// Two f32 rounded to `dtype`, as [`store_raw`] takes them.
#[inline(always)]
fn encode(d: impl Device, y: [f32; 2], dtype: u32) -> [u32; 2] {
    match size(dtype) {
        // Pools may take widened NaNs, which keep their payload.
        4 => y.map(convert::f32_from_f32),
        2 => {
            let pair = narrow(d, dtype, y[0], y[1]);
            [pair & 0xffff, pair >> 16]
        }
        _ => {
            let pair = narrow_8(d, dtype, y[0], y[1]) as u32;
            [pair & 0xff, pair >> 8]
        }
    }
}

/// Sum of squares of chunk `chunk` of a row of `head_dim` elements; 0 past the end.
///
/// # Safety
///
/// As for [`load_raw`], for the elements of that chunk, and for one element behind the row (behind
/// rows of K there are those of V).
#[inline(always)]
unsafe fn chunk_sum<const E: u32, const SHIFT: u32>(
    d: impl Device,
    when: bool,
    row: u64,
    chunk: u32,
    head_dim: u32,
    dtype: u32,
) -> f32 {
    // All loads before the first use. Elements past the end are zeros: adding +0.0 changes no bit
    // of a sum of squares.
    let raw = |i: u32| {
        let index = chunk * 8 + i;
        // SAFETY: the caller's promise.
        unsafe { load_raw::<E>(d, when && index < head_dim, row, index, dtype) }
    };
    let x = |raw: u32| decode(d, raw, dtype);
    if SHIFT == 1 {
        let single = |i: u32| {
            let index = chunk * 8 + i;
            // SAFETY: the caller's promise.
            unsafe { load_raw::<1>(d, when && index < head_dim, row, index, dtype)[0] }
        };
        let (first, a, b, c, last) = (single(0), raw(1), raw(3), raw(5), single(7));
        // The row may end between the two of a pair.
        let second = |pair: [u32; 2], i: u32| {
            if chunk * 8 + i < head_dim { pair[1] } else { 0 }
        };
        let (a1, b1, c1) = (second(a, 2), second(b, 4), second(c, 6));
        arith::chunk_sum(&[first, a[0], a1, b[0], b1, c[0], c1, last].map(x))
    } else if E == 2 {
        let (a, b, c, e) = (raw(0), raw(2), raw(4), raw(6));
        let all = [a[0], a[1], b[0], b[1], c[0], c[1], e[0], e[1]];
        arith::chunk_sum(&all.map(x))
    } else {
        let all = [
            raw(0),
            raw(1),
            raw(2),
            raw(3),
            raw(4),
            raw(5),
            raw(6),
            raw(7),
        ];
        arith::chunk_sum(&all.map(|raw| x(raw[0])))
    }
}

/// Two values for each of the `E` elements of a lane, for example own and partner's weight.
type Both = [[f32; 2]; 2];

/// Elements `own[i]` and `other[i]` of an array for i < `E`, where `when[i]` holds, else 0.
///
/// # Safety
///
/// As for [`Device::load_16`], for those elements.
#[inline(always)]
unsafe fn load_both<const E: u32>(
    d: impl Device,
    when: [bool; 2],
    arrays: [u64; 2],
    own: [u32; 2],
    other: [u32; 2],
    dtype: u32,
) -> Both {
    // One branch for all loads: they are in flight together.
    // SAFETY: the caller's promise.
    unsafe {
        if dtype == F32 {
            let one = |i: usize| {
                [
                    load_f32(d, when[i], arrays[0], own[i]),
                    load_f32(d, when[i], arrays[1], other[i]),
                ]
            };
            [one(0), if E == 2 { one(1) } else { [0.0; 2] }]
        } else {
            let raw = |i: usize| {
                let at = |array: u64, index: u32| array.wrapping_add(index as u64 * 2);
                [
                    d.load_16(when[i], at(arrays[0], own[i])),
                    d.load_16(when[i], at(arrays[1], other[i])),
                ]
            };
            let raws = [raw(0), if E == 2 { raw(1) } else { [0; 2] }];
            raws.map(|raw| raw.map(|bits| widen(d, dtype, bits)))
        }
    }
}

/// Heads that a lane has in flight together.
const HEADS: usize = 4;

/// One thread of the kernel; `E` elements (1 or 2) at a time, pairs from element `SHIFT` (0 or 1)
/// on, `kv` of dtype `KV` ([`ANY`] to read it from the parameters).
///
/// # Safety
///
/// `p` describes live tensors that do not overlap, whose rows of K and V (sources and
/// destinations) are aligned to `E` elements, or, with `SHIFT` 1, start one element behind a pair;
/// the grid is the one that [`crate::launch`] gives,
/// with at least one row.
#[inline(always)]
pub unsafe fn run<D: Device, const E: u32, const SHIFT: u32, const KV: u32, const POOL: bool>(
    d: D,
    p: &Params,
) {
    let thread = d.thread();
    let warp_lane = thread & 31;
    let layer = d.layer();
    let lanes = 1u32 << p.lane_shift;
    let per_batch = 32 >> p.lane_shift;
    let row = d.block() * (d.block_threads() >> 5) + (thread >> 5);
    let active = row < p.rows;
    // Warps past the end look at the last row, without storing anything.
    let row = if active { row } else { p.rows - 1 };
    let (token_index, batch) = p.row_divisor.div_rem(row);
    let first_head = batch * per_batch;
    let kv_dtype = if KV == ANY { p.kv_dtype } else { KV };
    let kv_size = size(kv_dtype);
    let out_dtype = if POOL { p.out_dtype } else { kv_dtype };
    let (head_dim, rotary_dim) = (p.head_dim, p.rotary_dim);
    let half = rotary_dim / 2;
    let interleaved = p.flags & flags::INTERLEAVED != 0;
    let offset = p.flags & flags::OFFSET_WEIGHT != 0;

    d.begin();

    let source = at(at(p.kv, token_index, p.kv_token), layer, p.kv_layer);
    let row_bytes = (head_dim * kv_size) as i64;

    // SAFETY: rows of active threads and heads below H exist (this function's contract).
    unsafe {
        let speaks = || active && warp_lane == 0 && batch == 0 && layer == 0;
        let place = Place::load(d, p, POOL, token_index, layer);

        // V is needed last: on its way into the second-level cache it does not wait for the sums.
        let heads = if p.heads - first_head < per_batch {
            p.heads - first_head
        } else {
            per_batch
        };
        let v_row = at(source, first_head, row_bytes).wrapping_add(p.kv_value as u64);
        let mut line = warp_lane * 128;
        while line < heads * head_dim * kv_size {
            d.prefetch(v_row.wrapping_add(line as u64));
            line += 32 * 128;
        }

        // Squares.
        let head = first_head + (warp_lane >> p.lane_shift);
        let lane = warp_lane & (lanes - 1);
        let eps = load_f32(d, true, p.eps, layer);
        let sums = active && head < p.heads;
        let k_row = at(source, head, row_bytes);
        let sum_of = |step: u32| {
            // Up to 1024 elements are 128 chunks: four for each of 32 lanes.
            let chunk = lane + step * lanes;
            if step * lanes * 8 < head_dim {
                chunk_sum::<E, SHIFT>(d, sums, k_row, chunk, head_dim, kv_dtype)
            } else {
                0.0
            }
        };
        let (s0, s1, s2, s3) = (sum_of(0), sum_of(1), sum_of(2), sum_of(3));
        // The first steps of the tree: with four chunks a lane, 2 * lanes apart before lanes.
        let mut sum = (s0 + s2) + (s1 + s3);
        let mut mask = lanes / 2;
        while mask > 0 {
            sum += d.shuffle_xor(sum, mask);
            mask /= 2;
        }
        let inv = arith::inverse_rms(sum, head_dim, eps, |x| d.sqrt(x));

        let token = place.resolve(d, p, POOL, token_index, speaks);
        let write = active && token.write;
        let scaled = p.value_scale != 0;
        let scale = load_f32(d, scaled, p.value_scale, layer);
        let k_descaled = POOL && p.k_descale != 0;
        let k_descale = load_f32(d, k_descaled, p.k_descale, layer);
        let v_descaled = POOL && p.v_descale != 0;
        let v_descale = load_f32(d, v_descaled, p.v_descale, layer);
        let copies = !scaled && !v_descaled && out_dtype == kv_dtype;

        let weight = at(p.k_norm_weight, layer, p.weight_layer);
        let sines = token
            .table
            .wrapping_add((half * size(p.table_dtype)) as u64);

        // Elements: `step` and `g` are the same for the whole warp, so its shuffles meet.
        let mut step = 0;
        while step < head_dim {
            let e = step + warp_lane * E + SHIFT;
            let inside = write && e < head_dim;
            let apart = SHIFT == 1 && e + 1 == head_dim;
            let own = [e, if apart { 0 } else { e + E - 1 }];
            // For each of the E elements: whether it is rotated, as which half of its pair, with
            // which other element and by which angle.
            let element = |e: u32| {
                let rotated = inside && e < rotary_dim;
                let second = if interleaved { e & 1 == 1 } else { e >= half };
                let partner = match (interleaved, second) {
                    _ if !rotated => e,
                    (true, _) => e ^ 1,
                    (false, true) => e - half,
                    (false, false) => e + half,
                };
                let angle = match (interleaved, second) {
                    (true, _) => e / 2,
                    (false, true) => e.wrapping_sub(half),
                    (false, false) => e,
                };
                (rotated, second, partner, angle)
            };
            let (first, last) = (element(own[0]), element(own[1]));
            let rotated = [first.0, last.0];
            let second = [first.1, last.1];
            let partner = [first.2, last.2];
            let angle = [first.3, last.3];
            let weights = load_both::<E>(d, [inside; 2], [weight; 2], own, partner, p.weight_dtype);
            let w = weights.map(|both| both.map(|w| arith::effective_weight(w, offset)));
            let angles = load_both::<E>(
                d,
                rotated,
                [token.table, sines],
                angle,
                angle,
                p.table_dtype,
            );

            // Both halves of a pair are own * cos + other * sin once the sine of the first half is
            // negated, which is exact.
            let sign = |i: usize| {
                let [cos, sin] = angles[i];
                [cos, if second[i] { sin } else { -sin }]
            };
            let angles = [sign(0), sign(1)];
            let in_row = |index: u32, dtype: u32| (index * size(dtype)) as u64;
            let own_offset = own.map(|own| in_row(own, kv_dtype));
            let partner_offset = partner.map(|partner| in_row(partner, kv_dtype));
            let out_offset = own.map(|own| in_row(own, out_dtype));

            let mut g = 0;
            while g < per_batch {
                let first = first_head + g;
                let exists = |j: usize| {
                    let j = j as u32;
                    inside && g + j < per_batch && first + j < p.heads
                };
                // Rows by constant multiples of uniform strides from the first.
                let step_to = |base: u64, j: usize, stride: i64| {
                    base.wrapping_add((j as i64).wrapping_mul(stride) as u64)
                };
                let k_from = at(source, first, row_bytes);
                let k_own = own_offset.map(|offset| k_from.wrapping_add(offset));
                let k_other = partner_offset.map(|offset| k_from.wrapping_add(offset));
                let v_own = k_own.map(|own| own.wrapping_add(p.kv_value as u64));
                let at_head = |j: usize| {
                    let when = exists(j);
                    let from = |base: u64| step_to(base, j, row_bytes);
                    let one = |i: usize| load_raw::<1>(d, when, from(k_other[i]), 0, kv_dtype)[0];
                    (
                        load_slot::<E, SHIFT>(d, when, apart, k_own.map(from), kv_dtype),
                        [one(0), if E == 2 { one(1) } else { 0 }],
                        load_slot::<E, SHIFT>(d, when, apart, v_own.map(from), kv_dtype),
                    )
                };
                let loaded: [_; HEADS] = [at_head(0), at_head(1), at_head(2), at_head(3)];
                let inv_of = |j: u32| d.shuffle_from(inv, ((g + j) << p.lane_shift) & 31);
                let invs: [_; HEADS] = [inv_of(0), inv_of(1), inv_of(2), inv_of(3)];
                let to = |base: u64, stride: i64| {
                    let row = at(base, first, stride);
                    out_offset.map(|offset| row.wrapping_add(offset))
                };
                let k_to = to(token.destination.k, p.k_head);
                let v_to = to(token.destination.v, p.v_head);
                let finish = |j: usize| {
                    let (raw, other, v) = loaded[j];
                    let (inv, when) = (invs[j], exists(j));
                    let turn = |i: usize| {
                        let x = decode(d, raw[i], kv_dtype);
                        let own = arith::normalize(x, inv, w[i][0]);
                        let other = decode(d, other[i], kv_dtype);
                        let other = arith::normalize(other, inv, w[i][1]);
                        let [cos, sin] = angles[i];
                        let y = if rotated[i] {
                            own * cos + other * sin
                        } else {
                            own
                        };
                        if k_descaled { y / k_descale } else { y }
                    };
                    let k = [turn(0), if E == 2 { turn(1) } else { 0.0 }];
                    let to = k_to.map(|to| step_to(to, j, p.k_head));
                    let k = encode(d, k, out_dtype);
                    store_slot::<E, SHIFT>(d, when, apart, to, k, out_dtype);

                    let v = if copies {
                        v
                    } else {
                        let convert = |i: usize| {
                            let mut y = decode(d, v[i], kv_dtype);
                            if scaled {
                                y *= scale;
                            }
                            if v_descaled { y / v_descale } else { y }
                        };
                        let y = [convert(0), if E == 2 { convert(1) } else { 0.0 }];
                        encode(d, y, out_dtype)
                    };
                    let to = v_to.map(|to| step_to(to, j, p.v_head));
                    store_slot::<E, SHIFT>(d, when, apart, to, v, out_dtype);
                };
                finish(0);
                finish(1);
                finish(2);
                finish(3);
                g += HEADS as u32;
            }
            step += 32 * E;
        }
    }
}
