//! The primitives that a kernel needs from whatever runs it.
//!
//! The kernels are written once over [`Device`]. Each code generator adds one thin file: rustc's
//! own NVPTX back end, rust-cuda, and, on the host, an emulator that runs the same kernels in
//! tests.

#[cfg(all(target_arch = "nvptx64", not(feature = "rust-cuda")))]
#[path = "llvm.rs"]
mod generator;
#[cfg(feature = "rust-cuda")]
#[path = "rust_cuda.rs"]
mod generator;
#[cfg(target_arch = "nvptx64")]
mod nvptx;

use crate::convert;

/// What [`Device::policy`] gives: the hardware's own encoding.
#[derive(Clone, Copy)]
pub struct Policy(pub u64);

/// What one thread of a kernel can do.
///
/// Threads come in warps of 32 that shuffle with a full mask: every thread of a warp must reach
/// every shuffle, so none returns early, and shuffles stand outside of branches that only some
/// lanes take. Implementations must not let the compiler move a shuffle into such a branch.
pub trait Device: Copy {
    /// Index of the thread in its block.
    fn thread(self) -> u32;
    /// Threads of a block.
    fn block_threads(self) -> u32;
    /// Index of the block along x, along which blocks start first (observed, not promised).
    fn block_x(self) -> u32;
    /// Index of the block along y.
    fn block_y(self) -> u32;
    /// Blocks along x.
    fn blocks_x(self) -> u32;
    /// Blocks along y.
    fn blocks_y(self) -> u32;

    /// Whether [`Device::begin`] may have to wait.
    const OVERLAPS: bool = false;

    /// Called once, before the first load or store of global memory: waits for the kernel before
    /// this one in the stream where the launch allowed this one to start early. Only prefetches may
    /// come before it.
    fn begin(self) {}

    /// Keeps loads where they are, above or below: without it, an assembler that saves registers
    /// moves them behind waits for others. Every lane of a warp gets here, as for shuffles.
    fn keep_order(self) {}

    /// `value`, of which the compiler no longer knows where it comes from.
    fn opaque(self, value: u64) -> u64 {
        value
    }

    /// The value of the lane whose index differs by the bits of `mask`.
    fn shuffle_xor(self, value: f32, mask: u32) -> f32;
    /// The value of lane `lane`.
    fn shuffle_from(self, value: f32, lane: u32) -> f32;

    /// Two bytes of an input, or 0 where `when` is false.
    ///
    /// # Safety
    ///
    /// Where `when` holds, `address` is aligned to the access and readable; no one writes it
    /// while the kernel runs. The same holds for every load.
    unsafe fn load_16(self, when: bool, address: u64) -> u16;
    /// Four bytes of an input, or 0.
    ///
    /// # Safety
    ///
    /// As for [`Device::load_16`].
    unsafe fn load_32(self, when: bool, address: u64) -> u32;
    /// Eight bytes of an input, or zeros; `policy` says how long the line stays in the second-level
    /// cache, where that is not left to the device.
    ///
    /// # Safety
    ///
    /// As for [`Device::load_16`].
    unsafe fn load_64(self, when: bool, address: u64, policy: Option<Policy>) -> [u32; 2];
    /// Sixteen bytes of an input, or zeros; `policy` as for [`Device::load_64`].
    ///
    /// # Safety
    ///
    /// As for [`Device::load_16`].
    unsafe fn load_128(self, when: bool, address: u64, policy: Option<Policy>) -> [u32; 4];

    /// How long lines stay in the second-level cache: `keep` as long as others, else they leave it
    /// first.
    fn policy(self, keep: bool) -> Policy {
        let _ = keep;
        Policy(0)
    }

    /// Lines are the last to leave the second-level cache: for inputs that the calls to come read
    /// again.
    fn policy_reused(self) -> Policy {
        Policy(0)
    }

    /// Sixteen bytes of an input that no one reads again.
    ///
    /// # Safety
    ///
    /// As for [`Device::load_16`].
    unsafe fn load_128_once(self, address: u64, policy: Policy) -> [u32; 4];

    /// Starts to bring the 128 bytes around `address`, of an input, into the second-level cache.
    /// What the kernel in front writes there afterwards goes through that cache, and is what a load
    /// finds: this is allowed before [`Device::begin`].
    ///
    /// # Safety
    ///
    /// `address` is readable.
    unsafe fn prefetch(self, address: u64) {
        let _ = address;
    }

    /// Writes one byte of an output where `when` holds. Outputs are not read again by this kernel.
    ///
    /// # Safety
    ///
    /// Where `when` holds, `address` is aligned to the access and writable, and no other thread
    /// touches it. The same holds for every store.
    unsafe fn store_8(self, when: bool, address: u64, value: u8);
    /// Writes two bytes.
    ///
    /// # Safety
    ///
    /// As for [`Device::store_8`].
    unsafe fn store_16(self, when: bool, address: u64, value: u16);
    /// Writes four bytes.
    ///
    /// # Safety
    ///
    /// As for [`Device::store_8`].
    unsafe fn store_32(self, when: bool, address: u64, value: u32, policy: Policy);
    /// Writes eight bytes.
    ///
    /// # Safety
    ///
    /// As for [`Device::store_8`].
    unsafe fn store_64(self, when: bool, address: u64, value: [u32; 2], policy: Policy);
    /// Writes sixteen bytes.
    ///
    /// # Safety
    ///
    /// As for [`Device::store_8`].
    unsafe fn store_128(self, when: bool, address: u64, value: [u32; 4], policy: Policy);

    /// Atomically adds one to a counter of the status record.
    ///
    /// # Safety
    ///
    /// `address` is that of a live, 8-byte aligned u64 in device memory.
    unsafe fn count(self, address: u64);
    /// Atomically lowers a field of the status record to `value`.
    ///
    /// # Safety
    ///
    /// As for [`Device::count`].
    unsafe fn lower(self, address: u64, value: u64);

    /// `a * b + c`, rounded once.
    fn fma(self, a: f32, b: f32, c: f32) -> f32;

    /// Square root, correctly rounded, subnormals kept.
    fn sqrt(self, value: f32) -> f32;

    /// Two f32 as `bfloat16`, `low` in the low half; see [`convert::bf16_from_f32`].
    #[inline(always)]
    fn bf16x2(self, low: f32, high: f32) -> u32 {
        convert::bf16_from_f32(low) as u32 | (convert::bf16_from_f32(high) as u32) << 16
    }

    /// Two f32 as `float16`, rounded once, a NaN as [`convert::NAN_16`].
    fn f16x2(self, low: f32, high: f32) -> u32;

    /// A `float16` as f32.
    fn f16_to_f32(self, bits: u16) -> f32;

    /// Two f32 as `float8_e4m3fn`; see [`convert::e4m3_from_f32`].
    #[inline(always)]
    fn e4m3x2(self, low: f32, high: f32) -> u16 {
        convert::e4m3_from_f32(low) as u16 | (convert::e4m3_from_f32(high) as u16) << 8
    }

    /// Two f32 as `float8_e5m2`; see [`convert::e5m2_from_f32`].
    #[inline(always)]
    fn e5m2x2(self, low: f32, high: f32) -> u16 {
        convert::e5m2_from_f32(low) as u16 | (convert::e5m2_from_f32(high) as u16) << 8
    }
}
