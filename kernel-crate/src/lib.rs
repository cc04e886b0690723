//! Device side of fused-kv.
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, stdarch_nvptx, asm_experimental_arch)
)]
#![no_std]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

pub mod abi;
pub mod arith;
pub mod convert;
#[cfg(not(target_arch = "nvptx64"))]
pub mod emulator;
pub mod gpu;
pub mod kernels;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
