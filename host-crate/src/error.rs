//! The one error type of the library: each failure is its own variant and carries its facts.

use std::fmt;

use thiserror::Error as ThisError;

use crate::{DType, Device};

/// The tensor (or tensor list) that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Argument {
    /// The stacked projection, `[T, L, 2*H*D]`.
    Kv,
    /// RMSNorm weights of K, `[L, D]`.
    KNormWeight,
    /// RMSNorm epsilon of each layer, `[L]`.
    Eps,
    /// RoPE table, `[P, R]`: cosines, then sines.
    CosSinCache,
    /// Position of each token, `[T]`.
    Positions,
    /// Attention value scale of each layer, `[L]`.
    ValueScale,
    /// Destination of K, `[L, T, H, D]`.
    KOut,
    /// Destination of V, `[L, T, H, D]`.
    VOut,
    /// Slot of each token in the pool, `[T]`.
    Slots,
    /// K half of the KV pool, one tensor a layer.
    KPool,
    /// V half of the KV pool, one tensor a layer.
    VPool,
    /// FP8 descale of K for each layer, `[L]`.
    KDescale,
    /// FP8 descale of V for each layer, `[L]`.
    VDescale,
}

impl Argument {
    /// The name that messages and files use, for example `v_out`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::KNormWeight => "k_norm_weight",
            Self::Eps => "eps",
            Self::CosSinCache => "cos_sin_cache",
            Self::Positions => "positions",
            Self::ValueScale => "value_scale",
            Self::KOut => "k_out",
            Self::VOut => "v_out",
            Self::Slots => "slots",
            Self::KPool => "k_pool",
            Self::VPool => "v_pool",
            Self::KDescale => "k_descale",
            Self::VDescale => "v_descale",
        }
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A tensor's shape, written as Python writes a tuple: `(5, 17, 8, 128)`, `(5,)`, `()`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape(pub Vec<usize>);

impl From<&[usize]> for Shape {
    fn from(shape: &[usize]) -> Self {
        Self(shape.to_vec())
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(shape: [usize; N]) -> Self {
        Self(shape.to_vec())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [one] => write!(f, "({one},)"),
            many => {
                f.write_str("(")?;
                for (axis, extent) in many.iter().enumerate() {
                    write!(f, "{}{extent}", if axis == 0 { "" } else { ", " })?;
                }
                f.write_str(")")
            }
        }
    }
}

/// A view that does not describe the memory it was given.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum ViewError {
    /// More dimensions than a view can have.
    #[error("a view has at most {max} dimensions, got {found}", max = crate::tensor::MAX_RANK)]
    Rank {
        /// Number of dimensions given.
        found: usize,
    },
    /// Shape and strides of different lengths.
    #[error("shape has {shape} dimensions but {strides} strides were given")]
    StrideCount {
        /// Number of extents.
        shape: usize,
        /// Number of strides.
        strides: usize,
    },
    /// A contiguous view over another number of elements.
    #[error("the shape needs {needed} elements, the slice has {found}")]
    Length {
        /// Elements that the shape describes.
        needed: usize,
        /// Elements in the slice.
        found: usize,
    },
    /// Bytes that are no whole number of elements.
    #[error("{bytes} bytes are no whole number of {dtype} elements")]
    PartialElement {
        /// Length in bytes.
        bytes: usize,
        /// Element type.
        dtype: DType,
    },
    /// A strided view that leaves the slice.
    #[error("the view touches elements {low} to {high} of a slice of {len}")]
    OutOfBounds {
        /// Lowest element offset touched.
        low: i64,
        /// Highest element offset touched.
        high: i64,
        /// Elements in the slice.
        len: usize,
    },
    /// An offset that does not fit 64 bits.
    #[error("an offset of the view does not fit 64 bits")]
    TooLarge,
}

