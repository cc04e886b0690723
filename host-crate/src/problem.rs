//! A validated job as numbers: what the backends run from.

use fused_kv_kernels::abi::Status;

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
    /// The error that a status record stands for, if it stands for one.
    pub(crate) fn report(&self, status: &Status) -> Result<(), Error> {
        let table_rows = self.table_rows as u64;
        match status.positions() {
            Some(found) => Err(Error::PositionOutOfRange {
                token: found.token,
                position: found.value,
                table_rows,
                count: found.count,
            }),
            None => Ok(()),
        }
    }
}
