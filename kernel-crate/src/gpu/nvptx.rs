//! A GPU's thread in PTX: intrinsics for the indices, inline assembly for the rest, the same for
//! both code generators; what they do not share, shuffles and entry points, is in a file of each.
//!
//! No `asm!` here but a copy of a register is `pure`: loads are to keep the order they are written
//! in. They are no `ld.nc`
//! either, which could be moved in front of the wait for the kernel before this one.

use core::arch::{asm, nvptx};

use super::{Device, Policy, generator};

/// The thread of a GPU.
#[derive(Clone, Copy)]
pub(super) struct Gpu;

/// A predicated load: nothing is read, and zero given, where the predicate is false.
macro_rules! load {
    ($when:expr, $address:expr, $instruction:literal, $class:ident, $($zero:literal, $value:ident: $type:ty),+ $(; $policy:ident)?) => {{
        $(let $value: $type;)+
        asm!(
            "{{",
            ".reg .pred %when;",
            "setp.ne.u32 %when, {when}, 0;",
            $($zero,)+
            $instruction,
            "}}",
            when = in(reg32) $when as u32,
            address = in(reg64) $address,
            $($value = out($class) $value,)+
            $($policy = in(reg64) $policy.0,)?
            options(nomem, nostack)
        );
        ($($value),+)
    }};
}

/// A predicated store.
macro_rules! store {
    ($when:expr, $address:expr, $instruction:literal, $class:ident, $($name:ident = $value:expr),+ $(; $policy:ident)?) => {
        asm!(
            "{{",
            ".reg .pred %when;",
            "setp.ne.u32 %when, {when}, 0;",
            $instruction,
            "}}",
            when = in(reg32) $when as u32,
            address = in(reg64) $address,
            $($name = in($class) $value,)+
            $($policy = in(reg64) $policy.0,)?
            options(nostack)
        )
    };
}

impl Device for Gpu {
    #[inline(always)]
    fn thread(self) -> u32 {
        // SAFETY: reads a special register.
        unsafe { nvptx::_thread_idx_x() as u32 }
    }

    #[inline(always)]
    fn block_threads(self) -> u32 {
        // SAFETY: reads a special register.
        unsafe { nvptx::_block_dim_x() as u32 }
    }

    #[inline(always)]
    fn block_x(self) -> u32 {
        // SAFETY: reads a special register.
        unsafe { nvptx::_block_idx_x() as u32 }
    }

    #[inline(always)]
    fn blocks_x(self) -> u32 {
        // SAFETY: reads a special register.
        unsafe { nvptx::_grid_dim_x() as u32 }
    }

    #[inline(always)]
    fn blocks_y(self) -> u32 {
        // SAFETY: reads a special register.
        unsafe { nvptx::_grid_dim_y() as u32 }
    }

    #[inline(always)]
    fn block_y(self) -> u32 {
        // SAFETY: reads a special register.
        unsafe { nvptx::_block_idx_y() as u32 }
    }

    const OVERLAPS: bool = cfg!(any(fused_kv_overlap, target_feature = "compute_90"));

    #[cfg(any(fused_kv_overlap, target_feature = "compute_90"))]
    #[inline(always)]
    fn begin(self) {
        // The kernel behind this one may start as soon as every block of this one has, and waits
        // here in turn. Not `nomem`: no access may move in front of the wait.
        // SAFETY: waits; where the launch did not allow an early start, there is nothing to wait
        // for.
        unsafe {
            asm!(
                "griddepcontrol.launch_dependents;",
                "griddepcontrol.wait;",
                options(nostack)
            );
        }
    }

    #[inline(always)]
    fn keep_order(self) {
        // Orders the memory accesses of a warp's lanes: no assembler moves any across it.
        // SAFETY: every lane gets here (the trait's rule).
        unsafe { asm!("bar.warp.sync 0xffffffff;", options(nostack)) };
    }

    #[inline(always)]
    fn opaque(self, value: u64) -> u64 {
        let result: u64;
        // SAFETY: copies a register.
        unsafe {
            asm!("mov.u64 {result}, {value};", result = out(reg64) result,
                value = in(reg64) value, options(pure, nomem, nostack));
        }
        result
    }

    #[inline(always)]
    fn shuffle_xor(self, value: f32, mask: u32) -> f32 {
        // SAFETY: every lane gets here (the trait's rule).
        unsafe { generator::shuffle_xor(value, mask) }
    }

    #[inline(always)]
    fn shuffle_from(self, value: f32, lane: u32) -> f32 {
        // SAFETY: every lane gets here (the trait's rule).
        unsafe { generator::shuffle_from(value, lane) }
    }

    #[inline(always)]
    unsafe fn load_16(self, when: bool, address: u64) -> u16 {
        // SAFETY: the caller's promise.
        unsafe {
            load!(when, address, "@%when ld.global.u16 {a}, [{address}];", reg16,
                "mov.u16 {a}, 0;", a: u16)
        }
    }

