//! The KV pool as the target of a job: the pages that attention reads.

use fused_kv_kernels::convert;

use crate::error::{Argument, Error, Shape};
use crate::tensor::{TensorView, TensorViewMut};
use crate::{DType, Device};

/// The dimensions of a layer's pool tensors. Strides are free except for the innermost, and those
/// of K and V are independent of each other: each of these describes every layout whose page,
/// token and head strides are constant (token-major allocations, K and V side by side, ...).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolLayout {
    /// `[slots, heads, head_dim]`: pages of one token.
    Nhd,
    /// `[pages, page size, heads, head_dim]`.
    PagedNhd,
    /// `[pages, heads, page size, head_dim]`.
    PagedHnd,
}

impl PoolLayout {
    /// The dimensions by name.
    pub const fn dimensions(self) -> &'static str {
        match self {
            Self::Nhd => "[slots, heads, head_dim]",
            Self::PagedNhd => "[pages, page_size, heads, head_dim]",
            Self::PagedHnd => "[pages, heads, page_size, head_dim]",
        }
    }

    /// The dimensions by name, behind one of layers.
    pub(crate) const fn stacked_dimensions(self) -> &'static str {
        match self {
            Self::Nhd => "[layers, slots, heads, head_dim]",
            Self::PagedNhd => "[layers, pages, page_size, heads, head_dim]",
            Self::PagedHnd => "[layers, pages, heads, page_size, head_dim]",
        }
    }

    /// Which dimensions are the token in its page and the head.
    pub(crate) const fn axes(self) -> (Option<usize>, usize) {
        match self {
            Self::Nhd => (None, 1),
            Self::PagedNhd => (Some(1), 2),
            Self::PagedHnd => (Some(2), 1),
        }
    }

    /// Number of dimensions of a layer's tensor.
    pub(crate) const fn rank(self) -> usize {
        match self {
            Self::Nhd => 3,
            Self::PagedNhd | Self::PagedHnd => 4,
        }
    }
}

/// The tensors of one half of a pool, for all layers.
#[derive(Debug)]
pub enum PoolTensors<'a> {
    /// An allocation for each layer; all of the same shape and strides.
    Layers(Vec<TensorViewMut<'a>>),
    /// One allocation for all layers: the layer is the leading dimension.
    Stacked(TensorViewMut<'a>),
}

impl<'a> From<Vec<TensorViewMut<'a>>> for PoolTensors<'a> {
    fn from(layers: Vec<TensorViewMut<'a>>) -> Self {
        Self::Layers(layers)
    }
}

impl<'a> From<TensorViewMut<'a>> for PoolTensors<'a> {
    fn from(stacked: TensorViewMut<'a>) -> Self {
        Self::Stacked(stacked)
    }
}

/// A KV pool as the target of a job: row t of K and V goes to slot `slots[t]`, that is to token
/// `slot % page_size` of page `slot / page_size`, in every layer. T tokens, L layers, H heads,
/// D `head_dim`.
///
/// - A negative slot is skipped, and so is [`reserved_slot`](Self::reserved_slot): neither the
///   position nor the row of such a token is looked at. K and V of a token are written or skipped
///   together.
/// - A slot at or past the number of slots is reported by [`Plan::check`](crate::Plan::check), and
///   nothing is written for its token.
/// - Two tokens with the same slot are a mistake of the caller that is not looked for unless
///   [`refuse_duplicates`](Self::refuse_duplicates) is set. On the CPU the last such token wins;
///   on a GPU the slot ends up with a mixture of the tokens' rows. No other slot is affected.
/// - The pool's dtype is that of `kv`, or another of bfloat16, float16 and float32 (rounded once,
///   from float32), or FP8: `float8_e4m3fn` or `float8_e5m2`. FP8 stores `value / descale`, rounded
///   once to nearest even from float32; finite values and infinities beyond the largest finite
///   value become that value, a NaN stays NaN. `descale` is what a reader multiplies with, and has
///   nothing to do with [`value_scale`](crate::Inputs::value_scale), which is applied before.
#[derive(Debug)]
pub struct PoolTarget<'a> {
    /// Dimensions of each layer's tensors, of K and V alike.
    pub layout: PoolLayout,
    /// K, on the device of `kv`. Leaving one half out is an error.
    pub k: Option<PoolTensors<'a>>,
    /// V, on the device of `kv`, of the dtype and shape of K; strides are independent of K's.
    pub v: Option<PoolTensors<'a>>,
    /// `[T]`, i64 or i32, on the device of `kv`; stride free.
    pub slots: TensorView<'a>,
    /// Slots in use, where the tensors hold more than that; `None` for all they hold.
    pub num_slots: Option<usize>,
    /// A slot that is skipped as negative ones are. (Some engines keep slot 0 for padding, others
    /// use it.)
    pub reserved_slot: Option<usize>,
    /// `[L]`: descale of K for each layer of an FP8 pool, finite and above 0.
    pub k_descale: Option<Vec<f32>>,
    /// `[L]`: descale of V, likewise.
    pub v_descale: Option<Vec<f32>>,
    /// Refuses a job in which two tokens have the same slot of the pool
    /// ([`Error::DuplicateSlot`]). The slots are looked at on the host, when the plan is made: a
    /// list in device memory is copied for that, behind all work of its context, and what it holds
    /// later is not looked at again.
    pub refuse_duplicates: bool,
}

