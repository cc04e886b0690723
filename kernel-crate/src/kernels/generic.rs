//! Every shape, stride and alignment: one warp takes a token, a layer and a batch of heads.
//!
//! First the lanes add squares in the order of the contract: `2^lane_shift` lanes share a head,
//! lane j takes chunks j, j + lanes, ... Then, head after head, lane j computes and stores `E`
//! elements at `j * E`, so that neighbouring lanes write neighbouring bytes whatever the
//! alignment. K and the element that it is rotated with are read again for that: they are in the
//! first-level cache.

use super::{F32, Place, at, load_f32, narrow, narrow_8, size, widen};
use crate::abi::{Params, flags};
use crate::arith;
use crate::gpu::Device;

/// Element `index` of a row, or 0.
///
/// # Safety
///
/// As for [`Device::load_16`], for that element.
#[inline(always)]
unsafe fn load(d: impl Device, when: bool, row: u64, index: u32, dtype: u32) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        if dtype == F32 {
            load_f32(d, when, row, index)
        } else {
            widen(
                d,
                dtype,
                d.load_16(when, row.wrapping_add(index as u64 * 2)),
            )
        }
    }
}

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
        4 => [y[0].to_bits(), y[1].to_bits()],
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
/// As for [`load_raw`], for the elements of that chunk.
#[inline(always)]
unsafe fn chunk_sum<const E: u32>(
    d: impl Device,
    when: bool,
    row: u64,
    chunk: u32,
    head_dim: u32,
    dtype: u32,
) -> f32 {
    let first = chunk * 8;
    let mut sum = 0.0;
    let mut i = 0;
    while i < 8 {
        // Elements past the end add +0.0, which changes no bit of a sum of squares.
        let inside = when && first + i < head_dim;
        // SAFETY: the caller's promise.
        let raw = unsafe { load_raw::<E>(d, inside, row, first + i, dtype) };
        let x = decode(d, raw[0], dtype);
        sum = if i == 0 { x * x } else { sum + x * x };
        if E == 2 {
            let x = decode(d, raw[1], dtype);
            sum += x * x;
        }
        i += E;
    }
    sum
}

