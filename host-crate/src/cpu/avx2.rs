//! What the compiler does not find by itself, for AVX2 and F16C.
//!
//! Every function has the features that it is compiled for, so that intrinsics and closures are
//! inlined into it.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_add_ps, _mm_add_ss,
    _mm_cvtss_f32, _mm_loadu_ps, _mm_loadu_si128, _mm_movehl_ps, _mm_packus_epi32, _mm_shuffle_ps,
    _mm_storeu_si128, _mm_stream_si128, _mm256_add_epi32, _mm256_add_ps, _mm256_addsub_ps,
    _mm256_and_si256, _mm256_blendv_epi8, _mm256_blendv_ps, _mm256_castps_si256,
    _mm256_castps128_ps256, _mm256_castps256_ps128, _mm256_castsi256_si128, _mm256_cmp_ps,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_extractf128_ps, _mm256_extracti128_si256,
    _mm256_insertf128_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_movemask_ps, _mm256_mul_ps,
    _mm256_packus_epi32, _mm256_permute_ps, _mm256_permute4x64_epi64, _mm256_permutevar8x32_ps,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setr_epi32, _mm256_setzero_ps, _mm256_shuffle_ps,
    _mm256_srli_epi32, _mm256_storeu_ps, _mm256_storeu_si256, _mm256_stream_ps,
    _mm256_stream_si256, _mm256_sub_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
};
use std::ops::Range;

use fused_kv_kernels::{arith, convert};

use super::element::{Angled, Kind, MAX_CHUNKS, load_with, store_with};

/// `dst.len()` `float16` at `src` to f32.
///
/// # Safety
///
/// They are readable.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn load_f16(src: *const u8, dst: &mut [f32]) {
    let (vectors, rest) = dst.as_chunks_mut::<8>();
    let done = vectors.len() * 8;
    for (index, vector) in vectors.iter_mut().enumerate() {
        // SAFETY: `src` has an element for each of `dst`; the accesses are unaligned ones.
        unsafe {
            let bits = _mm_loadu_si128(src.add(index * 16).cast());
            _mm256_storeu_ps(vector.as_mut_ptr(), _mm256_cvtph_ps(bits));
        }
    }
    // SAFETY: passed on, for the elements after the vectors.
    unsafe { load_with(src.add(done * 2), rest, convert::f16_to_f32) }
}

/// f32 to `float16` at `dst`.
///
/// # Safety
///
/// As many elements as `src` has are writable.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn store_f16(src: &[f32], dst: *mut u8) {
    let (vectors, rest) = src.as_chunks::<8>();
    let done = vectors.len() * 8;
    for (index, vector) in vectors.iter().enumerate() {
        // SAFETY: `dst` has room for each element of `src`; the accesses are unaligned ones.
        unsafe {
            let value = _mm256_loadu_ps(vector.as_ptr());
            store_bits16::<false>(f16_from_f32(value), dst.add(index * 16));
        }
    }
    // SAFETY: passed on, for the elements after the vectors.
    unsafe { store_with(rest, dst.add(done * 2), convert::f16_from_f32) }
}

/// Sum of squares of a head, in the order of the bit contract.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn sum_of_squares(x: &[f32]) -> f32 {
    let (groups, rest) = x.as_chunks::<64>();
    // The usual head dimensions without a detour through memory.
    match (groups, rest) {
        ([one], []) => return tree_sum(chunk_sums(one)),
        ([low, high], []) => {
            return tree_sum(_mm256_add_ps(chunk_sums(low), chunk_sums(high)));
        }
        _ => {}
    }
    let mut vectors = [_mm256_setzero_ps(); MAX_CHUNKS / 8];
    for (vector, group) in vectors.iter_mut().zip(groups) {
        *vector = chunk_sums(group);
    }
    if !rest.is_empty() {
        // Zeros add nothing to a sum of squares, which is never -0.0, and a chunk of zeros is what
        // the tree is padded with.
        let mut padded = [0f32; 64];
        padded[..rest.len()].copy_from_slice(rest);
        vectors[groups.len()] = chunk_sums(&padded);
    }
    // Halve down to one vector, eight sums at a time. Fewer sums than eight are followed by zeros,
    // which the last halvings add first.
    let mut half = arith::leaves(x.len() as u32) as usize / 16;
    while half > 0 {
        let (low, high) = vectors.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low = _mm256_add_ps(*low, *high);
        }
        half /= 2;
    }
    tree_sum(vectors[0])
}

/// As [`arith::tree_sum`] of eight sums.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn tree_sum(sums: __m256) -> f32 {
    let four = _mm_add_ps(
        _mm256_castps256_ps128(sums),
        _mm256_extractf128_ps::<1>(sums),
    );
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    let one = _mm_add_ss(two, _mm_shuffle_ps::<1>(two, two));
    _mm_cvtss_f32(one)
}