    #[inline(always)]
    unsafe fn load_32(self, when: bool, address: u64) -> u32 {
        // SAFETY: the caller's promise.
        unsafe {
            load!(when, address, "@%when ld.global.u32 {a}, [{address}];", reg32,
                "mov.u32 {a}, 0;", a: u32)
        }
    }

    #[inline(always)]
    unsafe fn load_64(self, when: bool, address: u64, policy: Option<Policy>) -> [u32; 2] {
        // SAFETY: the caller's promise.
        let (a, b) = unsafe {
            match policy {
                Some(policy) => {
                    load!(when, address, "@%when ld.global.L2::cache_hint.v2.u32 {{{a}, {b}}}, [{address}], {policy};", reg32,
                        "mov.u32 {a}, 0;", a: u32, "mov.u32 {b}, 0;", b: u32; policy)
                }
                None => {
                    load!(when, address, "@%when ld.global.v2.u32 {{{a}, {b}}}, [{address}];", reg32,
                        "mov.u32 {a}, 0;", a: u32, "mov.u32 {b}, 0;", b: u32)
                }
            }
        };
        [a, b]
    }

    #[inline(always)]
    unsafe fn load_128(self, when: bool, address: u64, policy: Option<Policy>) -> [u32; 4] {
        // SAFETY: the caller's promise.
        let (a, b, c, d) = unsafe {
            match policy {
                Some(policy) => {
                    load!(when, address, "@%when ld.global.L2::cache_hint.v4.u32 {{{a}, {b}, {c}, {d}}}, [{address}], {policy};", reg32,
                        "mov.u32 {a}, 0;", a: u32, "mov.u32 {b}, 0;", b: u32,
                        "mov.u32 {c}, 0;", c: u32, "mov.u32 {d}, 0;", d: u32; policy)
                }
                None => {
                    load!(when, address, "@%when ld.global.v4.u32 {{{a}, {b}, {c}, {d}}}, [{address}];", reg32,
                        "mov.u32 {a}, 0;", a: u32, "mov.u32 {b}, 0;", b: u32,
                        "mov.u32 {c}, 0;", c: u32, "mov.u32 {d}, 0;", d: u32)
                }
            }
        };
        [a, b, c, d]
    }

    #[inline(always)]
    fn policy(self, keep: bool) -> Policy {
        let policy: u64;
        // SAFETY: arithmetic only.
        unsafe {
            asm!(
                "{{",
                ".reg .pred %keep;",
                ".reg .b64 %normal, %first;",
                "setp.ne.u32 %keep, {keep}, 0;",
                "createpolicy.fractional.L2::evict_normal.b64 %normal, 1.0;",
                "createpolicy.fractional.L2::evict_first.b64 %first, 1.0;",
                "selp.b64 {policy}, %normal, %first, %keep;",
                "}}",
                keep = in(reg32) keep as u32,
                policy = out(reg64) policy,
                options(nomem, nostack)
            );
        }
        Policy(policy)
    }

    #[inline(always)]
    fn policy_reused(self) -> Policy {
        let policy: u64;
        // SAFETY: arithmetic only.
        unsafe {
            asm!(
                "createpolicy.fractional.L2::evict_last.b64 {policy}, 1.0;",
                policy = out(reg64) policy,
                options(nomem, nostack)
            );
        }
        Policy(policy)
    }

