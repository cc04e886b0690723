//! A validated job as numbers: what the backends run from.

use fused_kv_kernels::abi::Status;
use fused_kv_kernels::arith::Reciprocal;

use crate::{Config, DType, Device, Error};

/// An input or output that passed validation. Strides are in bytes and cannot overflow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    /// Address of the first element.
    pub(crate) address: usize,
    pub(crate) dtype: DType,
    /// Byte strides of the leading dimensions (the innermost stride is the element size, except
    /// for the rank-1 `positions` and `slots`, whose only stride this is).
    pub(crate) strides: [i64; 3],
}

/// Where the rows go.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// `[L, T, H, D]` each; strides are layer, token, head.
    Dense { k: Operand, v: Operand },
    /// The pages of a KV pool.
    Pool(Pool),
}

/// Byte strides of one half of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolStrides {
    pub(crate) page: i64,
    /// A token in its page.
    pub(crate) token: i64,
    pub(crate) head: i64,
}

impl PoolStrides {
    /// The offset of a token; cannot overflow for a slot of the pool.
    pub(crate) fn offset(&self, page: i64, token: i64) -> i64 {
        page * self.page + token * self.token
    }
}

/// A KV pool that passed validation.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub(crate) dtype: DType,
    pub(crate) k: PoolStrides,
    pub(crate) v: PoolStrides,
    /// Tokens of a page, at least 1.
    pub(crate) page_size: usize,
    pub(crate) num_slots: usize,
    /// A slot that is skipped; negative when there is none.
    pub(crate) reserved_slot: i64,
    /// Strides: token.
    pub(crate) slots: Operand,
    /// Descales of K and of V of each layer, where the pool is FP8.
    descales: Option<[Vec<f32>; 2]>,
    /// Base address of K of each layer, then of V; then a [`Reciprocal`] of each descale of K, then
    /// of V.
    table: Vec<u64>,
    layers: usize,
}

impl Pool {
    #[allow(
        clippy::too_many_arguments,
        reason = "the fields, of which two are derived"
    )]
    pub(crate) fn new(
        dtype: DType,
        [k, v]: [PoolStrides; 2],
        page_size: usize,
        num_slots: usize,
        reserved_slot: i64,
        slots: Operand,
        bases: [Vec<u64>; 2],
        descales: Option<[Vec<f32>; 2]>,
    ) -> Self {
        let layers = bases[0].len();
        let mut table = bases.concat();
        for descale in descales.iter().flatten().flatten() {
            table.extend(Reciprocal::new(*descale).to_words());
        }
        Self {
            dtype,
            k,
            v,
            page_size,
            num_slots,
            reserved_slot,
            slots,
            descales,
            table,
            layers,
        }
    }

    /// Whether rows go to this slot: neither skipped nor past the end.
    pub(crate) fn holds(&self, slot: i64) -> bool {
        slot >= 0 && slot != self.reserved_slot && (slot as u64) < self.num_slots as u64
    }

    /// What the kernels read of the pool: see [`Self::table_at`].
    pub(crate) fn table(&self) -> &[u64] {
        &self.table
    }

    /// Base addresses of K and V of a layer.
    pub(crate) fn bases(&self, layer: usize) -> [usize; 2] {
        [
            self.table[layer] as usize,
            self.table[self.layers + layer] as usize,
        ]
    }

    /// Descales of K and V of a layer, where the pool is FP8.
    pub(crate) fn descales(&self, layer: usize) -> Option<[f32; 2]> {
        let [k, v] = self.descales.as_ref()?;
        Some([k[layer], v[layer]])
    }

    /// Addresses of the parts of a copy of the table at `address`: bases of K and of V, descales
    /// of K and of V (0 where there are none).
    pub(crate) fn table_at(&self, address: u64) -> [u64; 4] {
        let layers = self.layers as u64;
        let descales = address + 16 * layers;
        let [k, v] = if self.descales.is_some() {
            [descales, descales + 16 * layers]
        } else {
            [0, 0]
        };
        [address, address + 8 * layers, k, v]
    }
}

/// Everything a backend needs; every element that it names was checked to exist, except for what
/// only the data can tell (positions, slots).
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    pub(crate) device: Device,
    pub(crate) config: Config,
    pub(crate) tokens: usize,
    pub(crate) layers: usize,
    pub(crate) table_rows: usize,
    /// Strides: token, layer.
    pub(crate) kv: Operand,
    /// Strides: layer.
    pub(crate) weight: Operand,
    pub(crate) eps: Operand,
    /// Strides: row.
    pub(crate) table: Operand,
    /// Strides: token.
    pub(crate) positions: Operand,
    pub(crate) value_scale: Option<Operand>,
    pub(crate) target: Target,
}

impl Problem {
    /// The error that a status record stands for, if it stands for one: that of the lowest token.
    pub(crate) fn report(&self, status: &Status) -> Result<(), Error> {
        let position = status.positions().map(|found| Error::PositionOutOfRange {
            token: found.token,
            position: found.value,
            table_rows: self.table_rows as u64,
            count: found.count,
        });
        let num_slots = match &self.target {
            Target::Dense { .. } => 0,
            Target::Pool(pool) => pool.num_slots as u64,
        };
        let slot = status.slots().map(|found| Error::SlotOutOfRange {
            token: found.token,
            slot: found.value,
            num_slots,
            count: found.count,
        });
        let lowest = match (status.positions(), status.slots()) {
            (Some(positions), Some(slots)) if slots.token < positions.token => slot,
            _ => position.or(slot),
        };
        lowest.map_or(Ok(()), Err)
    }
}
