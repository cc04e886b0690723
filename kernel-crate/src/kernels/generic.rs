//! Every shape, stride and alignment: one warp takes a token, a layer and a batch of heads.
//!
//! First the lanes add squares in the order of the contract: `2^lane_shift` lanes share a head,
//! lane j takes chunks j, j + lanes, ... Then K is read again, from the first-level cache: head
//! after head, a lane takes elements that are rotated together, one couple of them or two, so that
//! neighbouring lanes read and write neighbouring bytes whatever the alignment; then the elements
//! that are not rotated. Last comes V, where possible as one run of bytes.
//!
//! `E` (1 or 2) elements are read and written at a time. Where every row starts one element behind
//! a pair (`SHIFT` 1), the pairs in memory are elements 1 and 2, 3 and 4, ...: the lane of the last
//! element, which has no neighbour, takes the first one with it, both as singles.

use super::vector::ANY;
use super::{
    F32, Place, at, is_early, layer_and_group, load_f32, load_reciprocal, narrow, narrow_8,
    report_skipped, size, widen,
};
use crate::abi::{Params, flags};
use crate::arith;
use crate::convert;
use crate::gpu::{Device, Policy};

use core::cmp::min;

/// `E` (1 or 2) elements at `address`, as stored: `[first, second]`, raw.
///
/// # Safety
///
/// As for [`Device::load_16`], for those elements, aligned to their size together.
#[inline(always)]
unsafe fn load_raw<const E: u32>(d: impl Device, when: bool, address: u64, dtype: u32) -> [u32; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        match (E, dtype == F32) {
            (1, true) => [d.load_32(when, address), 0],
            (1, false) => [d.load_16(when, address) as u32, 0],
            (_, true) => d.load_64(when, address, None),
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
    policy: Policy,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match (E, size(dtype)) {
            (1, 4) => d.store_32(when, address, raw[0], policy),
            (1, 2) => d.store_16(when, address, raw[0] as u16),
            (1, _) => d.store_8(when, address, raw[0] as u8),
            (_, 4) => d.store_64(when, address, raw, policy),
            (_, 2) => d.store_32(when, address, raw[0] | raw[1] << 16, policy),
            (_, _) => d.store_16(when, address, (raw[0] | raw[1] << 8) as u16),
        }
    }
}

