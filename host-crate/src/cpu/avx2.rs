//! What the compiler does not find by itself, for AVX2 and F16C.
//!
//! Every function has the features that it is compiled for, so that intrinsics and closures are
//! inlined into it.

use std::arch::x86_64::{
    __m128i, __m256, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_ps, _mm_loadu_si128,
    _mm_packus_epi32, _mm_storeu_si128, _mm_stream_si128, _mm256_add_epi32, _mm256_add_ps,
    _mm256_addsub_ps, _mm256_and_si256, _mm256_blendv_ps, _mm256_castps_si256,
    _mm256_castps128_ps256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_extracti128_si256, _mm256_insertf128_ps,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_mul_ps, _mm256_permute_ps,
    _mm256_permutevar8x32_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setr_epi32,
    _mm256_shuffle_ps, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_stream_ps, _mm256_stream_si256,
    _mm256_sub_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
};

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
    let mut sums = [0f32; MAX_CHUNKS];
    let (groups, rest) = x.as_chunks::<64>();
    let (vectors, _) = sums.as_chunks_mut::<8>();
    for (sums, group) in vectors.iter_mut().zip(groups) {
        chunk_sums(group, sums);
    }
    if !rest.is_empty() {
        // Zeros add nothing to a sum of squares, which is never -0.0, and a chunk of zeros is what
        // the tree is padded with.
        let mut padded = [0f32; 64];
        padded[..rest.len()].copy_from_slice(rest);
        chunk_sums(&padded, &mut vectors[groups.len()]);
    }
    let leaves = arith::leaves(x.len() as u32) as usize;
    // Halve down to one vector, eight sums at a time.
    let (vectors, _) = sums.as_chunks_mut::<8>();
    let mut half = leaves / 16;
    while half > 0 {
        let (low, high) = vectors.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            for (low, high) in low.iter_mut().zip(high) {
                *low += *high;
            }
        }
        half /= 2;
    }
    match leaves {
        8.. => arith::tree_sum(&mut vectors[0]),
        _ => arith::tree_sum(&mut vectors[0][..leaves]),
    }
}

/// The sums of eight chunks at once, one in each lane.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn chunk_sums(x: &[f32; 64], sums: &mut [f32; 8]) {
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
    // SAFETY: within the 8 sums; an unaligned write.
    unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), sum) };
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

/// As [`convert::bf16_from_f32`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn bf16_from_f32(value: __m256) -> __m128i {
    let bits = _mm256_castps_si256(value);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
    let nan = _mm256_set1_epi32(i32::from(convert::NAN_16 as i16));
    let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(value, value);
    let rounded = _mm256_castps_si256(_mm256_blendv_ps(
        _mm256_castsi256_ps(rounded),
        _mm256_castsi256_ps(nan),
        is_nan,
    ));
    _mm_packus_epi32(
        _mm256_castsi256_si128(rounded),
        _mm256_extracti128_si256::<1>(rounded),
    )
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

/// [`Level::finish`](super::element::Level::finish) for pairs `(i, i + R/2)`.
///
/// # Safety
///
/// D and R/2 are multiples of 8; D elements are writable at `dst`, aligned by eights with
/// `STREAM`.
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
    let bytes = 8 * Out::DTYPE.size();
    let inv = _mm256_set1_ps(inv);
    let first = first.iter().zip(first_weight);
    let second = second.iter().zip(second_weight);
    for (index, ((first, second), (cos, sin))) in
        first.zip(second).zip(cos.iter().zip(sin)).enumerate()
    {
        let (first, second) = (
            normalize(first.0, inv, first.1),
            normalize(second.0, inv, second.1),
        );
        let (cos, sin) = (load(cos), load(sin));
        // As `arith::rotate`.
        let new_first = _mm256_sub_ps(_mm256_mul_ps(first, cos), _mm256_mul_ps(second, sin));
        let new_second = _mm256_add_ps(_mm256_mul_ps(second, cos), _mm256_mul_ps(first, sin));
        // SAFETY: the vectors `index` and `half + index` of the head.
        unsafe {
            Out::store8::<STREAM>(new_first, dst.add(index * bytes));
            Out::store8::<STREAM>(new_second, dst.add((half + index) * bytes));
        }
    }
    for (index, (x, weight)) in rest.iter().zip(rest_weight).enumerate() {
        // SAFETY: a vector after the two halves.
        unsafe {
            Out::store8::<STREAM>(
                normalize(x, inv, weight),
                dst.add((2 * half + index) * bytes),
            );
        }
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
    let (rotated, rest) = eights(row).split_at(cos.len());
    let (weight, rest_weight) = eights(layer.weight).split_at(cos.len());
    let bytes = 8 * Out::DTYPE.size();
    let inv = _mm256_set1_ps(inv);
    // Each angle for both elements of its pair.
    let twice = |angles: &[f32; 4]| {
        // SAFETY: four values; an unaligned read.
        let angles = _mm256_castps128_ps256(unsafe { _mm_loadu_ps(angles.as_ptr()) });
        _mm256_permutevar8x32_ps(angles, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3))
    };
    for (index, ((x, weight), (cos, sin))) in rotated
        .iter()
        .zip(weight)
        .zip(cos.iter().zip(sin))
        .enumerate()
    {
        let x = normalize(x, inv, weight);
        let swapped = _mm256_permute_ps::<0b10_11_00_01>(x);
        // As `arith::rotate`: subtracts in the even lanes, adds in the odd ones.
        let x = _mm256_addsub_ps(
            _mm256_mul_ps(x, twice(cos)),
            _mm256_mul_ps(swapped, twice(sin)),
        );
        // SAFETY: the vector `index` of the head.
        unsafe { Out::store8::<STREAM>(x, dst.add(index * bytes)) };
    }
    for (index, (x, weight)) in rest.iter().zip(rest_weight).enumerate() {
        // SAFETY: a vector after the rotated ones.
        unsafe {
            Out::store8::<STREAM>(
                normalize(x, inv, weight),
                dst.add((cos.len() + index) * bytes),
            );
        }
    }
}

/// The whole eights of a slice.
#[inline]
fn eights(values: &[f32]) -> &[[f32; 8]] {
    values.as_chunks().0
}
