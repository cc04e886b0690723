//! rust-cuda's code generator, through libNVVM.
//!
//! On the host, where `kernel` compiles an ordinary function, this only type-checks.

use cuda_std::{kernel, warp};

#[cfg(target_arch = "nvptx64")]
use super::nvptx::Gpu;

/// All lanes of a warp.
const FULL: u32 = u32::MAX;
/// Lanes that a shuffle reaches.
const WIDTH: u32 = 32;

// cuda_std's shuffles are intrinsics that the code generator knows to be convergent; one in `asm!`
// would not be.

/// The value of the lane whose index differs by the bits of `mask`.
///
/// # Safety
///
/// Every lane of the warp gets here.
#[inline(always)]
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "only type-checked")
)]
pub(super) unsafe fn shuffle_xor(value: f32, mask: u32) -> f32 {
    // SAFETY: every lane gets here, so the full mask is right.
    unsafe { warp::warp_shuffle_xor(FULL, value, mask, WIDTH).0 }
}

/// The value of lane `lane`.
///
/// # Safety
///
/// Every lane of the warp gets here.
#[inline(always)]
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "only type-checked")
)]
pub(super) unsafe fn shuffle_from(value: f32, lane: u32) -> f32 {
    // SAFETY: every lane gets here, so the full mask is right.
    unsafe { warp::warp_shuffle_idx(FULL, value, lane, WIDTH).0 }
}

macro_rules! entries {
    ($($name:ident => $body:expr;)*) => {$(
        #[doc = concat!("Kernel `", stringify!($name), "`.")]
        ///
        /// # Safety
        ///
        /// The host's launch keeps the contract of the body.
        #[kernel]
        pub unsafe fn $name(params: crate::abi::Params) {
            #[cfg(target_arch = "nvptx64")]
            // SAFETY: the caller's promise.
            unsafe {
                $body(Gpu, &params)
            }
            #[cfg(not(target_arch = "nvptx64"))]
            unreachable!("{} takes GPU addresses: {params:?}", stringify!($name));
        }
    )*};
}
crate::kernels::for_each_entry!(entries);