/// The elements of a lane, raw: `E` of them at `at[0]`, or, where they are `apart`, singles at
/// `at[0]` and `at[1]`.
///
/// # Safety
///
/// As for [`load_raw`]; with `MORE`, for one element behind `at[0]` too where they are `apart`.
#[inline(always)]
unsafe fn load_slot<const E: u32, const SHIFT: u32, const MORE: bool>(
    d: impl Device,
    apart: bool,
    at: [u64; 2],
    dtype: u32,
) -> [u32; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        if SHIFT == 0 {
            return load_raw::<E>(d, true, at[0], dtype);
        }
        if MORE {
            // Another load by all lanes is less work than one by some and a choice.
            let [first, _] = load_raw::<2>(d, true, at[0], dtype);
            return [first, load_raw::<1>(d, true, at[1], dtype)[0]];
        }
        let pair = load_raw::<2>(d, !apart, at[0], dtype);
        let single = |i: usize| load_raw::<1>(d, apart, at[i], dtype)[0];
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
    policy: Policy,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if SHIFT == 0 {
            return store_raw::<E>(d, when, at[0], raw, dtype, policy);
        }
        store_raw::<2>(d, when && !apart, at[0], raw, dtype, policy);
        store_raw::<1>(d, when && apart, at[0], [raw[0], 0], dtype, policy);
        store_raw::<1>(d, when && apart, at[1], [raw[1], 0], dtype, policy);
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
        // Widened NaNs keep their payload, so the hardware's own canonical NaN is not enough.
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

/// The elements of chunk `chunk` of a row of `head_dim` elements, raw; zeros past the end, which
/// change no bit of a sum of squares, and where `when` is false.
///
/// # Safety
///
/// As for [`load_raw`], for the elements of that chunk, and with `SHIFT` 1 for one element behind
/// the row (behind rows of K there are those of V).
#[inline(always)]
unsafe fn load_chunk<const E: u32, const SHIFT: u32>(
    d: impl Device,
    when: bool,
    row: u64,
    chunk: u32,
    head_dim: u32,
    dtype: u32,
) -> [u32; 8] {
    let left = if when {
        head_dim.saturating_sub(chunk * 8)
    } else {
        0
    };
    let start = row.wrapping_add((chunk * 8 * size(dtype)) as u64);
    let address = |i: u32| start.wrapping_add((i * size(dtype)) as u64);
    // SAFETY: the caller's promise.
    let one = |i: u32| unsafe { load_raw::<1>(d, i < left, address(i), dtype)[0] };
    // SAFETY: the caller's promise.
    let two = |i: u32| unsafe { load_raw::<2>(d, i < left, address(i), dtype) };
    match (E, SHIFT) {
        (1, _) => [
            one(0),
            one(1),
            one(2),
            one(3),
            one(4),
            one(5),
            one(6),
            one(7),
        ],
        (_, 0) => {
            let (a, b, c, e) = (two(0), two(2), two(4), two(6));
            [a[0], a[1], b[0], b[1], c[0], c[1], e[0], e[1]]
        }
        _ => {
            let (first, a, b, c, last) = (one(0), two(1), two(3), two(5), one(7));
            // The row may end between the two of a pair.
            let second = |pair: [u32; 2], i: u32| if i < left { pair[1] } else { 0 };
            let (a1, b1, c1) = (second(a, 2), second(b, 4), second(c, 6));
            [first, a[0], a1, b[0], b1, c[0], c1, last]
        }
    }
}

/// Elements `index` of an array, 0 where `when` is false.
///
/// # Safety
///
/// As for [`Device::load_16`], for those elements.
#[inline(always)]
unsafe fn gather<const N: usize>(
    d: impl Device,
    when: bool,
    from: [(u64, u32); N],
    dtype: u32,
) -> [f32; N] {
    // One branch for all loads: they are in flight together.
    // SAFETY: the caller's promise.
    unsafe {
        if dtype == F32 {
            from.map(|(array, index)| load_f32(d, when, array, index))
        } else {
            let at = |array: u64, index: u32| array.wrapping_add(index as u64 * 2);
            from.map(|(array, index)| d.load_16(when, at(array, index)))
                .map(|bits| widen(d, dtype, bits))
        }
    }
}

/// A batch of heads of a token, K or V.
#[derive(Clone, Copy)]
struct Batch {
    heads: u32,
    /// Addresses of the first head's first element, and bytes from head to head.
    from: u64,
    from_step: u64,
    to: u64,
    to_step: u64,
    from_dtype: u32,
    to_dtype: u32,
    /// Whether results are stored.
    write: bool,
    /// Lane of the warp.
    lane: u32,
    /// `1 / rms` of head h is in lane `h << lane_shift`.
    inv: f32,
    lane_shift: u32,
    /// `k_norm_weight` of the layer.
    weight: u64,
    weight_dtype: u32,
    /// What is added to the weights for them to be in effect.
    offset: f32,
    /// What V is multiplied by.
    scale: Option<f32>,
    /// What rows of an 8-bit pool are divided by.
    descale: Option<arith::Reciprocal>,
    /// Of stores.
    policy: Policy,
}

impl Batch {
    /// `1 / rms` of head `head`.
    #[inline(always)]
    fn inv_of(&self, d: impl Device, head: u32) -> f32 {
        d.shuffle_from(self.inv, (head << self.lane_shift) & 31)
    }

    /// Effective weights of some elements.
    ///
    /// # Safety
    ///
    /// As for [`gather`].
    #[inline(always)]
    unsafe fn weights<const N: usize>(&self, d: impl Device, elements: [u32; N]) -> [f32; N] {
        // SAFETY: the caller's promise.
        let weights = unsafe {
            gather(
                d,
                true,
                elements.map(|element| (self.weight, element)),
                self.weight_dtype,
            )
        };
        // 1.0 or, which changes no bit, -0.0.
        weights.map(|w| self.offset + w)
    }

    /// V is stored as it is.
    #[inline(always)]
    fn copies(&self) -> bool {
        self.scale.is_none() && self.descale.is_none() && self.from_dtype == self.to_dtype
    }

    #[inline(always)]
    fn divide<const N: usize>(&self, d: impl Device, y: [f32; N]) -> [f32; N] {
        match self.descale {
            Some(descale) => descale.quotients(y, |a, b, c| d.fma(a, b, c)),
            None => y,
        }
    }

    /// Addresses of elements of the first head, source and destination.
    #[inline(always)]
    fn places<const N: usize>(&self, d: impl Device, elements: [u32; N]) -> Places<N> {
        let at = |base: u64, dtype: u32| {
            elements.map(|element| base.wrapping_add((element * size(dtype)) as u64))
        };
        Places {
            from: at(self.from, self.from_dtype),
            to: at(self.to, self.to_dtype),
        }
        .opaque(d)
    }

    /// The same elements `heads` heads further.
    #[inline(always)]
    fn step<const N: usize>(&self, places: Places<N>, heads: usize) -> Places<N> {
        let step = |base: u64, step: u64| base.wrapping_add(step.wrapping_mul(heads as u64));
        Places {
            from: places.from.map(|from| step(from, self.from_step)),
            to: places.to.map(|to| step(to, self.to_step)),
        }
    }
}

/// Addresses of some elements of a head.
#[derive(Clone, Copy)]
struct Places<const N: usize> {
    from: [u64; N],
    to: [u64; N],
}

impl<const N: usize> Places<N> {
    /// The same addresses: left to itself, the compiler keeps one of its own for every head, in
    /// twice as many registers.
    #[inline(always)]
    fn opaque(self, d: impl Device) -> Self {
        Self {
            from: self.from.map(|from| d.opaque(from)),
            to: self.to.map(|to| d.opaque(to)),
        }
    }
}

/// Heads whose loads are in flight together.
const HEADS: usize = 4;
/// The same where a lane holds two couples of each: more would take more than 64 registers.
const PAIR_HEADS: usize = 2;

/// Something of each of `H` heads: 1, [`PAIR_HEADS`] or [`HEADS`].
#[inline(always)]
fn each<const H: usize, T: Copy>(of: impl Fn(usize) -> T) -> [T; HEADS] {
    // Written out: a loop that is not unrolled would index memory.
    match H {
        1 => [of(0); HEADS],
        PAIR_HEADS => {
            let (a, b) = (of(0), of(1));
            [a, b, b, b]
        }
        _ => [of(0), of(1), of(2), of(3)],
    }
}

/// Where the angles of a token are.
#[derive(Clone, Copy)]
struct Table {
    cosines: u64,
    sines: u64,
    dtype: u32,
    rotary_dim: u32,
    interleaved: bool,
}

/// The couples of a lane: elements that are rotated together.
#[derive(Clone, Copy)]
struct Couples {
    /// They are stored.
    inside: bool,
    /// The second two elements do not follow each other.
    apart: bool,
    /// Weights of the elements: two at one place, two at the other.
    w: [f32; 4],
    cos: [f32; 2],
    /// Negated where the couple's second element comes first.
    sin: [f32; 2],
}

/// Normalizes, rotates and stores the rotated elements of all heads: `E` couples a lane.
///
/// With two couples a lane they are pairs of elements R/2 apart, in either style: the styles differ in what is rotated with what. That needs a half of whole pairs; `MIXED` says that
/// the couples are those within the two pairs.
///
/// # Safety
///
/// The batch, of K, and the table describe live tensors, with an element behind every row of K
/// (behind the last one there is V); every lane of the warp gets here.
#[inline(always)]
unsafe fn rotate<const E: u32, const SHIFT: u32, const MIXED: bool>(
    d: impl Device,
    batch: Batch,
    table: Table,
) {
    let half = table.rotary_dim / 2;
    let count = half / E;
    let mut first = 0;
    while first < count {
        let lane = first + batch.lane;
        let inside = batch.write && lane < count;
        // Lanes past the end do the last couples again, without storing them.
        let lane = min(lane, count - 1);
        // Elements 0 and 1 (2 and 3) are at one place; couples are 0 and 2, 1 and 3, or, mixed,
        // 0 and 1, 2 and 3.
        let (elements, angles);
        let mut apart = false;
        if E == 1 {
            let (a, b) = if table.interleaved {
                (2 * lane, 2 * lane + 1)
            } else {
                (lane, lane + half)
            };
            (elements, angles) = ([a, a, b, b], [lane; 2]);
        } else {
            let a = 2 * lane + SHIFT;
            // The last pair that begins in the first half ends in the second: its second element
            // is rotated with element 0.
            apart = SHIFT == 1 && a + 1 == half;
            let last = if apart { 0 } else { a + 1 + half };
            elements = [a, a + 1, a + half, last];
            angles = match (MIXED, apart) {
                (true, _) => [lane, lane + half / 2],
                (false, true) => [a, 0],
                (false, false) => [a, a + 1],
            };
        }
        // SAFETY: elements of a row, angles of a row of the table where there is one.
        unsafe {
            let (w, [cos0, sin0, cos1, sin1]);
            if E == 1 {
                let [a, b] = batch.weights(d, [elements[0], elements[2]]);
                w = [a, a, b, b];
                let [cos, sin] = gather(
                    d,
                    batch.write,
                    [(table.cosines, angles[0]), (table.sines, angles[0])],
                    table.dtype,
                );
                [cos0, sin0, cos1, sin1] = [cos, sin, cos, sin];
            } else {
                w = batch.weights(d, elements);
                [cos0, sin0, cos1, sin1] = gather(
                    d,
                    batch.write,
                    [
                        (table.cosines, angles[0]),
                        (table.sines, angles[0]),
                        (table.cosines, angles[1]),
                        (table.sines, angles[1]),
                    ],
                    table.dtype,
                );
            }
            let couples = Couples {
                inside,
                apart,
                w,
                cos: [cos0, cos1],
                sin: [sin0, if apart { -sin1 } else { sin1 }],
            };
            let mut places = batch.places(d, [elements[0], elements[2], elements[3]]);
            let mut head = 0;
            while E == 1 && head + HEADS as u32 <= batch.heads {
                rotate_heads::<HEADS, E, SHIFT, MIXED>(d, &batch, couples, places, head);
                places = batch.step(places, HEADS).opaque(d);
                head += HEADS as u32;
            }
            while E == 2 && head + PAIR_HEADS as u32 <= batch.heads {
                rotate_heads::<PAIR_HEADS, E, SHIFT, MIXED>(d, &batch, couples, places, head);
                places = batch.step(places, PAIR_HEADS).opaque(d);
                head += PAIR_HEADS as u32;
            }
            while head < batch.heads {
                rotate_heads::<1, E, SHIFT, MIXED>(d, &batch, couples, places, head);
                places = batch.step(places, 1).opaque(d);
                head += 1;
            }
        }
        first += 32;
    }
}

/// [`rotate`] for the couples of a lane and some heads.
///
/// # Safety
///
/// As for [`rotate`].
#[inline(always)]
unsafe fn rotate_heads<const H: usize, const E: u32, const SHIFT: u32, const MIXED: bool>(
    d: impl Device,
    batch: &Batch,
    couples: Couples,
    places: Places<3>,
    head: u32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let at = each::<H, _>(|j| batch.step(places, j));
        let raw = each::<H, _>(|j| {
            let [a, b, last] = at[j].from;
            let first = load_raw::<E>(d, true, a, batch.from_dtype);
            let second = if E == 1 {
                load_raw::<1>(d, true, b, batch.from_dtype)
            } else {
                load_slot::<2, SHIFT, true>(d, couples.apart, [b, last], batch.from_dtype)
            };
            [first, second]
        });
        let invs = each::<H, _>(|j| batch.inv_of(d, head + j as u32));
        let w = couples.w;
        let one = |j: usize| {
            let ([first, second], inv, to) = (raw[j], invs[j], at[j].to);
            let n = |raw: u32, w: f32| arith::normalize(decode(d, raw, batch.from_dtype), inv, w);
            let turn = |i: usize, a: f32, b: f32| {
                let (a, b) = arith::rotate(a, b, couples.cos[i], couples.sin[i]);
                let [a, b] = batch.divide(d, [a, b]);
                (a, b)
            };
            let dtype = batch.to_dtype;
            if E == 1 {
                let (a, b) = turn(0, n(first[0], w[0]), n(second[0], w[2]));
                let [a, b] = encode(d, [a, b], dtype);
                store_raw::<1>(d, couples.inside, to[0], [a, 0], dtype, batch.policy);
                store_raw::<1>(d, couples.inside, to[1], [b, 0], dtype, batch.policy);
                return;
            }
            let n0 = [n(first[0], w[0]), n(first[1], w[1])];
            let n1 = [n(second[0], w[2]), n(second[1], w[3])];
            let (y0, y1);
            if MIXED {
                let (a, b) = (turn(0, n0[0], n0[1]), turn(1, n1[0], n1[1]));
                (y0, y1) = ([a.0, a.1], [b.0, b.1]);
            } else {
                let (a, b) = (turn(0, n0[0], n1[0]), turn(1, n0[1], n1[1]));
                (y0, y1) = ([a.0, b.0], [a.1, b.1]);
            }
            let (y0, y1) = (encode(d, y0, dtype), encode(d, y1, dtype));
            store_raw::<2>(d, couples.inside, to[0], y0, dtype, batch.policy);
            let to = [to[1], to[2]];
            store_slot::<2, SHIFT>(
                d,
                couples.inside,
                couples.apart,
                to,
                y1,
                dtype,
                batch.policy,
            );
        };
        each::<H, _>(one);
    }
}