/// The sums of eight chunks at once, one in each lane.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn chunk_sums(x: &[f32; 64]) -> __m256 {
    // Elements `4 * half..4 * half + 4` of the chunks `chunk` and `chunk + 4`, squared.
    let squares = |chunk: usize, half: usize| -> __m256 {
        // SAFETY: within the 64 elements (the highest read is at 8 * 7 + 4); unaligned reads.
        let at = |chunk: usize| unsafe { _mm_loadu_ps(x.as_ptr().add(8 * chunk + 4 * half)) };
        let low = _mm256_castps128_ps256(at(chunk));
        let both = _mm256_insertf128_ps::<1>(low, at(chunk + 4));
        _mm256_mul_ps(both, both)
    };
    // A transposition: vector i has element `4 * half + i` of all eight chunks.
    let columns = |half: usize| -> [__m256; 4] {
        let (a, b) = (squares(0, half), squares(1, half));
        let (c, d) = (squares(2, half), squares(3, half));
        let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        [
            _mm256_shuffle_ps::<0x44>(ab_low, cd_low),
            _mm256_shuffle_ps::<0xee>(ab_low, cd_low),
            _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
            _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
        ]
    };
    let [a, b, c, d] = columns(0);
    let mut sum = _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(a, b), c), d);
    for squares in columns(1) {
        sum = _mm256_add_ps(sum, squares);
    }
    sum
}

/// The values, apart.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn values(vector: __m256) -> [f32; 8] {
    let mut values = [0f32; 8];
    // SAFETY: eight values; an unaligned write.
    unsafe { _mm256_storeu_ps(values.as_mut_ptr(), vector) };
    values
}

/// The values with every NaN replaced by the canonical one of f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn canonical(value: __m256) -> __m256 {
    let nan = _mm256_set1_ps(f32::from_bits(convert::NAN_32));
    _mm256_blendv_ps(value, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(value, value))
}

/// As [`convert::f16_from_f32`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn f16_from_f32(value: __m256) -> __m128i {
    // The instruction keeps the upper bits of a NaN; those of the canonical one give NAN_16.
    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(canonical(value))
}

/// As [`convert::bf16_from_f32`] for numbers, each in the lower half of its lane.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn rounded(value: __m256) -> __m256i {
    let bits = _mm256_castps_si256(value);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half))
}

/// As [`convert::bf16_from_f32`], each in the lower half of its lane.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn rounded_or_nan(value: __m256) -> __m256i {
    let nan = _mm256_set1_epi32(i32::from(convert::NAN_16 as i16));
    let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(value, value);
    _mm256_blendv_epi8(rounded(value), nan, _mm256_castps_si256(is_nan))
}

/// As [`convert::bf16_from_f32`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn bf16_from_f32(value: __m256) -> __m128i {
    let lanes = rounded_or_nan(value);
    _mm_packus_epi32(
        _mm256_castsi256_si128(lanes),
        _mm256_extracti128_si256::<1>(lanes),
    )
}

/// As [`convert::bf16_from_f32`], of sixteen values.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn bf16_from_f32x16(low: __m256, high: __m256) -> __m256i {
    // One comparison finds a NaN on either side; there hardly ever is one.
    let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(low, high);
    let (low, high) = if _mm256_movemask_ps(nan) == 0 {
        (rounded(low), rounded(high))
    } else {
        (rounded_or_nan(low), rounded_or_nan(high))
    };
    // The packing takes the four halves in turns; the permutation puts them in order.
    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high))
}

/// Stores 32 bytes.
///
/// # Safety
///
/// As [`store_bits16`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn store_vector<const STREAM: bool>(bits: __m256i, dst: *mut u8) {
    // SAFETY: the caller's condition.
    unsafe {
        if STREAM {
            _mm256_stream_si256(dst.cast(), bits);
        } else {
            _mm256_storeu_si256(dst.cast(), bits);
        }
    }
}

/// Stores eight 16-bit elements.
///
/// # Safety
///
/// They are writable, and aligned together with `STREAM`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn store_bits16<const STREAM: bool>(bits: __m128i, dst: *mut u8) {
    // SAFETY: the caller's condition.
    unsafe {
        if STREAM {
            _mm_stream_si128(dst.cast(), bits);
        } else {
            _mm_storeu_si128(dst.cast(), bits);
        }
    }
}

/// Stores eight f32.
///
/// # Safety
///
/// As [`store_bits16`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn store_bits32<const STREAM: bool>(value: __m256, dst: *mut u8) {
    // SAFETY: the caller's condition.
    unsafe {
        if STREAM {
            _mm256_stream_ps(dst.cast(), value);
        } else {
            _mm256_storeu_ps(dst.cast(), value);
        }
    }
}

/// Copies bytes past the caches.
///
/// # Safety
///
/// As `ptr::copy_nonoverlapping`; `dst` and `len` are multiples of 32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn copy_streaming(src: *const u8, dst: *mut u8, len: usize) {
    for at in (0..len).step_by(32) {
        // SAFETY: the caller's condition; the load is an unaligned one.
        unsafe {
            let bytes = _mm256_loadu_si256(src.add(at).cast());
            _mm256_stream_si256(dst.add(at).cast(), bytes);
        }
    }
}

/// Eight values of a slice.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load(values: &[f32; 8]) -> __m256 {
    // SAFETY: eight values; an unaligned read.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

