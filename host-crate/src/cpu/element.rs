//! Rows of elements to f32 and back, and the instruction sets that do it.
//!
//! Memory may be unaligned: everything here goes through unaligned reads and writes.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::__m256;

use fused_kv_kernels::abi::Status;
use fused_kv_kernels::{arith, convert};

use super::Task;
#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::rows;
use crate::DType;
use crate::plan::RopeStyle;

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

    /// Sum of squares of a head, in the order of the bit contract.
    unsafe fn sum_of_squares(x: &[f32]) -> f32;

    /// What follows the sum: normalizes and rotates a head and stores it at `dst`, past the caches
    /// if `stream` (see [`Task::stream`]). `row` is scratch afterwards.
    unsafe fn finish<Out: Kind>(
        row: &mut [f32],
        inv: f32,
        layer: &Angled<'_>,
        dst: *mut u8,
        stream: bool,
    );

    /// Copies bytes; as `ptr::copy_nonoverlapping`.
    unsafe fn copy(src: *const u8, dst: *mut u8, len: usize, stream: bool);

    /// Asks for memory that is needed soon; any address will do.
    fn prefetch(address: *const u8, len: usize);
}

/// What the heads of one token and layer have in common.
pub(super) struct Angled<'r> {
    /// Effective norm weights of the layer.
    pub(super) weight: &'r [f32],
    /// Cosines and sines of the token, R/2 each.
    pub(super) cos: &'r [f32],
    pub(super) sin: &'r [f32],
    pub(super) style: RopeStyle,
    /// K is divided by this before it is rounded.
    pub(super) descale: Option<f32>,
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
    unsafe fn sum_of_squares(x: &[f32]) -> f32 {
        let mut sums = [0f32; MAX_CHUNKS];
        for (sum, chunk) in sums.iter_mut().zip(x.chunks(arith::CHUNK)) {
            *sum = arith::chunk_sum(chunk);
        }
        arith::tree_sum(&mut sums[..arith::leaves(x.len() as u32) as usize])
    }

    #[inline(always)]
    unsafe fn finish<Out: Kind>(
        row: &mut [f32],
        inv: f32,
        layer: &Angled<'_>,
        dst: *mut u8,
        _stream: bool,
    ) {
        // SAFETY: passed on.
        unsafe { finish::<Self, Out>(row, inv, layer, dst) }
    }

    #[inline(always)]
    unsafe fn copy(src: *const u8, dst: *mut u8, len: usize, _stream: bool) {
        // SAFETY: passed on.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
    }

    #[inline(always)]
    fn prefetch(_address: *const u8, _len: usize) {}
}

/// The rest of the row algorithm in plain loops, which any instruction set may be compiled for.
///
/// # Safety
///
/// As [`Level::finish`].
#[inline(always)]
pub(super) unsafe fn finish<L: Level, Out: Kind>(
    row: &mut [f32],
    inv: f32,
    layer: &Angled<'_>,
    dst: *mut u8,
) {
    for (x, &w) in row.iter_mut().zip(layer.weight) {
        *x = arith::normalize(*x, inv, w);
    }
    let half = layer.cos.len();
    let rotated = &mut row[..2 * half];
    let angles = layer.cos.iter().zip(layer.sin);
    match layer.style {
        RopeStyle::Neox => {
            let (first, second) = rotated.split_at_mut(half);
            for ((first, second), (&cos, &sin)) in first.iter_mut().zip(second).zip(angles) {
                (*first, *second) = arith::rotate(*first, *second, cos, sin);
            }
        }
        RopeStyle::Interleaved => {
            let (pairs, _) = rotated.as_chunks_mut::<2>();
            for ([first, second], (&cos, &sin)) in pairs.iter_mut().zip(angles) {
                (*first, *second) = arith::rotate(*first, *second, cos, sin);
            }
        }
    }
    if let Some(descale) = layer.descale {
        divide(row, descale);
    }
    // SAFETY: passed on.
    unsafe { Out::store::<L>(row, dst) };
}