/// One thread of the kernel; `E` elements (1 or 2) at a time.
///
/// # Safety
///
/// `p` describes live tensors that do not overlap, whose rows of K and V (sources and
/// destinations) are aligned to `E` elements; the grid is the one that
/// [`crate::launch`] gives, with at least one row.
#[inline(always)]
pub unsafe fn run<D: Device, const E: u32, const POOL: bool>(d: D, p: &Params) {
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
    let kv_dtype = p.kv_dtype;
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
        let token = place.resolve(d, p, POOL, token_index, speaks);
        let write = active && token.write;

        // Squares.
        let head = first_head + (warp_lane >> p.lane_shift);
        let lane = warp_lane & (lanes - 1);
        let sums = write && head < p.heads;
        let k_row = at(source, head, row_bytes);
        let sum_of = |step: u32| {
            // Up to 1024 elements are 128 chunks: four for each of 32 lanes.
            let chunk = lane + step * lanes;
            if chunk * 8 < head_dim {
                chunk_sum::<E>(d, sums, k_row, chunk, head_dim, kv_dtype)
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
        let eps = load_f32(d, active, p.eps, layer);
        let inv = arith::inverse_rms(sum, head_dim, eps, |x| d.sqrt(x));

        let scaled = p.value_scale != 0;
        let scale = load_f32(d, scaled && active, p.value_scale, layer);
        let k_descaled = POOL && p.k_descale != 0;
        let k_descale = load_f32(d, k_descaled && active, p.k_descale, layer);
        let v_descaled = POOL && p.v_descale != 0;
        let v_descale = load_f32(d, v_descaled && active, p.v_descale, layer);
        let copies = !scaled && !v_descaled && out_dtype == kv_dtype;

        let weight = at(p.k_norm_weight, layer, p.weight_layer);
        let sines = token
            .table
            .wrapping_add((half * size(p.table_dtype)) as u64);

        // Elements: `step` and `g` are the same for the whole warp, so its shuffles meet.
        let mut step = 0;
        while step < head_dim {
            let e = step + warp_lane * E;
            let inside = write && e < head_dim;
            let with_weight = |index: u32| {
                let w = load(d, inside, weight, index, p.weight_dtype);
                arith::effective_weight(w, offset)
            };
            // For each of the E elements: its weight, and the partner, partner's weight and angle
            // where it is rotated.
            let rotated = |i: u32| inside && e + i < rotary_dim;
            let second = |i: u32| {
                if interleaved {
                    (e + i) & 1 == 1
                } else {
                    e + i >= half
                }
            };
            let partner = |i: u32| match (interleaved, second(i)) {
                _ if !rotated(i) => e + i,
                (true, _) => (e + i) ^ 1,
                (false, true) => e + i - half,
                (false, false) => e + i + half,
            };
            let angle = |i: u32| match (interleaved, second(i)) {
                (true, _) => (e + i) / 2,
                (false, true) => e + i - half,
                (false, false) => e + i,
            };
            let cos = |i| load(d, rotated(i), token.table, angle(i), p.table_dtype);
            let sin = |i| load(d, rotated(i), sines, angle(i), p.table_dtype);
            let w = [
                with_weight(e),
                if E == 2 { with_weight(e + 1) } else { 0.0 },
            ];
            let (p0, p1) = (partner(0), partner(1));
            let w_partner = [with_weight(p0), if E == 2 { with_weight(p1) } else { 0.0 }];
            let cos = [cos(0), if E == 2 { cos(1) } else { 0.0 }];
            let sin = [sin(0), if E == 2 { sin(1) } else { 0.0 }];

            let mut g = 0;
            while g < per_batch {
                let inv = d.shuffle_from(inv, g << p.lane_shift);
                let head = first_head + g;
                let when = inside && head < p.heads;
                let k_row = at(source, head, row_bytes);
                let v_row = k_row.wrapping_add(p.kv_value as u64);
                let raw = load_raw::<E>(d, when, k_row, e, kv_dtype);
                let v = load_raw::<E>(d, when, v_row, e, kv_dtype);
                let other = [
                    load(d, when, k_row, p0, kv_dtype),
                    if E == 2 {
                        load(d, when, k_row, p1, kv_dtype)
                    } else {
                        0.0
                    },
                ];
                let element = |i: usize| {
                    let x = decode(d, raw[i], kv_dtype);
                    let own = arith::normalize(x, inv, w[i]);
                    let other = arith::normalize(other[i], inv, w_partner[i]);
                    let (as_first, _) = arith::rotate(own, other, cos[i], sin[i]);
                    let (_, as_second) = arith::rotate(other, own, cos[i], sin[i]);
                    let turned = if second(i as u32) {
                        as_second
                    } else {
                        as_first
                    };
                    let y = if rotated(i as u32) { turned } else { own };
                    if k_descaled { y / k_descale } else { y }
                };
                let k = [element(0), if E == 2 { element(1) } else { 0.0 }];
                let to = |base: u64, stride: i64| {
                    at(base, head, stride).wrapping_add((e * size(out_dtype)) as u64)
                };
                let k_to = to(token.destination.k, p.k_head);
                store_raw::<E>(d, when, k_to, encode(d, k, out_dtype), out_dtype);

                let v = if copies {
                    v
                } else {
                    let element = |i: usize| {
                        let mut y = decode(d, v[i], kv_dtype);
                        if scaled {
                            y *= scale;
                        }
                        if v_descaled { y / v_descale } else { y }
                    };
                    let y = [element(0), if E == 2 { element(1) } else { 0.0 }];
                    encode(d, y, out_dtype)
                };
                let v_to = to(token.destination.v, p.v_head);
                store_raw::<E>(d, when, v_to, v, out_dtype);
                g += 1;
            }
            step += 32 * E;
        }
    }
}