/// Stores elements `start..end` of all heads: of K (`KEY`) normalized, of V scaled or converted.
///
/// # Safety
///
/// As for [`rotate`]; of V there need not be an element behind a row.
#[inline(always)]
unsafe fn straight<const E: u32, const SHIFT: u32, const KEY: bool>(
    d: impl Device,
    batch: Batch,
    start: u32,
    end: u32,
) {
    let count = (end - start) / E;
    let mut first = 0;
    while first < count {
        let lane = first + batch.lane;
        let inside = batch.write && lane < count;
        // As in `rotate`.
        let lane = min(lane, count - 1);
        let a = start + lane * E + SHIFT;
        let apart = SHIFT == 1 && a + 1 == end;
        let elements = [a, if apart { start } else { a + E - 1 }];
        // SAFETY: elements of a row.
        unsafe {
            let w = match (KEY, E) {
                (false, _) => [0.0; 2],
                (true, 1) => {
                    let [w] = batch.weights(d, [a]);
                    [w; 2]
                }
                (true, _) => batch.weights(d, elements),
            };
            let slot = Slot { inside, apart, w };
            let mut places = batch.places(d, elements);
            let mut head = 0;
            while head + HEADS as u32 <= batch.heads {
                straight_heads::<HEADS, E, SHIFT, KEY>(d, &batch, slot, places, head);
                places = batch.step(places, HEADS).opaque(d);
                head += HEADS as u32;
            }
            while head < batch.heads {
                straight_heads::<1, E, SHIFT, KEY>(d, &batch, slot, places, head);
                places = batch.step(places, 1).opaque(d);
                head += 1;
            }
        }
        first += 32;
    }
}

