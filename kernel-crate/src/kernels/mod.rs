//! The kernels, written once over [`Device`].
//!
//! [`vector`] moves 16 bytes at a time and serves everything whose rows are aligned and cut into
//! whole chunks; [`generic`] serves every shape, stride and alignment of the contract.

pub mod generic;
pub mod vector;

/// Calls `$entries! { name => body; ... }` with every kernel: the one list that each code
/// generator turns into entry points of these names.
#[macro_export]
macro_rules! for_each_entry {
    ($entries:ident) => {
        $entries! {
            fused_kv_vector_bf16_d128 => $crate::kernels::vector::run::<_, $crate::kernels::spec::Bf16D128>;
            fused_kv_vector_bf16 => $crate::kernels::vector::run::<_, $crate::kernels::spec::Bf16>;
            fused_kv_vector_bf16_any => $crate::kernels::vector::run::<_, $crate::kernels::spec::Bf16Any>;
            fused_kv_vector_f16 => $crate::kernels::vector::run::<_, $crate::kernels::spec::F16>;
            fused_kv_vector_f16_any => $crate::kernels::vector::run::<_, $crate::kernels::spec::F16Any>;
            fused_kv_vector_f32 => $crate::kernels::vector::run::<_, $crate::kernels::spec::F32>;
            fused_kv_vector_f32_any => $crate::kernels::vector::run::<_, $crate::kernels::spec::F32Any>;
            fused_kv_generic_2_bf16 => $crate::kernels::generic::run::<_, 2, 0, { $crate::kernels::BF16 }, false>;
            fused_kv_generic_2_f16 => $crate::kernels::generic::run::<_, 2, 0, { $crate::kernels::F16 }, false>;
            fused_kv_generic_2_f32 => $crate::kernels::generic::run::<_, 2, 0, { $crate::kernels::F32 }, false>;
            fused_kv_generic_shifted_bf16 => $crate::kernels::generic::run::<_, 2, 1, { $crate::kernels::BF16 }, false>;
            fused_kv_generic_shifted_f16 => $crate::kernels::generic::run::<_, 2, 1, { $crate::kernels::F16 }, false>;
            fused_kv_generic_shifted_f32 => $crate::kernels::generic::run::<_, 2, 1, { $crate::kernels::F32 }, false>;
            fused_kv_generic_1_bf16 => $crate::kernels::generic::run::<_, 1, 0, { $crate::kernels::BF16 }, false>;
            fused_kv_generic_1_f16 => $crate::kernels::generic::run::<_, 1, 0, { $crate::kernels::F16 }, false>;
            fused_kv_generic_1_f32 => $crate::kernels::generic::run::<_, 1, 0, { $crate::kernels::F32 }, false>;
            fused_kv_pool_bf16_d128 => $crate::kernels::vector::run::<_, $crate::kernels::spec::Bf16D128Pool>;
            fused_kv_pool_bf16_d128_e4m3 => $crate::kernels::vector::run::<_, $crate::kernels::spec::Bf16D128PoolE4M3>;
            fused_kv_pool_bf16_d128_e5m2 => $crate::kernels::vector::run::<_, $crate::kernels::spec::Bf16D128PoolE5M2>;
            fused_kv_pool_bf16_d128_any => $crate::kernels::vector::run::<_, $crate::kernels::spec::Bf16D128PoolAny>;
            fused_kv_pool_bf16 => $crate::kernels::vector::run::<_, $crate::kernels::spec::Bf16Pool>;
            fused_kv_pool_f16 => $crate::kernels::vector::run::<_, $crate::kernels::spec::F16Pool>;
            fused_kv_pool_f32 => $crate::kernels::vector::run::<_, $crate::kernels::spec::F32Pool>;
            fused_kv_pool_generic_2 => $crate::kernels::generic::run::<_, 2, 0, { $crate::kernels::vector::ANY }, true>;
            fused_kv_pool_generic_shifted => $crate::kernels::generic::run::<_, 2, 1, { $crate::kernels::vector::ANY }, true>;
            fused_kv_pool_generic_1 => $crate::kernels::generic::run::<_, 1, 0, { $crate::kernels::vector::ANY }, true>;
        }
    };
}
pub use for_each_entry;

use crate::abi::{Code, Params, Status, flags};
use crate::arith::Reciprocal;
use crate::convert;
use crate::gpu::Device;