/// Divides by a descale; one rounding follows at the store.
#[inline(always)]
pub(super) fn divide(row: &mut [f32], descale: f32) {
    for x in row {
        *x /= descale;
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
            let status = unsafe { rows::rows::<Avx2, In, Out>(task) };
            if task.stream {
                std::arch::x86_64::_mm_sfence();
            }
            status
        }
        // SAFETY: the caller made sure of AVX2 and F16C, and of the conditions of `rows`.
        unsafe { compiled::<In, Out>(task) }
    }

    #[inline(always)]
    unsafe fn load_f16(src: *const u8, dst: &mut [f32]) {
        // SAFETY: passed on; the caller made sure of F16C.
        unsafe { avx2::load_f16(src, dst) }
    }

    #[inline(always)]
    unsafe fn store_f16(src: &[f32], dst: *mut u8) {
        // SAFETY: passed on; the caller made sure of F16C.
        unsafe { avx2::store_f16(src, dst) }
    }

    #[inline(always)]
    unsafe fn sum_of_squares(x: &[f32]) -> f32 {
        // SAFETY: the caller made sure of AVX2.
        unsafe { avx2::sum_of_squares(x) }
    }

    #[inline(always)]
    unsafe fn finish<Out: Kind>(
        row: &mut [f32],
        inv: f32,
        layer: &Angled<'_>,
        dst: *mut u8,
        stream: bool,
    ) {
        let (head_dim, half) = (row.len(), layer.cos.len());
        // SAFETY (of all blocks): passed on; the caller made sure of AVX2 and F16C.
        if head_dim.is_multiple_of(8) && half.is_multiple_of(8) && layer.descale.is_none() {
            match (layer.style, stream) {
                // SAFETY: whole vectors of the head and of its halves.
                (RopeStyle::Neox, false) => unsafe {
                    avx2::finish_neox::<Out, false>(row, inv, layer, dst);
                },
                // SAFETY: as above.
                (RopeStyle::Neox, true) => unsafe {
                    avx2::finish_neox::<Out, true>(row, inv, layer, dst);
                },
                // SAFETY: as above.
                (RopeStyle::Interleaved, false) => unsafe {
                    avx2::finish_interleaved::<Out, false>(row, inv, layer, dst);
                },
                // SAFETY: as above.
                (RopeStyle::Interleaved, true) => unsafe {
                    avx2::finish_interleaved::<Out, true>(row, inv, layer, dst);
                },
            }
        } else {
            // SAFETY: passed on.
            unsafe { finish::<Self, Out>(row, inv, layer, dst) }
        }
    }

    #[inline(always)]
    unsafe fn copy(src: *const u8, dst: *mut u8, len: usize, stream: bool) {
        if stream {
            // SAFETY: passed on; the caller made sure of AVX2 and of the alignment.
            unsafe { avx2::copy_streaming(src, dst, len) }
        } else {
            // SAFETY: passed on.
            unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
        }
    }

    #[inline(always)]
    fn prefetch(address: *const u8, len: usize) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for at in (0..len).step_by(64) {
            // SAFETY: a prefetch never faults, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.wrapping_add(at).cast()) };
        }
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

    /// As [`Kind::store`], eight elements; past the caches with `STREAM`.
    ///
    /// # Safety
    ///
    /// As [`Kind::store`], with AVX2 and F16C; with `STREAM` eight elements are aligned.
    #[cfg(target_arch = "x86_64")]
    unsafe fn store8<const STREAM: bool>(src: __m256, dst: *mut u8);

    /// As [`Kind::store8`], sixteen elements, of which eight are aligned with `STREAM`.
    ///
    /// # Safety
    ///
    /// As [`Kind::store8`].
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store16<const STREAM: bool>(low: __m256, high: __m256, dst: *mut u8) {
        // SAFETY: passed on, for each half.
        unsafe {
            Self::store8::<STREAM>(low, dst);
            Self::store8::<STREAM>(high, dst.add(8 * Self::DTYPE.size()));
        }
    }
}

/// `bfloat16`.
pub(super) struct Bf16;
/// `float16`.
pub(super) struct F16;
/// `float32`.
pub(super) struct F32;

/// `float8_e4m3fn`, of pools.
pub(super) struct E4M3;
/// `float8_e5m2`, of pools.
pub(super) struct E5M2;

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

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store8<const STREAM: bool>(src: __m256, dst: *mut u8) {
        // SAFETY: passed on.
        unsafe { avx2::store_bits16::<STREAM>(avx2::bf16_from_f32(src), dst) }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store16<const STREAM: bool>(low: __m256, high: __m256, dst: *mut u8) {
        // SAFETY: passed on.
        unsafe { avx2::store_vector::<STREAM>(avx2::bf16_from_f32x16(low, high), dst) }
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

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store8<const STREAM: bool>(src: __m256, dst: *mut u8) {
        // SAFETY: passed on.
        unsafe { avx2::store_bits16::<STREAM>(avx2::f16_from_f32(src), dst) }
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

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store8<const STREAM: bool>(src: __m256, dst: *mut u8) {
        // SAFETY: passed on.
        unsafe { avx2::store_bits32::<STREAM>(avx2::canonical(src), dst) }
    }
}

impl Kind for E4M3 {
    const DTYPE: DType = DType::F8E4M3Fn;

    #[inline(always)]
    unsafe fn load<L: Level>(src: *const u8, dst: &mut [f32]) {
        // SAFETY: passed on.
        unsafe { load_with(src, dst, convert::e4m3_to_f32) }
    }

    #[inline(always)]
    unsafe fn store<L: Level>(src: &[f32], dst: *mut u8) {
        // SAFETY: passed on.
        unsafe { store_with(src, dst, convert::e4m3_from_f32) }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store8<const STREAM: bool>(src: __m256, dst: *mut u8) {
        // SAFETY: passed on. Bytes of pools are never written past the caches.
        unsafe { store_with(&avx2::values(src), dst, convert::e4m3_from_f32) }
    }
}

impl Kind for E5M2 {
    const DTYPE: DType = DType::F8E5M2;

    #[inline(always)]
    unsafe fn load<L: Level>(src: *const u8, dst: &mut [f32]) {
        // SAFETY: passed on.
        unsafe { load_with(src, dst, convert::e5m2_to_f32) }
    }

    #[inline(always)]
    unsafe fn store<L: Level>(src: &[f32], dst: *mut u8) {
        // SAFETY: passed on.
        unsafe { store_with(src, dst, convert::e5m2_from_f32) }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store8<const STREAM: bool>(src: __m256, dst: *mut u8) {
        // SAFETY: passed on. Bytes of pools are never written past the caches.
        unsafe { store_with(&avx2::values(src), dst, convert::e5m2_from_f32) }
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
pub(super) unsafe fn load_with<B: Copy>(
    src: *const u8,
    dst: &mut [f32],
    convert: impl Fn(B) -> f32,
) {
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
pub(super) unsafe fn store_with<B: Copy>(src: &[f32], dst: *mut u8, convert: impl Fn(f32) -> B) {
    let dst = dst.cast::<B>();
    for (index, &src) in src.iter().enumerate() {
        // SAFETY: the caller's condition; the write is an unaligned one.
        unsafe { dst.add(index).write_unaligned(convert(src)) };
    }
}