/// The elements of a lane in [`straight`].
#[derive(Clone, Copy)]
struct Slot {
    inside: bool,
    apart: bool,
    w: [f32; 2],
}

/// [`straight`] for the elements of a lane and some heads.
///
/// # Safety
///
/// As for [`straight`].
#[inline(always)]
unsafe fn straight_heads<const H: usize, const E: u32, const SHIFT: u32, const KEY: bool>(
    d: impl Device,
    batch: &Batch,
    slot: Slot,
    places: Places<2>,
    head: u32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let at = each::<H, _>(|j| batch.step(places, j));
        let load =
            |j: usize| load_slot::<E, SHIFT, KEY>(d, slot.apart, at[j].from, batch.from_dtype);
        let raw = each::<H, _>(load);
        let inv = |j: usize| {
            if KEY {
                batch.inv_of(d, head + j as u32)
            } else {
                0.0
            }
        };
        let invs = each::<H, _>(inv);
        let one = |j: usize| {
            let convert = |i: usize| {
                let x = decode(d, raw[j][i], batch.from_dtype);
                match batch.scale {
                    _ if KEY => arith::normalize(x, invs[j], slot.w[i]),
                    Some(scale) => x * scale,
                    None => x,
                }
            };
            let y = if !KEY && batch.copies() {
                raw[j]
            } else {
                let y = [convert(0), if E == 2 { convert(1) } else { 0.0 }];
                encode(d, batch.divide(d, y), batch.to_dtype)
            };
            let (dtype, policy) = (batch.to_dtype, batch.policy);
            store_slot::<E, SHIFT>(d, slot.inside, slot.apart, at[j].to, y, dtype, policy);
        };
        each::<H, _>(one);
    }
}