impl<'a> PoolTarget<'a> {
    /// A pool of any layout; nothing is checked before [`Plan::paged`](crate::Plan::paged).
    pub fn new(
        layout: PoolLayout,
        k: impl Into<PoolTensors<'a>>,
        v: impl Into<PoolTensors<'a>>,
        slots: TensorView<'a>,
    ) -> Self {
        Self {
            layout,
            k: Some(k.into()),
            v: Some(v.into()),
            slots,
            num_slots: None,
            reserved_slot: None,
            k_descale: None,
            v_descale: None,
            refuse_duplicates: false,
        }
    }

    /// A pool of single tokens: `[slots, H, D]` for each layer, or `[L, slots, H, D]` for all.
    pub fn nhd(
        k: impl Into<PoolTensors<'a>>,
        v: impl Into<PoolTensors<'a>>,
        slots: TensorView<'a>,
    ) -> Self {
        Self::new(PoolLayout::Nhd, k, v, slots)
    }

    /// Pages with heads inside of tokens: `[pages, page size, H, D]` for each layer, or
    /// `[L, pages, page size, H, D]` for all.
    pub fn paged_nhd(
        k: impl Into<PoolTensors<'a>>,
        v: impl Into<PoolTensors<'a>>,
        slots: TensorView<'a>,
    ) -> Self {
        Self::new(PoolLayout::PagedNhd, k, v, slots)
    }

    /// Pages with tokens inside of heads: `[pages, H, page size, D]` for each layer, or
    /// `[L, pages, H, page size, D]` for all.
    pub fn paged_hnd(
        k: impl Into<PoolTensors<'a>>,
        v: impl Into<PoolTensors<'a>>,
        slots: TensorView<'a>,
    ) -> Self {
        Self::new(PoolLayout::PagedHnd, k, v, slots)
    }

    /// One allocation in which everything of a token is together: `[slots, L, 2, H, D]`, K before
    /// V. (One for each layer, `[slots, 2, H, D]`, is [`TensorViewMut::unbind`] along axis 1 and
    /// [`PoolTarget::nhd`].)
    ///
    /// # Errors
    ///
    /// [`Error::PoolRank`] when `pool` has not five dimensions, [`Error::Shape`] when the third is
    /// not 2.
    pub fn token_major(pool: TensorViewMut<'a>, slots: TensorView<'a>) -> Result<Self, Error> {
        let shape = pool.shape();
        let &[num_slots, layers, halves, heads, head_dim] = shape else {
            return Err(Error::PoolRank {
                argument: Argument::KPool,
                found: shape.into(),
                expected: "[slots, layers, 2, heads, head_dim]",
            });
        };
        if halves != 2 {
            return Err(Error::Shape {
                argument: Argument::KPool,
                found: shape.into(),
                expected: Shape::from([num_slots, layers, 2, heads, head_dim]),
            });
        }
        let mut halves = pool.permute(&[2, 1, 0, 3, 4])?.unbind(0)?.into_iter();
        Ok(Self {
            k: halves.next().map(PoolTensors::Stacked),
            v: halves.next().map(PoolTensors::Stacked),
            ..Self::new(PoolLayout::Nhd, Vec::new(), Vec::new(), slots)
        })
    }

