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
    /// K pool of the layer with this number.
    KPoolLayer(usize),
    /// V pool of the layer with this number.
    VPoolLayer(usize),
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
            Self::KPool | Self::KPoolLayer(_) => "k_pool",
            Self::VPool | Self::VPoolLayer(_) => "v_pool",
            Self::KDescale => "k_descale",
            Self::VDescale => "v_descale",
        }
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::KPoolLayer(layer) | Self::VPoolLayer(layer) => write!(f, "[{layer}]"),
            _ => Ok(()),
        }
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
    /// An axis that the view does not have, or an order that does not name each axis once.
    #[error("a view of {rank} dimensions has no axis {axis}, or it was named twice")]
    Axis {
        /// The axis asked for.
        axis: usize,
        /// Dimensions of the view.
        rank: usize,
    },
    /// Two elements of a view that is written may be in the same place, so that its parts cannot be
    /// views of their own.
    #[error("elements of the view may share memory, expected parts with memory of their own")]
    SharedElements,
    /// More parts than there is memory to list.
    #[error("no memory for {count} views")]
    Parts {
        /// Number of parts.
        count: usize,
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
    /// values: it never casts and never transfers. Pool tensors may have another dtype than `kv`,
    /// but must have one in common: that of the first K tensor is expected of the others.
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
        /// Dtype of `kv`; for a pool tensor, that of the first K tensor.
        expected_dtype: DType,
    },

    /// One half of a pool without the other.
    #[error(
        "Invalid pool for fused KV materialization: got no {missing}, expected k_pool and v_pool \
         together."
    )]
    PoolHalf {
        /// The half that is missing.
        missing: Argument,
    },

    /// A pool has tensors for another number of layers than `kv` has.
    #[error(
        "Invalid {argument} layers for fused KV materialization: got {found} layers, \
         expected {expected}."
    )]
    PoolLayers {
        /// The half of the pool.
        argument: Argument,
        /// Layers that it has tensors for.
        found: usize,
        /// Layers of `kv`.
        expected: usize,
    },

    /// A pool tensor has another number of dimensions than its layout says.
    #[error(
        "Invalid {argument} rank for fused KV materialization: got {} dimensions with shape \
         {found}, expected {} dimensions {expected}.", found.0.len(), expected.split(',').count()
    )]
    PoolRank {
        /// The pool tensor.
        argument: Argument,
        /// Its shape.
        found: Shape,
        /// Its dimensions by name, for example `[slots, heads, head_dim]`.
        expected: &'static str,
    },

    /// The tensors of one half of a pool have different strides.
    #[error(
        "Invalid {argument} strides for fused KV materialization: got {found:?}, \
         expected {expected:?} as for the first layer."
    )]
    PoolStrides {
        /// The pool tensor.
        argument: Argument,
        /// Its strides, in elements.
        found: Vec<isize>,
        /// Strides of the first layer's tensor.
        expected: Vec<isize>,
    },

    /// A slot count that the pool has no room for.
    #[error(
        "Invalid number of slots for fused KV materialization: got {found}, \
         expected at most {capacity}, which is what the pool tensors hold."
    )]
    PoolSlots {
        /// The slot count asked for.
        found: usize,
        /// Slots of the pool tensors.
        capacity: usize,
    },

    /// An FP8 pool without descales.
    #[error(
        "Missing {argument} for fused KV materialization: a pool of {dtype} needs one descale a \
         layer, expected ({layers},) values."
    )]
    DescaleMissing {
        /// The descales that are missing.
        argument: Argument,
        /// Dtype of the pool.
        dtype: DType,
        /// Number of layers.
        layers: usize,
    },

    /// Descales for a pool that is not FP8: its values would not be those of the other rows.
    #[error(
        "Unexpected {argument} for fused KV materialization: got descales for a pool of {dtype}, \
         expected them for float8_e4m3fn or float8_e5m2 only."
    )]
    DescaleUnexpected {
        /// The descales.
        argument: Argument,
        /// Dtype of the pool.
        dtype: DType,
    },

    /// A descale that cannot be divided by.
    #[error(
        "Invalid {argument} for fused KV materialization: {argument}[{layer}] is {found}, \
         expected a finite value above 0."
    )]
    Descale {
        /// The descales.
        argument: Argument,
        /// The layer.
        layer: usize,
        /// Its descale.
        found: f32,
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

    /// A pool tensor that ends outside of the device allocation it begins in.
    #[error(
        "Invalid {argument} memory for fused KV materialization: got a tensor of bytes {start:#x} \
         to {end:#x}, expected one within its allocation of bytes {allocation_start:#x} to \
         {allocation_end:#x}."
    )]
    OutsideAllocation {
        /// The pool tensor.
        argument: Argument,
        /// Address of its first byte.
        start: u64,
        /// Address after its last byte.
        end: u64,
        /// Address of the allocation's first byte.
        allocation_start: u64,
        /// Address after the allocation's last byte.
        allocation_end: u64,
    },

    /// Two tokens have the same slot, and the caller asked for that to be refused.
    #[error(
        "Duplicate slot for fused KV materialization: slots[{first}] and slots[{second}] are both \
         {slot}, expected each slot once."
    )]
    DuplicateSlot {
        /// The slot.
        slot: i64,
        /// The first token that has it.
        first: usize,
        /// The next token that has it.
        second: usize,
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

    /// Memory could not be had.
    #[error("Out of memory in fused KV materialization: {argument} needs {bytes} bytes.")]
    OutOfMemory {
        /// What the memory was for: an output that the plan was to allocate, a list to read.
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

    /// A kernel did what no kernel may do, on the emulated device
    /// ([`Plan::run_emulated`](crate::Plan::run_emulated)). That is a fault of this library, except
    /// where the elements of a tensor are not at multiples of their size: host memory may have any
    /// alignment, kernels need that one.
    #[error("A kernel is at fault on the emulated device: {message}.")]
    EmulatedFault {
        /// Which thread did what.
        message: String,
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
