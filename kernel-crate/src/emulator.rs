//! The kernels on the host: a [`Device`] whose 32 lanes are threads, for tests.
//!
//! Far too slow for work, but it is the kernel code itself that runs, shuffles included.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Barrier;

use crate::abi::Params;
use crate::convert;
use crate::gpu::{Device, Policy};
use crate::kernels;

struct Warp {
    barrier: Barrier,
    exchange: [AtomicU32; 32],
}

#[derive(Clone, Copy)]
struct Lane<'a> {
    warp: &'a Warp,
    thread: u32,
    block_threads: u32,
    block: u32,
    blocks: u32,
    layer: u32,
}

impl Lane<'_> {
    fn exchange(self, value: f32, from: u32) -> f32 {
        let own = (self.thread & 31) as usize;
        self.warp.exchange[own].store(value.to_bits(), Ordering::Relaxed);
        self.warp.barrier.wait();
        let result = self.warp.exchange[from as usize & 31].load(Ordering::Relaxed);
        self.warp.barrier.wait();
        f32::from_bits(result)
    }
}

/// Reads a `T` at `address`, or gives the default.
///
/// # Safety
///
/// Where `when` holds, `address` is readable and aligned.
unsafe fn load<T: Default + Copy>(when: bool, address: u64) -> T {
    let pointer = address as usize as *const T;
    if when {
        require_alignment(pointer.is_aligned_to_size(), address);
        // SAFETY: the caller's promise.
        unsafe { pointer.read_unaligned() }
    } else {
        T::default()
    }
}

/// Writes `value` at `address`.
///
/// # Safety
///
/// Where `when` holds, `address` is writable and aligned.
unsafe fn store<T>(when: bool, address: u64, value: T) {
    let pointer = address as usize as *mut T;
    if when {
        require_alignment(pointer.is_aligned_to_size(), address);
        // SAFETY: the caller's promise.
        unsafe { pointer.write_unaligned(value) }
    }
}

/// Ends the process, as a fault on a GPU ends the context: a panic of one lane would leave the
/// other lanes waiting for it.
fn require_alignment(aligned: bool, address: u64) {
    if !aligned {
        std::eprintln!("emulated device: misaligned access at {address:#x}");
        std::process::abort();
    }
}

/// A GPU access must be aligned to its own size, not only to that of its elements.
trait AlignedToSize {
    fn is_aligned_to_size(&self) -> bool;
}

impl<T> AlignedToSize for *const T {
    fn is_aligned_to_size(&self) -> bool {
        (*self as usize).is_multiple_of(size_of::<T>())
    }
}

impl<T> AlignedToSize for *mut T {
    fn is_aligned_to_size(&self) -> bool {
        self.cast_const().is_aligned_to_size()
    }
}

impl Device for Lane<'_> {
    const OVERLAPS: bool = true;

    fn thread(self) -> u32 {
        self.thread
    }
    fn block_threads(self) -> u32 {
        self.block_threads
    }
    fn block(self) -> u32 {
        self.block
    }
    fn blocks(self) -> u32 {
        self.blocks
    }
    fn layer(self) -> u32 {
        self.layer
    }
    fn shuffle_xor(self, value: f32, mask: u32) -> f32 {
        self.exchange(value, self.thread ^ mask)
    }
    fn shuffle_from(self, value: f32, lane: u32) -> f32 {
        self.exchange(value, lane)
    }
    unsafe fn load_16(self, when: bool, address: u64) -> u16 {
        // SAFETY: the caller's promise.
        unsafe { load(when, address) }
    }
    unsafe fn load_32(self, when: bool, address: u64) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { load(when, address) }
    }
    unsafe fn load_64(self, when: bool, address: u64) -> [u32; 2] {
        // SAFETY: the caller's promise.
        unsafe { load(when, address) }
    }
    unsafe fn load_128(self, when: bool, address: u64) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { load(when, address) }
    }
    unsafe fn load_128_once(self, address: u64, _: Policy) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { load(true, address) }
    }
    unsafe fn store_8(self, when: bool, address: u64, value: u8) {
        // SAFETY: the caller's promise.
        unsafe { store(when, address, value) }
    }
    unsafe fn store_16(self, when: bool, address: u64, value: u16) {
        // SAFETY: the caller's promise.
        unsafe { store(when, address, value) }
    }
    unsafe fn store_32(self, when: bool, address: u64, value: u32, _: Policy) {
        // SAFETY: the caller's promise.
        unsafe { store(when, address, value) }
    }
    unsafe fn store_64(self, when: bool, address: u64, value: [u32; 2], _: Policy) {
        // SAFETY: the caller's promise.
        unsafe { store(when, address, value) }
    }
    unsafe fn store_128(self, when: bool, address: u64, value: [u32; 4], _: Policy) {
        // SAFETY: the caller's promise.
        unsafe { store(when, address, value) }
    }
    unsafe fn count(self, address: u64) {
        // SAFETY: the caller's promise; every access to the record is atomic.
        let field = unsafe { AtomicU64::from_ptr(address as usize as *mut u64) };
        field.fetch_add(1, Ordering::Relaxed);
    }
    unsafe fn lower(self, address: u64, value: u64) {
        // SAFETY: the caller's promise; every access to the record is atomic.
        let field = unsafe { AtomicU64::from_ptr(address as usize as *mut u64) };
        field.fetch_min(value, Ordering::Relaxed);
    }
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
    fn sqrt(self, value: f32) -> f32 {
        value.sqrt()
    }
    fn f16x2(self, low: f32, high: f32) -> u32 {
        u32::from(convert::f16_from_f32(low)) | u32::from(convert::f16_from_f32(high)) << 16
    }
    fn f16_to_f32(self, bits: u16) -> f32 {
        convert::f16_to_f32(bits)
    }
}

/// A name that is no kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownEntry;

/// Runs the kernel `entry` over a grid, one warp after the other.
///
/// # Errors
///
/// [`UnknownEntry`] where there is no such kernel.
///
/// # Safety
///
/// `params` describes live host memory as the kernel's contract demands, `grid` (blocks along x,
/// layers) and `threads` are those of [`crate::launch`].
pub unsafe fn run(
    entry: &str,
    grid: (u32, u32),
    threads: u32,
    params: &Params,
) -> Result<(), UnknownEntry> {
    macro_rules! kernel {
        ($($name:ident => $body:expr;)*) => {
            match entry {
                $(stringify!($name) => {
                    // SAFETY: the caller's promise.
                    over_grid(grid, threads, |lane| unsafe { $body(lane, params) });
                    Ok(())
                })*
                _ => Err(UnknownEntry),
            }
        };
    }
    kernels::for_each_entry!(kernel)
}

fn over_grid(grid: (u32, u32), threads: u32, kernel: impl Fn(Lane<'_>) + Sync) {
    let warp = Warp {
        barrier: Barrier::new(32),
        exchange: [const { AtomicU32::new(0) }; 32],
    };
    std::thread::scope(|scope| {
        for lane in 0..32 {
            let (warp, kernel) = (&warp, &kernel);
            scope.spawn(move || {
                for layer in 0..grid.1 {
                    for block in 0..grid.0 {
                        for first in (0..threads).step_by(32) {
                            kernel(Lane {
                                warp,
                                thread: first + lane,
                                block_threads: threads,
                                block,
                                blocks: grid.0,
                                layer,
                            });
                        }
                    }
                }
            });
        }
    });
}