/// Why a job was refused or failed. Variants are in the order in which they are checked.
#[derive(Clone, Debug, PartialEq, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A view does not describe the memory it was given.
    #[error("Invalid tensor view: {0}.")]
    View(#[source] ViewError),

    /// `kv` is not three-dimensional.
    #[error(
        "Invalid kv rank for fused KV materialization: got {} dimensions with shape {found}, \
         expected 3 dimensions [tokens, layers, 2 * heads * head_dim].", found.0.len()
    )]
    KvRank {
        /// Shape of `kv`.
        found: Shape,
    },

    /// The last dimension of `kv` is not `2 * heads * head_dim`.
    #[error(
        "Invalid kv shape for fused KV materialization: got last dimension {found}, \
         expected {expected} (2 * {num_kv_heads} heads * head_dim {head_dim})."
    )]
    KvLastDim {
        /// Last dimension of `kv`.
        found: usize,
        /// `2 * num_kv_heads * head_dim`.
        expected: usize,
        /// Number of KV heads of the configuration.
        num_kv_heads: usize,
        /// Head dimension of the configuration.
        head_dim: usize,
    },

    /// `head_dim`, `rotary_dim` or the number of heads is outside what is supported.
    #[error(
        "Invalid geometry for fused KV materialization: got head_dim={head_dim}, \
         rotary_dim={rotary_dim}, num_kv_heads={num_kv_heads}, expected an even head_dim from 2 to \
         1024, an even rotary_dim from 2 to head_dim, and at least one head."
    )]
    Geometry {
        /// Head dimension of the configuration.
        head_dim: usize,
        /// Rotary dimension of the configuration.
        rotary_dim: usize,
        /// Number of KV heads of the configuration.
        num_kv_heads: usize,
    },

    /// A tensor has another shape than the others demand: weights, eps, value scales, the table,
    /// the outputs, slots, descales, pools.
    #[error(
        "Invalid {argument} shape for fused KV materialization: got {found}, expected {expected}."
    )]
    Shape {
        /// The tensor.
        argument: Argument,
        /// Its shape.
        found: Shape,
        /// The shape it must have.
        expected: Shape,
    },

    /// The table is not two-dimensional, or its width is not `rotary_dim`.
    #[error(
        "Invalid cos_sin_cache shape for fused KV materialization: got {found}, \
         expected (positions, {rotary_dim})."
    )]
    TableShape {
        /// Shape of the table.
        found: Shape,
        /// Width that it must have.
        rotary_dim: usize,
    },

    /// `positions` is not one-dimensional (for example the `[3, T]` of M-RoPE).
    #[error(
        "Invalid positions rank for fused KV materialization: got {} dimensions with shape \
         {found}, expected 1 dimension ({tokens},).", found.0.len()
    )]
    PositionsRank {
        /// Shape of `positions`.
        found: Shape,
        /// Number of tokens of `kv`.
        tokens: usize,
    },

    /// An output is on another device than `kv`, or has another dtype. The kernel writes raw
    /// values: it never casts and never transfers.
    #[error(
        "Invalid {argument} device/dtype for fused KV materialization: got device={device}, \
         dtype={dtype}, expected device={expected_device}, dtype={expected_dtype}."
    )]
    DeviceDtype {
        /// The tensor.
        argument: Argument,
        /// Device of its memory.
        device: Device,
        /// Its dtype.
        dtype: DType,
        /// Device of `kv`.
        expected_device: Device,
        /// Dtype of `kv`.
        expected_dtype: DType,
    },

    /// The elements of a row do not follow each other in memory.
    #[error(
        "Invalid {argument} strides for fused KV materialization: got innermost stride {found}, \
         expected 1."
    )]
    InnermostStride {
        /// The tensor.
        argument: Argument,
        /// Its innermost stride, in elements.
        found: isize,
    },

    /// An output overlaps another output or an input, or its own elements overlap.
    #[error(
        "Overlapping memory for fused KV materialization: {argument} overlaps {other}, \
         expected every output element to have memory of its own."
    )]
    Overlap {
        /// The output.
        argument: Argument,
        /// What it overlaps; the output itself where its strides make its elements meet.
        other: Argument,
    },

    /// An element in device memory is not at a multiple of its size. (Host memory may have any
    /// alignment.)
    #[error(
        "Invalid {argument} address for fused KV materialization: got {address:#x}, \
         expected a multiple of {expected}."
    )]
    Alignment {
        /// The tensor.
        argument: Argument,
        /// Address of its first element.
        address: u64,
        /// Size of its elements in bytes.
        expected: usize,
    },

    /// A tensor has a dtype that it can't have.
    #[error(
        "Invalid {argument} dtype for fused KV materialization: got {found}, expected {expected}."
    )]
    Dtype {
        /// The tensor.
        argument: Argument,
        /// Its dtype.
        found: DType,
        /// The dtypes that it may have.
        expected: &'static str,
    },

    /// An input is on another device than `kv`.
    #[error(
        "Invalid {argument} device for fused KV materialization: got device={found}, \
         expected device={expected}."
    )]
    InputDevice {
        /// The tensor.
        argument: Argument,
        /// Device of its memory.
        found: Device,
        /// Device of `kv`.
        expected: Device,
    },

    /// More work than one job can index.
    #[error("Too large for fused KV materialization: {what} is {found}, the limit is {limit}.")]
    TooLarge {
        /// The quantity.
        what: &'static str,
        /// Its value.
        found: u64,
        /// Its largest supported value.
        limit: u64,
    },

    /// Memory for an output could not be had.
    #[error("Out of memory in fused KV materialization: {argument} needs {bytes} bytes.")]
    OutOfMemory {
        /// The output that the plan was to allocate.
        argument: Argument,
        /// Its size in bytes.
        bytes: usize,
    },

    /// Positions outside the table. Rows of those tokens were left untouched; all others are
    /// complete.
    #[error(
        "Position out of range in fused KV materialization: positions[{token}] is {position}, \
         expected 0 <= position < {table_rows} ({count} such tokens; their rows were not written)."
    )]
    PositionOutOfRange {
        /// The first token concerned.
        token: u64,
        /// Its position.
        position: i64,
        /// Rows of the table.
        table_rows: u64,
        /// Number of tokens concerned.
        count: u64,
    },

    /// Slots past the end of the pool. Rows of those tokens were not written; all others are
    /// complete.
    #[error(
        "Slot out of range in fused KV materialization: slots[{token}] is {slot}, \
         expected slot < {num_slots} ({count} such tokens; their rows were not written)."
    )]
    SlotOutOfRange {
        /// The first token concerned.
        token: u64,
        /// Its slot.
        slot: i64,
        /// Slots in the pool.
        num_slots: u64,
        /// Number of tokens concerned.
        count: u64,
    },

    /// A backend was asked for that this build does not have.
    #[error("The {backend} backend is not compiled in: {remedy}.")]
    BackendNotCompiled {
        /// Name of the backend.
        backend: &'static str,
        /// How to get it.
        remedy: &'static str,
    },

    /// A forced dispatch path cannot serve this problem.
    #[error("The dispatch path {path} cannot serve this problem: {reason}.")]
    Path {
        /// Name of the path.
        path: &'static str,
        /// Why not.
        reason: &'static str,
    },

    /// The CUDA side failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
}

#[cfg(not(feature = "cuda"))]
impl Error {
    pub(crate) fn cuda_not_compiled() -> Self {
        Self::BackendNotCompiled {
            backend: "CUDA",
            remedy: "build fused-kv with the feature `cuda`",
        }
    }
}
