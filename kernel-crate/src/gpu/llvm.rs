//! rustc's own NVPTX back end.

use core::arch::asm;

use super::nvptx::Gpu;

// The back end does not know that a shuffle in `asm!` is convergent: it must not be `pure`, which
// would let it move into a divergent branch.

/// The value of the lane whose index differs by the bits of `mask`.
///
/// # Safety
///
/// Every lane of the warp gets here.
#[inline(always)]
pub(super) unsafe fn shuffle_xor(value: f32, mask: u32) -> f32 {
    let result: u32;
    // SAFETY: every lane gets here, so the full mask is right.
    unsafe {
        asm!(
            "shfl.sync.bfly.b32 {result}, {value}, {mask}, 31, -1;",
            result = out(reg32) result,
            value = in(reg32) value.to_bits(),
            mask = in(reg32) mask,
            options(nomem, nostack)
        );
    }
    f32::from_bits(result)
}

/// The value of lane `lane`.
///
/// # Safety
///
/// Every lane of the warp gets here.
#[inline(always)]
pub(super) unsafe fn shuffle_from(value: f32, lane: u32) -> f32 {
    let result: u32;
    // SAFETY: every lane gets here, so the full mask is right.
    unsafe {
        asm!(
            "shfl.sync.idx.b32 {result}, {value}, {lane}, 31, -1;",
            result = out(reg32) result,
            value = in(reg32) value.to_bits(),
            lane = in(reg32) lane,
            options(nomem, nostack)
        );
    }
    f32::from_bits(result)
}

macro_rules! entries {
    ($($name:ident => $body:expr;)*) => {$(
        #[doc = concat!("Kernel `", stringify!($name), "`.")]
        ///
        /// # Safety
        ///
        /// The host's launch keeps the contract of the body.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(params: crate::abi::Params) {
            // SAFETY: the caller's promise.
            unsafe { $body(Gpu, &params) }
        }
    )*};
}
crate::kernels::for_each_entry!(entries);

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: ends the kernel with an error that the launch's caller sees.
    unsafe { asm!("trap;", options(noreturn)) }
}