    #[inline(always)]
    unsafe fn load_128_once(self, address: u64, policy: Policy) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "ld.global.L2::cache_hint.v4.u32 {{{a}, {b}, {c}, {d}}}, [{address}], {policy};",
                address = in(reg64) address,
                policy = in(reg64) policy.0,
                a = out(reg32) a,
                b = out(reg32) b,
                c = out(reg32) c,
                d = out(reg32) d,
                options(nomem, nostack)
            );
        }
        [a, b, c, d]
    }

    #[inline(always)]
    unsafe fn prefetch(self, address: u64) {
        // SAFETY: the caller's promise; nothing is written.
        unsafe {
            asm!("prefetch.global.L2 [{address}];", address = in(reg64) address, options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn store_8(self, when: bool, address: u64, value: u8) {
        // SAFETY: the caller's promise.
        unsafe {
            store!(
                when,
                address,
                "@%when st.global.u8 [{address}], {a};",
                reg16,
                a = value as u16
            );
        }
    }

    #[inline(always)]
    unsafe fn store_16(self, when: bool, address: u64, value: u16) {
        // SAFETY: the caller's promise.
        unsafe {
            store!(
                when,
                address,
                "@%when st.global.u16 [{address}], {a};",
                reg16,
                a = value
            );
        }
    }

    #[inline(always)]
    unsafe fn store_32(self, when: bool, address: u64, value: u32, policy: Policy) {
        // SAFETY: the caller's promise.
        unsafe {
            store!(
                when,
                address,
                "@%when st.global.L2::cache_hint.u32 [{address}], {a}, {policy};",
                reg32,
                a = value;
                policy
            );
        }
    }

    #[inline(always)]
    unsafe fn store_64(self, when: bool, address: u64, value: [u32; 2], policy: Policy) {
        // SAFETY: the caller's promise.
        unsafe {
            store!(
                when,
                address,
                "@%when st.global.L2::cache_hint.v2.u32 [{address}], {{{a}, {b}}}, {policy};",
                reg32,
                a = value[0],
                b = value[1];
                policy
            );
        }
    }

    #[inline(always)]
    unsafe fn store_128(self, when: bool, address: u64, value: [u32; 4], policy: Policy) {
        // SAFETY: the caller's promise.
        unsafe {
            store!(
                when,
                address,
                "@%when st.global.L2::cache_hint.v4.u32 [{address}], {{{a}, {b}, {c}, {d}}}, {policy};",
                reg32,
                a = value[0],
                b = value[1],
                c = value[2],
                d = value[3];
                policy
            );
        }
    }

    #[inline(always)]
    unsafe fn count(self, address: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("red.global.add.u64 [{address}], {one};", address = in(reg64) address,
                one = in(reg64) 1u64, options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn lower(self, address: u64, value: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("red.global.min.u64 [{address}], {value};", address = in(reg64) address,
                value = in(reg64) value, options(nostack));
        }
    }

    #[inline(always)]
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        let result: u32;
        // SAFETY: arithmetic only.
        unsafe {
            asm!("{{", ".reg .f32 %a, %b, %c;", "mov.b32 %a, {a};", "mov.b32 %b, {b};", "mov.b32 %c, {c};",
                "fma.rn.f32 %a, %a, %b, %c;", "mov.b32 {result}, %a;", "}}",
                a = in(reg32) a.to_bits(), b = in(reg32) b.to_bits(), c = in(reg32) c.to_bits(),
                result = out(reg32) result, options(nomem, nostack));
        }
        f32::from_bits(result)
    }

    #[inline(always)]
    fn sqrt(self, value: f32) -> f32 {
        let result: u32;
        // SAFETY: arithmetic only.
        unsafe {
            asm!("{{", ".reg .f32 %x;", "mov.b32 %x, {value};", "sqrt.rn.f32 %x, %x;", "mov.b32 {result}, %x;", "}}",
                value = in(reg32) value.to_bits(), result = out(reg32) result, options(nomem, nostack));
        }
        f32::from_bits(result)
    }

    #[inline(always)]
    fn bf16x2(self, low: f32, high: f32) -> u32 {
        let result: u32;
        // SAFETY: arithmetic only.
        unsafe {
            asm!("cvt.rn.bf16x2.f32 {result}, {high}, {low};", result = out(reg32) result,
                high = in(reg32) high.to_bits(), low = in(reg32) low.to_bits(), options(nomem, nostack));
        }
        result
    }

    #[inline(always)]
    fn f16x2(self, low: f32, high: f32) -> u32 {
        let result: u32;
        // SAFETY: arithmetic only.
        unsafe {
            asm!("cvt.rn.f16x2.f32 {result}, {high}, {low};", result = out(reg32) result,
                high = in(reg32) high.to_bits(), low = in(reg32) low.to_bits(), options(nomem, nostack));
        }
        result
    }

    #[inline(always)]
    fn f16_to_f32(self, bits: u16) -> f32 {
        let result: u32;
        // SAFETY: arithmetic only.
        unsafe {
            asm!("cvt.f32.f16 {result}, {bits};", result = out(reg32) result,
                bits = in(reg16) bits, options(nomem, nostack));
        }
        f32::from_bits(result)
    }

    #[cfg(any(fused_kv_fp8, target_feature = "compute_89"))]
    #[inline(always)]
    fn e4m3x2(self, low: f32, high: f32) -> u16 {
        let result: u16;
        // SAFETY: arithmetic only.
        unsafe {
            asm!("cvt.rn.satfinite.e4m3x2.f32 {result}, {high}, {low};", result = out(reg16) result,
                high = in(reg32) high.to_bits(), low = in(reg32) low.to_bits(), options(nomem, nostack));
        }
        result
    }

    #[cfg(any(fused_kv_fp8, target_feature = "compute_89"))]
    #[inline(always)]
    fn e5m2x2(self, low: f32, high: f32) -> u16 {
        let result: u16;
        // SAFETY: arithmetic only.
        unsafe {
            asm!("cvt.rn.satfinite.e5m2x2.f32 {result}, {high}, {low};", result = out(reg16) result,
                high = in(reg32) high.to_bits(), low = in(reg32) low.to_bits(), options(nomem, nostack));
        }
        result
    }
}