/// Copies `bytes` bytes of elements of `dtype`, 16 at a time where source and destination allow
/// it: their addresses differ by a multiple of 16.
///
/// # Safety
///
/// Both are live for that many bytes and do not overlap; all lanes of a warp call it alike.
#[inline(always)]
unsafe fn copy(
    d: impl Device,
    lane: u32,
    from: u64,
    to: u64,
    bytes: u32,
    dtype: u32,
    policy: Policy,
) {
    // Alignment is read off the address, not computed once more from what led to it.
    let to = d.opaque(to);
    // What comes before the first and behind the last 16 bytes is less than 16 bytes each.
    let head = min((to.wrapping_neg() & 15) as u32, bytes);
    let vectors = (bytes - head) / 16;
    let tail = (bytes - head) % 16;
    let inside = (lane & 15) * size(dtype);
    let (start, len) = if lane < 16 {
        (0, head)
    } else {
        (bytes - tail, tail)
    };
    let single = (start + inside) as u64;
    // SAFETY: the caller's promise.
    unsafe {
        let raw = load_raw::<1>(d, inside < len, from.wrapping_add(single), dtype);
        let mut vector = lane;
        while vector < vectors {
            // Two at a time, the second one where there is one.
            let both = vector + 32 < vectors;
            let next = if both { vector + 32 } else { vector };
            let at = |base: u64, vector: u32| base.wrapping_add((head + vector * 16) as u64);
            let a = d.load_128_once(at(from, vector), policy);
            let b = d.load_128_once(at(from, next), policy);
            d.store_128(true, at(to, vector), a, policy);
            d.store_128(both, at(to, next), b, policy);
            vector += 64;
        }
        store_raw::<1>(d, inside < len, to.wrapping_add(single), raw, dtype, policy);
    }
}