/// [`Code::Bf16`] as a constant parameter.
pub const BF16: u32 = Code::Bf16 as u32;
/// [`Code::F16`] as a constant parameter.
pub const F16: u32 = Code::F16 as u32;
/// [`Code::F32`] as a constant parameter.
pub const F32: u32 = Code::F32 as u32;
const E4M3: u32 = Code::E4M3 as u32;
const E5M2: u32 = Code::E5M2 as u32;

/// What the vector kernels are specialised for.
pub mod spec {
    use super::vector::{ANY, Spec};
    use super::{BF16, E4M3, E5M2, F16 as HALF, F32 as SINGLE};

    macro_rules! specs {
        ($($(#[$doc:meta])* $name:ident: $kv:expr, $aux:expr, $out:expr, d128 $d128:literal, pool $pool:literal;)*) => {$(
            $(#[$doc])*
            pub enum $name {}
            impl Spec for $name {
                const KV: u32 = $kv;
                const AUX: u32 = $aux;
                const OUT: u32 = $out;
                const D128: bool = $d128;
                const POOL: bool = $pool;
            }
        )*};
    }
    specs! {
        /// bf16 throughout, D = R = 128, neox.
        Bf16D128: BF16, BF16, BF16, d128 true, pool false;
        /// bf16 throughout.
        Bf16: BF16, BF16, BF16, d128 false, pool false;
        /// bf16, weights and table of any type.
        Bf16Any: BF16, ANY, BF16, d128 false, pool false;
        /// f16 throughout.
        F16: HALF, HALF, HALF, d128 false, pool false;
        /// f16, weights and table of any type.
        F16Any: HALF, ANY, HALF, d128 false, pool false;
        /// f32 throughout.
        F32: SINGLE, SINGLE, SINGLE, d128 false, pool false;
        /// f32, weights and table of any type.
        F32Any: SINGLE, ANY, SINGLE, d128 false, pool false;
        /// To a pool: bf16 throughout, D = R = 128, neox.
        Bf16D128Pool: BF16, BF16, BF16, d128 true, pool true;
        /// To a pool of e4m3fn: bf16, with bf16 weights and table, D = R = 128, neox.
        Bf16D128PoolE4M3: BF16, BF16, E4M3, d128 true, pool true;
        /// To a pool of e5m2: bf16, with bf16 weights and table, D = R = 128, neox.
        Bf16D128PoolE5M2: BF16, BF16, E5M2, d128 true, pool true;
        /// To a pool of any type: bf16, with bf16 weights and table, D = R = 128, neox.
        Bf16D128PoolAny: BF16, BF16, ANY, d128 true, pool true;
        /// To a pool of any type: bf16, weights and table of any type.
        Bf16Pool: BF16, ANY, ANY, d128 false, pool true;
        /// To a pool of any type: f16, weights and table of any type.
        F16Pool: HALF, ANY, ANY, d128 false, pool true;
        /// To a pool of any type: f32, weights and table of any type.
        F32Pool: SINGLE, ANY, ANY, d128 false, pool true;
    }
}

/// Bytes of an element.
#[inline(always)]
const fn size(dtype: u32) -> u32 {
    // Selects: a `match` would become a table in memory.
    if dtype == F32 {
        4
    } else if dtype < F32 {
        2
    } else {
        1
    }
}

/// `base + index * stride`, in 64 bits; addresses wrap as the strides may be negative.
#[inline(always)]
fn at(base: u64, index: u32, stride: i64) -> u64 {
    base.wrapping_add((index as i64).wrapping_mul(stride) as u64)
}

/// A 16-bit float as f32.
#[inline(always)]
fn widen(d: impl Device, dtype: u32, bits: u16) -> f32 {
    if dtype == BF16 {
        convert::bf16_to_f32(bits)
    } else {
        d.f16_to_f32(bits)
    }
}

/// Two f32 as a pair of 16-bit floats.
#[inline(always)]
fn narrow(d: impl Device, dtype: u32, low: f32, high: f32) -> u32 {
    if dtype == BF16 {
        d.bf16x2(low, high)
    } else {
        d.f16x2(low, high)
    }
}

/// Two f32 as a pair of 8-bit floats.
#[inline(always)]
fn narrow_8(d: impl Device, dtype: u32, low: f32, high: f32) -> u16 {
    if dtype == E4M3 {
        d.e4m3x2(low, high)
    } else {
        d.e5m2x2(low, high)
    }
}

/// An f32 as pools store it. Widened NaNs keep their payload, so a pool of f32 needs more than the
/// hardware's own canonical NaN.
#[inline(always)]
fn pool_f32(value: f32) -> f32 {
    f32::from_bits(convert::f32_from_f32(value))
}

/// Layer of this block, and which of the groups of rows of that layer it takes. `choice`: whether the
/// launch decides about the order ([`flags::LAYERS_FIRST`]).
#[inline(always)]
fn layer_and_group(d: impl Device, p: &Params, choice: bool) -> (u32, u32) {
    let (x, y) = (d.block_x(), d.block_y());
    if !choice {
        return (y, x);
    }
    // No branches: they would delay the first loads.
    let layers_first = p.flags & flags::LAYERS_FIRST != 0;
    let (layer, group) = if layers_first { (x, y) } else { (y, x) };
    // A token's rows often lie at the same place of every layer's pool, and so in the same banks of
    // memory: within eight groups each layer takes another order. A group and its partner change
    // places; one without a partner keeps its own.
    let other = group ^ (layer & 7);
    let exists = layers_first & (other < d.blocks_y());
    (layer, if exists { other } else { group })
}

/// Whether this block is to bring what it reads into the second-level cache before it waits for the
/// kernel in front of it.
#[inline(always)]
fn is_early<D: Device>(d: D, p: &Params) -> bool {
    // Only small jobs have early blocks; with others the number may wrap.
    let block = d
        .block_y()
        .wrapping_mul(d.blocks_x())
        .wrapping_add(d.block_x());
    D::OVERLAPS && block < p.early_blocks
}

/// Element `index` of an array of 32-bit floats, or 0.
///
/// # Safety
///
/// As for [`Device::load_16`], for that element.
#[inline(always)]
unsafe fn load_f32(d: impl Device, when: bool, base: u64, index: u32) -> f32 {
    // SAFETY: the caller's promise.
    f32::from_bits(unsafe { d.load_32(when, at(base, index, 4)) })
}

/// Element `index` of an array of reciprocals, or zeros.
///
/// # Safety
///
/// As for [`Device::load_16`], for that element.
#[inline(always)]
unsafe fn load_reciprocal(d: impl Device, when: bool, base: u64, index: u32) -> Reciprocal {
    let address = at(base, index, 16);
    // SAFETY: the caller's promise.
    unsafe {
        Reciprocal::from_words([
            d.load_64(when, address, None),
            d.load_64(when, address.wrapping_add(8), None),
        ])
    }
}

/// Where the rows of a token go.
#[derive(Clone, Copy)]
struct Destination {
    k: u64,
    v: u64,
}

/// A token of this launch, as far as it decides what happens to its rows.
#[derive(Clone, Copy)]
struct Token {
    /// Its rows are written.
    write: bool,
    /// Its row of the table.
    table: u64,
    destination: Destination,
}

/// What memory says of a token: loaded early, looked at late.
#[derive(Clone, Copy)]
struct Place {
    position: Index,
    slot: Index,
    /// Base addresses of the layer in the pool.
    bases: [[u32; 2]; 2],
    layer: u32,
}

impl Place {
    /// Issues the loads.
    ///
    /// # Safety
    ///
    /// `token` and `layer` are of this launch.
    #[inline(always)]
    unsafe fn load(d: impl Device, p: &Params, pool: bool, token: u32, layer: u32) -> Self {
        // SAFETY: every token has a position and, with a pool, a slot; every layer of a pool has
        // two bases.
        unsafe {
            Self {
                position: Index::load(
                    d,
                    at(p.positions, token, p.position),
                    p.flags & flags::POSITIONS_I64 != 0,
                ),
                slot: if pool {
                    Index::load(
                        d,
                        at(p.slots, token, p.slot),
                        p.flags & flags::SLOTS_I64 != 0,
                    )
                } else {
                    Index([0; 2])
                },
                bases: if pool {
                    [
                        d.load_64(true, at(p.k_out, layer, 8), None),
                        d.load_64(true, at(p.v_out, layer, 8), None),
                    ]
                } else {
                    [[0; 2]; 2]
                },
                layer,
            }
        }
    }

    /// Finds table row and destination.
    #[inline(always)]
    fn resolve(self, p: &Params, pool: bool, token: u32) -> Token {
        let mut write = true;
        let destination;
        if pool {
            let slot = self.slot.value();
            // The sign is tested before any division.
            write = self.has_slot(p) && slot < p.num_slots;
            let (page, inside) = if p.page_shift < 64 {
                (slot >> p.page_shift, slot & ((1 << p.page_shift) - 1))
            } else {
                // Such pools have fewer than 2^31 slots.
                let (page, inside) = p.page_divisor.div_rem(if write { slot as u32 } else { 0 });
                (page as i64, inside as i64)
            };
            let base = |words: [u32; 2]| words[0] as u64 | (words[1] as u64) << 32;
            let offset = |outer: i64, token: i64| {
                page.wrapping_mul(outer)
                    .wrapping_add(inside.wrapping_mul(token)) as u64
            };
            destination = Destination {
                k: base(self.bases[0]).wrapping_add(offset(p.k_outer, p.k_token)),
                v: base(self.bases[1]).wrapping_add(offset(p.v_outer, p.v_token)),
            };
        } else {
            destination = Destination {
                k: at(at(p.k_out, self.layer, p.k_outer), token, p.k_token),
                v: at(at(p.v_out, self.layer, p.v_outer), token, p.v_token),
            };
        }
        Token {
            write: write && self.has_row(p),
            table: p
                .cos_sin_cache
                .wrapping_add(self.position.value().wrapping_mul(p.table_row) as u64),
            destination,
        }
    }

    /// Whether the token goes to a slot at all, be it one of the pool or one past its end.
    #[inline(always)]
    fn has_slot(self, p: &Params) -> bool {
        let slot = self.slot.value();
        slot >= 0 && slot != p.reserved_slot
    }

    /// Whether the table has a row for the token's position.
    #[inline(always)]
    fn has_row(self, p: &Params) -> bool {
        // Negative positions are large as unsigned ones.
        (self.position.value() as u64) < p.table_rows as u64
    }
}

/// Reports what is out of range of a token that is not written, if anything is. Called by exactly
/// one thread a token over the whole grid; it reads position and slot again, so that no register
/// has to hold them for this rare case.
///
/// # Safety
///
/// `p` describes live tensors, `token` is of this launch.
#[inline(always)]
unsafe fn report_skipped(d: impl Device, p: &Params, pool: bool, token: u32) {
    if p.flags & flags::REPORT == 0 {
        return;
    }
    // SAFETY: the caller's promise; the status record is live for the launch.
    unsafe {
        let place = Place::load(d, p, pool, token, 0);
        let slot = place.slot.value();
        let (field, value) = if pool && !place.has_slot(p) {
            return;
        } else if pool && slot >= p.num_slots {
            (core::mem::offset_of!(Status, bad_slots), slot)
        } else {
            let position = place.position.value();
            (core::mem::offset_of!(Status, bad_positions), position)
        };
        let (high, low) = Status::halves(p.first_token + token, value);
        report(d, p.status + field as u64, high, low);
    }
}

/// An i64 or i32 as loaded: low half, high half.
#[derive(Clone, Copy)]
struct Index([u32; 2]);

impl Index {
    /// # Safety
    ///
    /// As for [`Device::load_16`].
    #[inline(always)]
    unsafe fn load(d: impl Device, address: u64, wide: bool) -> Self {
        // SAFETY: the caller's promise. The low half of an i64 comes first: little endian.
        unsafe {
            let low = d.load_32(true, address);
            let high = d.load_32(wide, address.wrapping_add(4));
            Self([
                low,
                if wide {
                    high
                } else {
                    ((low as i32) >> 31) as u32
                },
            ])
        }
    }

    #[inline(always)]
    fn value(self) -> i64 {
        (self.0[0] as u64 | (self.0[1] as u64) << 32) as i64
    }
}

/// Adds an offender to the counter at `address` and the two minima behind it.
///
/// # Safety
///
/// `address` is that of a counter in a live status record.
#[inline(always)]
unsafe fn report(d: impl Device, address: u64, high: u64, low: u64) {
    // SAFETY: the caller's promise; the three fields follow each other.
    unsafe {
        d.count(address);
        d.lower(address + 8, high);
        d.lower(address + 16, low);
    }
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(Status, position_high) == offset_of!(Status, bad_positions) + 8);
    assert!(offset_of!(Status, position_low) == offset_of!(Status, bad_positions) + 16);
    assert!(offset_of!(Status, slot_high) == offset_of!(Status, bad_slots) + 8);
    assert!(offset_of!(Status, slot_low) == offset_of!(Status, bad_slots) + 16);
};