    /// With one descale of K and one of V for each layer, for an FP8 pool.
    #[must_use]
    pub fn with_descales(self, k: &[f32], v: &[f32]) -> Self {
        Self {
            k_descale: Some(k.to_vec()),
            v_descale: Some(v.to_vec()),
            ..self
        }
    }

    /// With a slot that is skipped as negative ones are.
    #[must_use]
    pub fn with_reserved_slot(self, slot: usize) -> Self {
        Self {
            reserved_slot: Some(slot),
            ..self
        }
    }

    /// With fewer slots than the tensors hold.
    #[must_use]
    pub fn with_num_slots(self, num_slots: usize) -> Self {
        Self {
            num_slots: Some(num_slots),
            ..self
        }
    }

    /// Refusing a slot list that names a slot twice; see [`Self::refuse_duplicates`].
    #[must_use]
    pub fn refusing_duplicates(self) -> Self {
        Self {
            refuse_duplicates: true,
            ..self
        }
    }
}

/// Reads back what a pool holds: each element of a view in host memory, in row-major order of its
/// indices, as `value * descale` in f32. The view may have any float dtype, FP8 included, and any
/// strides; `descale` is 1 for pools that are not FP8.
///
/// # Errors
///
/// [`Error::InputDevice`] for device memory (copy it to the host first), [`Error::Dtype`] for
/// integers, [`Error::OutOfMemory`].
pub fn dequantize(pool: TensorView<'_>, descale: f32) -> Result<Vec<f32>, Error> {
    let raw = pool.raw;
    let argument = Argument::KPool;
    if raw.device != Device::Cpu {
        return Err(Error::InputDevice {
            argument,
            found: raw.device,
            expected: Device::Cpu,
        });
    }
    let decode: fn(u32) -> f32 = match raw.dtype {
        DType::Bf16 => |bits| convert::bf16_to_f32(bits as u16),
        DType::F16 => |bits| convert::f16_to_f32(bits as u16),
        DType::F32 => f32::from_bits,
        DType::F8E4M3Fn => |bits| convert::e4m3_to_f32(bits as u8),
        DType::F8E5M2 => |bits| convert::e5m2_to_f32(bits as u8),
        found @ (DType::I32 | DType::I64) => {
            return Err(Error::Dtype {
                argument,
                found,
                expected: crate::validate::POOL_DTYPES,
            });
        }
    };
    let (shape, strides) = (raw.layout.shape(), raw.layout.strides());
    if shape.contains(&0) {
        return Ok(Vec::new());
    }
    // Distinct elements lie within an address space, but strides of 0 can name any number.
    let count = shape
        .iter()
        .try_fold(1usize, |all, &extent| all.checked_mul(extent));
    let bytes = count.map_or(usize::MAX, |count| count.saturating_mul(size_of::<f32>()));
    let out_of_memory = Error::OutOfMemory { argument, bytes };
    let mut values = Vec::new();
    match count {
        Some(count) if values.try_reserve_exact(count).is_ok() => {}
        _ => return Err(out_of_memory),
    }
    let size = raw.dtype.size();
    let mut index = [0usize; crate::tensor::MAX_RANK];
    let index = &mut index[..shape.len()];
    loop {
        let offset: isize = index
            .iter()
            .zip(strides)
            .map(|(&index, &stride)| index as isize * stride)
            .sum();
        let from = raw.address.wrapping_add_signed(offset * size as isize) as *const u8;
        let mut bits = [0u8; 4];
        // SAFETY: every element of a host view is live memory that nobody writes while the view is
        // borrowed (checked by its constructor, or promised to it); an element has `size` bytes,
        // 4 at most.
        unsafe { std::ptr::copy_nonoverlapping(from, bits.as_mut_ptr(), size) };
        values.push(decode(u32::from_le_bytes(bits)) * descale);
        let Some(axis) = (0..shape.len()).rfind(|&axis| index[axis] + 1 < shape[axis]) else {
            return Ok(values);
        };
        index[axis] += 1;
        index[axis + 1..].fill(0);
    }
}
