//! What host and device agree on: the parameter struct of every kernel, the status record, and
//! the codes in them.
//!
//! Every address is a device address, every stride is in bytes, every kernel takes one [`Params`]
//! by value. Alignment stays at 8: code generators disagree on by-value arguments aligned more
//! strictly.

/// Element types as the kernels number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    /// `bfloat16`.
    Bf16 = 0,
    /// `float16`.
    F16 = 1,
    /// `float32`.
    F32 = 2,
    /// `float8_e4m3fn`, outputs to a pool only.
    E4M3 = 3,
    /// `float8_e5m2`, outputs to a pool only.
    E5M2 = 4,
}

/// Bits of [`Params::flags`].
pub mod flags {
    /// Pairs `(2i, 2i+1)` are rotated instead of `(i, i + R/2)`.
    pub const INTERLEAVED: u32 = 1 << 0;
    /// The effective norm weight is `1 + w`.
    pub const OFFSET_WEIGHT: u32 = 1 << 1;
    /// `positions` are i64 (else i32).
    pub const POSITIONS_I64: u32 = 1 << 2;
    /// `slots` are i64 (else i32).
    pub const SLOTS_I64: u32 = 1 << 3;
    /// This launch reports bad positions and slots (a job split by layers reports once).
    pub const REPORT: u32 = 1 << 4;
    /// Blocks along x are layers, those along y groups of rows, which each layer takes in an order of
    /// its own (else x are groups in order, y layers); of launches into a pool, where the kernel has the
    /// choice.
    pub const LAYERS_FIRST: u32 = 1 << 5;
}

/// A divisor in the form of a multiplication, exact for every dividend below 2^31.
///
/// Source: Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (1994):
/// with `s = ceil(log2 d)` and `m = floor(2^(31+s) / d) + 1`, `n / d = (n * m) >> (31 + s)`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FastDivisor {
    /// The divisor itself.
    pub divisor: u32,
    /// `m` above.
    pub multiplier: u32,
    /// `31 + s` above.
    pub shift: u32,
}

impl FastDivisor {
    /// Prepares division, on the host, by `divisor`, which must be from 1 to 2^31 - 1.
    #[cfg(not(target_arch = "nvptx64"))]
    pub const fn new(divisor: u32) -> Self {
        debug_assert!(divisor > 0 && divisor < 1 << 31);
        let ceil_log2 = 32 - (divisor - 1).leading_zeros();
        let shift = 31 + ceil_log2;
        Self {
            divisor,
            multiplier: ((1u64 << shift) / divisor as u64 + 1) as u32,
            shift,
        }
    }

    /// Quotient and remainder of `dividend`, which must be below 2^31.
    #[inline(always)]
    pub const fn div_rem(self, dividend: u32) -> (u32, u32) {
        let quotient = ((dividend as u64 * self.multiplier as u64) >> self.shift) as u32;
        (quotient, dividend - quotient * self.divisor)
    }
}

