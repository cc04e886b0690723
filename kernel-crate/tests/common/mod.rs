//! Memory and numbers of the tests.
#![allow(dead_code, reason = "each test uses its part")]

use fused_kv_kernels::abi::{Code, Params, Status};
use fused_kv_kernels::convert;
use fused_kv_kernels::emulator::{Emulator, Permissions};
use fused_kv_kernels::launch::Launch;

/// SplitMix64: enough to fill tensors, without a dependency.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub fn value(&mut self) -> f32 {
        (self.below(1 << 20) as f32 / (1 << 18) as f32) - 2.0
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

pub fn size(code: Code) -> usize {
    match code {
        Code::F32 => 4,
        Code::Bf16 | Code::F16 => 2,
        _ => 1,
    }
}

pub fn encode(code: Code, value: f32) -> Vec<u8> {
    match code {
        Code::F32 => convert::f32_from_f32(value).to_le_bytes().to_vec(),
        Code::Bf16 => convert::bf16_from_f32(value).to_le_bytes().to_vec(),
        Code::F16 => convert::f16_from_f32(value).to_le_bytes().to_vec(),
        Code::E4M3 => vec![convert::e4m3_from_f32(value)],
        Code::E5M2 => vec![convert::e5m2_from_f32(value)],
    }
}

/// A tensor in memory aligned to 16 bytes, its first element `shift` bytes in.
pub struct Memory {
    pub words: Vec<u128>,
    pub code: Code,
    pub elements: usize,
    pub shift: usize,
}

impl Memory {
    pub fn new(code: Code, elements: usize, shift: usize) -> Self {
        let words = vec![u128::from_ne_bytes([0xA5; 16]); (elements * size(code) + shift) / 16 + 2];
        Self {
            words,
            code,
            elements,
            shift,
        }
    }

    pub fn random(code: Code, elements: usize, shift: usize, random: &mut Random) -> Self {
        let mut memory = Self::new(code, elements, shift);
        for i in 0..elements {
            let bytes = encode(code, random.value());
            let at = memory.shift + i * size(code);
            memory.bytes_mut()[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        memory
    }

    pub fn bytes(&self) -> &[u8] {
        let len = self.words.len() * 16;
        // SAFETY: the words are initialized and any byte of them may be read.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.words.len() * 16;
        // SAFETY: as above; every byte pattern is a valid word.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), len) }
    }

    pub fn address(&self) -> u64 {
        self.words.as_ptr() as u64 + self.shift as u64
    }

    /// Address and length of the elements, as permissions take them.
    pub fn range(&self) -> (u64, usize) {
        (self.address(), self.elements * size(self.code))
    }

    pub fn raw(&self, index: usize) -> &[u8] {
        let at = self.shift + index * size(self.code);
        &self.bytes()[at..at + size(self.code)]
    }

    pub fn get(&self, index: usize) -> f32 {
        let raw = self.raw(index);
        match self.code {
            Code::F32 => f32::from_le_bytes(raw.try_into().unwrap()),
            Code::Bf16 => convert::bf16_to_f32(u16::from_le_bytes(raw.try_into().unwrap())),
            Code::F16 => convert::f16_to_f32(u16::from_le_bytes(raw.try_into().unwrap())),
            Code::E4M3 => convert::e4m3_to_f32(raw[0]),
            Code::E5M2 => convert::e5m2_to_f32(raw[0]),
        }
    }
}

/// Runs a launch on the emulated device, which may read and write these addresses and lengths, and
/// the status record.
///
/// # Safety
///
/// `params` describes live memory, of which these are parts.
pub unsafe fn run(
    launch: &Launch,
    grid: (u32, u32),
    params: &Params,
    reads: &[(u64, usize)],
    writes: &[(u64, usize)],
) {
    let mut permissions = Permissions::default();
    for (address, bytes) in reads {
        permissions.allow_reads(*address, *bytes);
    }
    for (address, bytes) in writes {
        permissions.allow_writes(*address, *bytes);
    }
    permissions.allow_reports(params.status, size_of::<Status>());
    let mut emulator = Emulator::new(Some(permissions));
    // SAFETY: the caller's promise.
    let done = unsafe { emulator.launch(launch.entry, grid, launch.threads, params) };
    assert_eq!(done, Ok(()));
}
