//! Rows of elements to f32 and back, and the instruction sets that do it.
//!
//! Memory may be unaligned: everything here goes through unaligned reads and writes.

use fused_kv_kernels::abi::Status;
use fused_kv_kernels::{arith, convert};

use super::Task;
use super::rows;
use crate::DType;

/// Most chunks that a head has.
pub(super) const MAX_CHUNKS: usize = 1024 / arith::CHUNK;

/// An instruction set: the loops compiled for it, and what the compiler does not find by itself.
///
/// # Safety
///
/// The methods may use instructions that not every CPU has; callers make sure of them.
pub(super) trait Level: 'static {
    /// [`rows::rows`], compiled for this instruction set.
    unsafe fn rows<In: Kind, Out: Kind>(task: &Task<'_>) -> Status;

    /// `dst.len()` `float16` at `src` to f32.
    unsafe fn load_f16(src: *const u8, dst: &mut [f32]);

    /// f32 to `float16` at `dst`.
    unsafe fn store_f16(src: &[f32], dst: *mut u8);

    /// The chunk sums of `x`; returns how many.
    unsafe fn chunk_sums(x: &[f32], sums: &mut [f32; MAX_CHUNKS]) -> usize;
}

/// Plain Rust for the build's target.
pub(super) struct Portable;

impl Level for Portable {
    unsafe fn rows<In: Kind, Out: Kind>(task: &Task<'_>) -> Status {
        // SAFETY: passed on.
        unsafe { rows::rows::<Self, In, Out>(task) }
    }

    #[inline(always)]
    unsafe fn load_f16(src: *const u8, dst: &mut [f32]) {
        // SAFETY: passed on.
        unsafe { load_with(src, dst, convert::f16_to_f32) }
    }

    #[inline(always)]
    unsafe fn store_f16(src: &[f32], dst: *mut u8) {
        // SAFETY: passed on.
        unsafe { store_with(src, dst, convert::f16_from_f32) }
    }

    #[inline(always)]
    unsafe fn chunk_sums(x: &[f32], sums: &mut [f32; MAX_CHUNKS]) -> usize {
        let chunks = x.chunks(arith::CHUNK);
        let count = chunks.len();
        for (sum, chunk) in sums.iter_mut().zip(chunks) {
            *sum = arith::chunk_sum(chunk);
        }
        count
    }
}

/// AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Level for Avx2 {
    unsafe fn rows<In: Kind, Out: Kind>(task: &Task<'_>) -> Status {
        #[target_feature(enable = "avx2,f16c")]
        unsafe fn compiled<In: Kind, Out: Kind>(task: &Task<'_>) -> Status {
            // SAFETY: passed on.
            unsafe { rows::rows::<Avx2, In, Out>(task) }
        }
        // SAFETY: the caller made sure of AVX2 and F16C, and of the conditions of `rows`.
        unsafe { compiled::<In, Out>(task) }
    }

    #[inline(always)]
    unsafe fn load_f16(src: *const u8, dst: &mut [f32]) {
        use std::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
        let (vectors, rest) = dst.as_chunks_mut::<8>();
        let done = vectors.len() * 8;
        for (index, vector) in vectors.iter_mut().enumerate() {
            // SAFETY: F16C is there, `src` has an element for each of `dst`, and the loads and
            // stores are unaligned ones.
            unsafe {
                let bits = _mm_loadu_si128(src.add(index * 16).cast());
                _mm256_storeu_ps(vector.as_mut_ptr(), _mm256_cvtph_ps(bits));
            }
        }
        // SAFETY: passed on, for the elements after the vectors.
        unsafe { load_with(src.add(done * 2), rest, convert::f16_to_f32) }
    }

    #[inline(always)]
    unsafe fn store_f16(src: &[f32], dst: *mut u8) {
        use std::arch::x86_64::{
            _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_storeu_si128, _mm256_blendv_ps,
            _mm256_cmp_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_set1_ps,
        };
        let (vectors, rest) = src.as_chunks::<8>();
        let done = vectors.len() * 8;
        for (index, vector) in vectors.iter().enumerate() {
            // SAFETY: AVX and F16C are there, `dst` has room for each element of `src`, and the
            // loads and stores are unaligned ones.
            unsafe {
                // The instruction keeps the upper bits of a NaN; those of this one give NAN_16.
                let canonical = _mm256_set1_ps(f32::from_bits(convert::NAN_32));
                let value = _mm256_loadu_ps(vector.as_ptr());
                let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(value, value);
                let value = _mm256_blendv_ps(value, canonical, is_nan);
                let bits = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value);
                _mm_storeu_si128(dst.add(index * 16).cast(), bits);
            }
        }
        // SAFETY: passed on, for the elements after the vectors.
        unsafe { store_with(rest, dst.add(done * 2), convert::f16_from_f32) }
    }

    #[inline(always)]
    unsafe fn chunk_sums(x: &[f32], sums: &mut [f32; MAX_CHUNKS]) -> usize {
        // SAFETY: needs nothing.
        unsafe { Portable::chunk_sums(x, sums) }
    }
}