/// One thread of the kernel; `E` elements (1 or 2) at a time, pairs from element `SHIFT` (0 or 1)
/// on, `kv` of dtype `KV` ([`ANY`] to read it from the parameters).
///
/// # Safety
///
/// `p` describes live tensors that do not overlap, whose rows of K and V (sources and
/// destinations) are aligned to `E` elements, or, with `SHIFT` 1, start one element behind a pair;
/// the grid is the one that [`crate::launch`] gives, with at least one row.
#[inline(always)]
pub unsafe fn run<D: Device, const E: u32, const SHIFT: u32, const KV: u32, const POOL: bool>(
    d: D,
    p: &Params,
) {
    let thread = d.thread();
    let warp_lane = thread & 31;
    let (layer, group) = layer_and_group(d, p, POOL);
    let lanes = 1u32 << p.lane_shift;
    let per_batch = 32 >> p.lane_shift;
    let row = group * (d.block_threads() >> 5) + (thread >> 5);
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
    let heads = min(p.heads - first_head, per_batch);

    let source = at(at(p.kv, token_index, p.kv_token), layer, p.kv_layer);
    let row_bytes = head_dim * kv_size;
    // Offsets in a row of kv are 32 bit.
    let k_from = source.wrapping_add((first_head * row_bytes) as u64);
    let v_from = k_from.wrapping_add(p.kv_value as u64);
    // A batch has at most 4096 bytes of K, as of V: a line for each lane (one that is not aligned to
    // lines leaves its last one to the loads).
    let line = (warp_lane * 128) as u64;
    let has_line = warp_lane * 128 < heads * row_bytes;
    let early = is_early(d, p);
    if early && has_line {
        // SAFETY: lines of the rows of this warp.
        unsafe {
            d.prefetch(k_from.wrapping_add(line));
            d.prefetch(v_from.wrapping_add(line));
        }
    }
    // A small job leaves its lines in the cache; so does one into a pool.
    let policy = d.policy(POOL || p.early_blocks > 0);

    d.begin();

    // SAFETY: rows of active threads and heads below H exist (this function's contract).
    unsafe {
        let place = Place::load(d, p, POOL, token_index, layer);

        // V is needed last: on its way into the second-level cache it does not wait for the sums.
        if has_line && !early {
            d.prefetch(v_from.wrapping_add(line));
        }

        // Squares.
        let head = warp_lane >> p.lane_shift;
        let lane = warp_lane & (lanes - 1);
        let eps = load_f32(d, true, p.eps, layer);
        let k_row = k_from.wrapping_add((head * row_bytes) as u64);
        let chunk = |step: u32| {
            let chunk = lane + step * lanes;
            load_chunk::<E, SHIFT>(d, head < heads, k_row, chunk, head_dim, kv_dtype)
        };
        let squares = |raw: [u32; 8]| arith::chunk_sum(&raw.map(|raw| decode(d, raw, kv_dtype)));
        let (c0, c1) = (chunk(0), chunk(1));
        let (mut s0, mut s1) = (squares(c0), squares(c1));
        if head_dim > 512 {
            // Up to 128 chunks: four for each of 32 lanes. The first step of the tree adds those
            // that are 2 * lanes apart.
            let (c2, c3) = (chunk(2), chunk(3));
            s0 += squares(c2);
            s1 += squares(c3);
        }
        let mut sum = s0 + s1;
        let mut mask = lanes / 2;
        while mask > 0 {
            sum += d.shuffle_xor(sum, mask);
            mask /= 2;
        }
        let inv = arith::inverse_rms(sum, head_dim, eps, |x| d.sqrt(x));

        let token = place.resolve(p, POOL, token_index);
        if !token.write && active && warp_lane == 0 && batch == 0 && layer == 0 {
            report_skipped(d, p, POOL, token_index);
        }
        // Only 8-bit pools have descales.
        let narrow = POOL && size(out_dtype) == 1;
        let descale = |address: u64| {
            if narrow {
                Some(load_reciprocal(d, true, address, layer))
            } else {
                None
            }
        };
        let table = Table {
            cosines: token.table,
            sines: token
                .table
                .wrapping_add((half * if p.table_dtype == F32 { 4 } else { 2 }) as u64),
            dtype: p.table_dtype,
            rotary_dim,
            interleaved: p.flags & flags::INTERLEAVED != 0,
        };
        let keys = Batch {
            heads,
            from: k_from,
            from_step: row_bytes as u64,
            to: at(token.destination.k, first_head, p.k_head),
            to_step: p.k_head as u64,
            from_dtype: kv_dtype,
            to_dtype: out_dtype,
            write: active && token.write,
            lane: warp_lane,
            inv,
            lane_shift: p.lane_shift,
            weight: at(p.k_norm_weight, layer, p.weight_layer),
            weight_dtype: p.weight_dtype,
            offset: if p.flags & flags::OFFSET_WEIGHT != 0 {
                1.0
            } else {
                -0.0
            },
            scale: None,
            descale: descale(p.k_descale),
            policy,
        };
        let pairs = E == 2 && half % 2 == 0;
        match table.interleaved {
            false if pairs => rotate::<E, SHIFT, false>(d, keys, table),
            true if pairs && SHIFT == 0 => rotate::<E, SHIFT, true>(d, keys, table),
            _ => rotate::<1, 0, false>(d, keys, table),
        }
        straight::<E, SHIFT, true>(d, keys, rotary_dim, head_dim);

        let values = Batch {
            from: v_from,
            to: at(token.destination.v, first_head, p.v_head),
            to_step: p.v_head as u64,
            scale: if p.value_scale != 0 {
                Some(load_f32(d, true, p.value_scale, layer))
            } else {
                None
            },
            descale: descale(p.v_descale),
            ..keys
        };
        let contiguous = values.from_step == values.to_step || heads == 1;
        if values.copies() && contiguous && (values.from ^ values.to) & 15 == 0 {
            if values.write {
                let bytes = heads * row_bytes;
                copy(
                    d,
                    warp_lane,
                    values.from,
                    values.to,
                    bytes,
                    kv_dtype,
                    policy,
                );
            }
        } else {
            straight::<E, SHIFT, false>(d, values, 0, head_dim);
        }
    }
}