/// The only argument of every kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Params {
    /// `kv[first token, first layer, 0]`.
    pub kv: u64,
    /// Dense: `k_out[0, 0, 0, 0]`. Pool: an array of one K base address a layer.
    pub k_out: u64,
    /// Dense: `v_out[0, 0, 0, 0]`. Pool: an array of one V base address a layer.
    pub v_out: u64,
    /// `k_norm_weight[0, 0]`.
    pub k_norm_weight: u64,
    /// `eps[0]`, f32, contiguous.
    pub eps: u64,
    /// `cos_sin_cache[0, 0]`.
    pub cos_sin_cache: u64,
    /// `positions[0]`.
    pub positions: u64,
    /// `value_scale[0]`, f32, contiguous; 0 when V is copied.
    pub value_scale: u64,
    /// `slots[0]` (pool only).
    pub slots: u64,
    /// `k_descale` of the first layer as a [`Reciprocal`](crate::arith::Reciprocal), contiguous; 0
    /// when there is none (only 8-bit pools have descales).
    pub k_descale: u64,
    /// `v_descale` likewise.
    pub v_descale: u64,
    /// The [`Status`] record.
    pub status: u64,

    /// Byte stride of a token of `kv`.
    pub kv_token: i64,
    /// Byte stride of a layer of `kv`.
    pub kv_layer: i64,
    /// Byte distance from the first K head to the first V head of one row of `kv`.
    pub kv_value: i64,
    /// Byte stride of a layer of `k_norm_weight`.
    pub weight_layer: i64,
    /// Byte stride of a row of the table.
    pub table_row: i64,
    /// Rows of the table (P).
    pub table_rows: i64,
    /// Byte stride of `positions`.
    pub position: i64,
    /// Byte stride of `slots`.
    pub slot: i64,
    /// Byte stride of a layer (dense) or of a page (pool) of K.
    pub k_outer: i64,
    /// Byte stride of a token (dense) or of a token in its page (pool) of K.
    pub k_token: i64,
    /// Byte stride of a head of K.
    pub k_head: i64,
    /// As `k_outer`, of V.
    pub v_outer: i64,
    /// As `k_token`, of V.
    pub v_token: i64,
    /// As `k_head`, of V.
    pub v_head: i64,
    /// Slots in the pool; a slot at or above it is reported.
    pub num_slots: i64,
    /// A slot that is skipped like a negative one; negative when there is none.
    pub reserved_slot: i64,

    /// Rows of a layer in this launch: tokens times heads (vector kernels), or tokens times
    /// batches of heads (generic kernels).
    pub rows: u32,
    /// Index of this launch's first token within the job, for the status record.
    pub first_token: u32,
    /// KV heads (H).
    pub heads: u32,
    /// Elements of a head (D).
    pub head_dim: u32,
    /// Rotated elements of a head (R).
    pub rotary_dim: u32,
    /// [`Code`] of `kv`.
    pub kv_dtype: u32,
    /// [`Code`] of `k_norm_weight`.
    pub weight_dtype: u32,
    /// [`Code`] of `cos_sin_cache`.
    pub table_dtype: u32,
    /// [`Code`] of the outputs.
    pub out_dtype: u32,
    /// Bits of [`flags`].
    pub flags: u32,
    /// log2 of the lanes that share the sum of one row.
    pub lane_shift: u32,
    /// Vector kernels: distance, in chunks, between the two chunks of a rotated lane; 0 where no
    /// lane holds a rotated pair of chunks (interleaved style).
    pub rotated: u32,
    /// Vector kernels: the same distance for the other lanes.
    pub rest: u32,
    /// So many blocks, counted in the order of the grid (x first), start to bring their rows into the
    /// second-level cache before they wait for the kernel in front of them. 0 but for small jobs.
    /// Where it is not 0, and in every launch into a pool, blocks leave their lines in that cache.
    pub early_blocks: u32,
    /// Vector kernels: prefetches for a row of K, as for one of V: its bytes over the 128 of a line,
    /// rounded up. (The last line of a row that is not aligned to lines is left to its load.)
    pub row_lines: u32,
    /// log2 of the page size when that is a power of two, else `u32::MAX` (pool only).
    pub page_shift: u32,
    /// Division of a row index into token and head (or batch of heads).
    pub row_divisor: FastDivisor,
    /// Division of a slot into page and token in page (pool only, no power of two).
    pub page_divisor: FastDivisor,
}

/// What the rows tell: one record in device memory, [`Status::CLEAR`] before the first run.
///
/// The first offender must be the lowest token, whatever order the blocks ran in. Each offending
/// token does two atomic minima, of `token << 32 | high half of the value` and of
/// `token << 32 | low half`: both keep the halves of the same, lowest, token.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Tokens whose position is outside the table.
    pub bad_positions: u64,
    /// Minimum of token and high half of its position.
    pub position_high: u64,
    /// Minimum of token and low half of its position.
    pub position_low: u64,
    /// Tokens whose slot is past the end of the pool.
    pub bad_slots: u64,
    /// Minimum of token and high half of its slot.
    pub slot_high: u64,
    /// Minimum of token and low half of its slot.
    pub slot_low: u64,
}

/// An offending token and the value it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offender {
    /// Number of offending tokens.
    pub count: u64,
    /// The lowest of them.
    pub token: u64,
    /// Its position or slot.
    pub value: i64,
}

impl Status {
    /// Nothing to report.
    pub const CLEAR: Self = Self {
        bad_positions: 0,
        position_high: u64::MAX,
        position_low: u64::MAX,
        bad_slots: 0,
        slot_high: u64::MAX,
        slot_low: u64::MAX,
    };

    /// The halves to store for a token and its value.
    pub const fn halves(token: u32, value: i64) -> (u64, u64) {
        let token = (token as u64) << 32;
        (
            token | (value as u64 >> 32),
            token | (value as u64 & 0xffff_ffff),
        )
    }

    const fn offender(count: u64, high: u64, low: u64) -> Option<Offender> {
        if count == 0 {
            return None;
        }
        Some(Offender {
            count,
            token: high >> 32,
            value: ((high << 32) | (low & 0xffff_ffff)) as i64,
        })
    }

    /// The tokens whose position is outside the table.
    pub const fn positions(&self) -> Option<Offender> {
        Self::offender(self.bad_positions, self.position_high, self.position_low)
    }

    /// The tokens whose slot is past the end of the pool.
    pub const fn slots(&self) -> Option<Offender> {
        Self::offender(self.bad_slots, self.slot_high, self.slot_low)
    }
}

/// Version of this layout; PTX manifests carry it, and a host refuses PTX of another.
pub const ABI_VERSION: u32 = 3;

const _: () = {
    use core::mem::{align_of, offset_of, size_of};
    assert!(size_of::<Params>() == 12 * 8 + 16 * 8 + 16 * 4 + 2 * 12);
    assert!(align_of::<Params>() == 8);
    assert!(offset_of!(Params, kv_token) == 96);
    assert!(offset_of!(Params, rows) == 224);
    assert!(offset_of!(Params, row_divisor) == 288);
    assert!(size_of::<Status>() == 48);
};
