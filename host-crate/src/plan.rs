//! What to compute, on what, into what: the description of a job, and its validated form.

use crate::error::Error;
use crate::tensor::{TensorView, TensorViewMut};

/// Which elements of a head RoPE rotates together. There is no default: the wrong style gives
/// plausible numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Pairs `(i, i + rotary_dim/2)`, as in GPT-NeoX and Llama ("rotate half").
    Neox,
    /// Pairs `(2i, 2i + 1)`, as in GPT-J.
    Interleaved,
}

/// How the RMSNorm weight is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NormWeight {
    /// The weight itself.
    #[default]
    Plain,
    /// The effective weight is `1 + w`, added in f32 (Gemma's convention).
    Offset,
}

/// Geometry and conventions of the attention layers; equal for all layers of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// KV heads a layer (H).
    pub num_kv_heads: usize,
    /// Elements of a head (D): even, 2 to 1024.
    pub head_dim: usize,
    /// Leading elements of a head that are rotated (R): even, 2 to `head_dim`.
    pub rotary_dim: usize,
    /// Which elements are rotated together.
    pub rope_style: RopeStyle,
    /// How the norm weight is stored.
    pub norm_weight: NormWeight,
}

/// The tensors that a job reads. T tokens, L layers, H heads, D `head_dim`, R `rotary_dim`.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[T, L, 2*H*D]`: K heads, then V heads. bf16, f16 or f32; token and layer strides free.
    pub kv: TensorView<'a>,
    /// `[L, D]`, bf16, f16 or f32 (independent of `kv`); row stride free.
    pub k_norm_weight: TensorView<'a>,
    /// `[L]`, f32.
    pub eps: TensorView<'a>,
    /// `[P, R]`, bf16, f16 or f32 (independent of `kv`): R/2 cosines, then R/2 sines, used as
    /// given; row stride free.
    pub cos_sin_cache: TensorView<'a>,
    /// `[T]`, i64 or i32; stride free.
    pub positions: TensorView<'a>,
    /// `[L]`, f32: the model's attention value scale. Absent: V is copied bit for bit.
    pub value_scale: Option<TensorView<'a>>,
}

/// Where one output goes.
#[derive(Debug, Default)]
pub enum Output<'a> {
    /// The plan allocates a contiguous `[L, T, H, D]` tensor on the device of `kv`.
    #[default]
    Allocate,
    /// The caller's tensor `[L, T, H, D]`, dtype and device of `kv`; layer, token and head
    /// strides free.
    Into(TensorViewMut<'a>),
}

/// Where K and V go; each on its own.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// Destination of K.
    pub k: Output<'a>,
    /// Destination of V.
    pub v: Output<'a>,
}

/// A job whose description was checked once and that can be run many times.
#[derive(Debug)]
pub struct Plan<'a> {
    todo: std::marker::PhantomData<&'a mut [u8]>,
}

impl<'a> Plan<'a> {
    /// Checks everything that can be known before a run and allocates what the plan will own.
    ///
    /// # Errors
    ///
    /// The first failing check, in the order of the variants of [`Error`]. Nothing was written.
    pub fn new(config: Config, inputs: Inputs<'a>, outputs: Outputs<'a>) -> Result<Self, Error> {
        let _ = (config, inputs, outputs);
        todo!()
    }

    /// Runs the job: at once on the CPU; on CUDA enqueued to the null stream, without waiting.
    ///
    /// # Errors
    ///
    /// A launch that failed. What only the data can tell comes from [`Plan::check`].
    pub fn run(&mut self) -> Result<(), Error> {
        todo!()
    }

    /// Waits for what was enqueued and reports what the rows told since the last check: positions
    /// outside the table (or slots outside the pool). Clears the record.
    ///
    /// # Errors
    ///
    /// [`Error::PositionOutOfRange`], [`Error::SlotOutOfRange`], or a CUDA failure.
    pub fn check(&mut self) -> Result<(), Error> {
        todo!()
    }

    /// K as written, `[L, T, H, D]`.
    pub fn k(&self) -> TensorView<'_> {
        todo!()
    }

    /// V as written, `[L, T, H, D]`.
    pub fn v(&self) -> TensorView<'_> {
        todo!()
    }
}