/// As [`arith::normalize`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn normalize(x: &[f32; 8], inv: __m256, weight: &[f32; 8]) -> __m256 {
    _mm256_mul_ps(_mm256_mul_ps(load(x), inv), load(weight))
}

/// Stores the vectors `from..to` of a head, two at a time.
///
/// # Safety
///
/// `values(index)` may be called for them, and each is writable at `dst`, aligned with `STREAM`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn store_all<Out: Kind, const STREAM: bool>(
    range: Range<usize>,
    dst: *mut u8,
    values: impl Fn(usize) -> __m256,
) {
    let bytes = 8 * Out::DTYPE.size();
    let mut index = range.start;
    while index + 1 < range.end {
        let (low, high) = (values(index), values(index + 1));
        // SAFETY: the caller's condition, of two vectors.
        unsafe { Out::store16::<STREAM>(low, high, dst.add(index * bytes)) };
        index += 2;
    }
    if index < range.end {
        // SAFETY: the caller's condition.
        unsafe { Out::store8::<STREAM>(values(index), dst.add(index * bytes)) };
    }
}

/// [`Level::finish`](super::element::Level::finish) for pairs `(i, i + R/2)`.
///
/// # Safety
///
/// D and R/2 are multiples of 8; D elements are writable at `dst`, which is aligned to vectors
/// with `STREAM`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn finish_neox<Out: Kind, const STREAM: bool>(
    row: &[f32],
    inv: f32,
    layer: &Angled<'_>,
    dst: *mut u8,
) {
    let (cos, sin) = (eights(layer.cos), eights(layer.sin));
    let half = cos.len();
    let (first, rest) = eights(row).split_at(half);
    let (second, rest) = rest.split_at(half);
    let (first_weight, rest_weight) = eights(layer.weight).split_at(half);
    let (second_weight, rest_weight) = rest_weight.split_at(half);
    let sin = &sin[..half];
    let bytes = 8 * Out::DTYPE.size();
    let inv = _mm256_set1_ps(inv);
    let rotated = |index: usize| {
        let first = normalize(&first[index], inv, &first_weight[index]);
        let second = normalize(&second[index], inv, &second_weight[index]);
        let (cos, sin) = (load(&cos[index]), load(&sin[index]));
        // As `arith::rotate`.
        (
            _mm256_sub_ps(_mm256_mul_ps(first, cos), _mm256_mul_ps(second, sin)),
            _mm256_add_ps(_mm256_mul_ps(second, cos), _mm256_mul_ps(first, sin)),
        )
    };
    let mut index = 0;
    // SAFETY: vectors of each half of the head.
    unsafe {
        while index + 1 < half {
            let (a, b) = (rotated(index), rotated(index + 1));
            Out::store16::<STREAM>(a.0, b.0, dst.add(index * bytes));
            Out::store16::<STREAM>(a.1, b.1, dst.add((half + index) * bytes));
            index += 2;
        }
        if index < half {
            let (first, second) = rotated(index);
            Out::store8::<STREAM>(first, dst.add(index * bytes));
            Out::store8::<STREAM>(second, dst.add((half + index) * bytes));
        }
    }
    // SAFETY: the vectors after the two halves.
    unsafe {
        store_all::<Out, STREAM>(0..rest.len(), dst.add(2 * half * bytes), |index| {
            normalize(&rest[index], inv, &rest_weight[index])
        });
    }
}

/// [`Level::finish`](super::element::Level::finish) for pairs `(2i, 2i + 1)`.
///
/// # Safety
///
/// As [`finish_neox`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn finish_interleaved<Out: Kind, const STREAM: bool>(
    row: &[f32],
    inv: f32,
    layer: &Angled<'_>,
    dst: *mut u8,
) {
    let (cos, _) = layer.cos.as_chunks::<4>();
    let (sin, _) = layer.sin.as_chunks::<4>();
    let (row, weight) = (eights(row), eights(layer.weight));
    let inv = _mm256_set1_ps(inv);
    // Each angle for both elements of its pair.
    let twice = |angles: &[f32; 4]| {
        // SAFETY: four values; an unaligned read.
        let angles = _mm256_castps128_ps256(unsafe { _mm_loadu_ps(angles.as_ptr()) });
        _mm256_permutevar8x32_ps(angles, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3))
    };
    let normalized = |index: usize| normalize(&row[index], inv, &weight[index]);
    let rotated = |index: usize| {
        let x = normalized(index);
        let swapped = _mm256_permute_ps::<0b10_11_00_01>(x);
        // As `arith::rotate`: subtracts in the even lanes, adds in the odd ones.
        _mm256_addsub_ps(
            _mm256_mul_ps(x, twice(&cos[index])),
            _mm256_mul_ps(swapped, twice(&sin[index])),
        )
    };
    // SAFETY: the vectors of the head.
    unsafe {
        store_all::<Out, STREAM>(0..cos.len(), dst, rotated);
        store_all::<Out, STREAM>(cos.len()..row.len(), dst, normalized);
    }
}

/// The whole eights of a slice.
#[inline]
fn eights(values: &[f32]) -> &[[f32; 8]] {
    values.as_chunks().0
}