/// A storage type of rows.
pub(super) trait Kind: 'static {
    /// The element type.
    const DTYPE: DType;

    /// `dst.len()` elements at `src` to f32.
    ///
    /// # Safety
    ///
    /// The elements are readable; the CPU has what `L` needs.
    unsafe fn load<L: Level>(src: *const u8, dst: &mut [f32]);

    /// f32 to as many elements at `dst`, rounded once; a NaN becomes the canonical one.
    ///
    /// # Safety
    ///
    /// The elements are writable; the CPU has what `L` needs.
    unsafe fn store<L: Level>(src: &[f32], dst: *mut u8);
}

/// `bfloat16`.
pub(super) struct Bf16;
/// `float16`.
pub(super) struct F16;
/// `float32`.
pub(super) struct F32;

impl Kind for Bf16 {
    const DTYPE: DType = DType::Bf16;

    #[inline(always)]
    unsafe fn load<L: Level>(src: *const u8, dst: &mut [f32]) {
        // SAFETY: passed on.
        unsafe { load_with(src, dst, convert::bf16_to_f32) }
    }

    #[inline(always)]
    unsafe fn store<L: Level>(src: &[f32], dst: *mut u8) {
        // SAFETY: passed on.
        unsafe { store_with(src, dst, convert::bf16_from_f32) }
    }
}

impl Kind for F16 {
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    unsafe fn load<L: Level>(src: *const u8, dst: &mut [f32]) {
        // SAFETY: passed on.
        unsafe { L::load_f16(src, dst) }
    }

    #[inline(always)]
    unsafe fn store<L: Level>(src: &[f32], dst: *mut u8) {
        // SAFETY: passed on.
        unsafe { L::store_f16(src, dst) }
    }
}

impl Kind for F32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    unsafe fn load<L: Level>(src: *const u8, dst: &mut [f32]) {
        // SAFETY: passed on.
        unsafe { load_with(src, dst, f32::from_bits) }
    }

    #[inline(always)]
    unsafe fn store<L: Level>(src: &[f32], dst: *mut u8) {
        // SAFETY: passed on.
        unsafe { store_with(src, dst, convert::f32_from_f32) }
    }
}

/// Elements of a float type that is only known at run time to f32: weights and table rows.
///
/// # Safety
///
/// As [`Kind::load`].
#[inline(always)]
pub(super) unsafe fn load_any<L: Level>(dtype: DType, src: *const u8, dst: &mut [f32]) {
    // SAFETY: passed on.
    unsafe {
        match dtype {
            DType::Bf16 => Bf16::load::<L>(src, dst),
            DType::F16 => F16::load::<L>(src, dst),
            _ => F32::load::<L>(src, dst),
        }
    }
}

/// # Safety
///
/// `dst.len()` values of type `B` are readable at `src`.
#[inline(always)]
unsafe fn load_with<B: Copy>(src: *const u8, dst: &mut [f32], convert: impl Fn(B) -> f32) {
    let src = src.cast::<B>();
    for (index, dst) in dst.iter_mut().enumerate() {
        // SAFETY: the caller's condition; the read is an unaligned one.
        *dst = convert(unsafe { src.add(index).read_unaligned() });
    }
}

/// # Safety
///
/// `src.len()` values of type `B` are writable at `dst`.
#[inline(always)]
unsafe fn store_with<B: Copy>(src: &[f32], dst: *mut u8, convert: impl Fn(f32) -> B) {
    let dst = dst.cast::<B>();
    for (index, &src) in src.iter().enumerate() {
        // SAFETY: the caller's condition; the write is an unaligned one.
        unsafe { dst.add(index).write_unaligned(convert(src)) };
    }
}
