//! Fused KV materialization: RMSNorm and RoPE on K, a copy of V, in one pass over the stacked
//! projection of a block drafter.
//!
//! Speculative decoding with a block drafter (DFlash and its relatives) needs, for every accepted
//! token, the K and V rows of all draft layers at once. One GEMM gives `kv`, `[T, L, 2*H*D]`; a
//! [`Plan`] does the rest in one pass, on an NVIDIA GPU (feature `cuda`) or on the CPU, with the
//! same bits on both. For token t, layer l and head h, with `x` the row of K in f32:
//!
//! 1. `n[i] = x[i] / sqrt(mean(x^2) + eps[l]) * w[l][i]`;
//! 2. the first `rotary_dim` elements of `n` are rotated in pairs by the row of the table that
//!    `positions[t]` names: `first * cos - second * sin`, `second * cos + first * sin`;
//! 3. one rounding to the output's type, to nearest even.
//!
//! V is copied bit for bit, or multiplied by `value_scale[l]` and rounded once.
//!
//! # Example
//!
//! One token, one layer, one head of two elements, turned by a quarter:
//!
//! ```
//! use fused_kv::{Config, Inputs, NormWeight, Outputs, Plan, RopeStyle, TensorView};
//!
//! let config = Config {
//!     num_kv_heads: 1,
//!     head_dim: 2,
//!     rotary_dim: 2,
//!     rope_style: RopeStyle::Neox,
//!     norm_weight: NormWeight::Plain,
//! };
//! let kv = [3.0f32, 4.0, 5.0, 6.0]; // K, then V
//! let table = [1.0f32, 0.0, 0.0, 1.0]; // [P, R]: cosine and sine of position 0, of position 1
//! let inputs = Inputs {
//!     kv: TensorView::from_slice(&kv, &[1, 1, 4])?,
//!     k_norm_weight: TensorView::from_slice(&[2.5f32, 2.5], &[1, 2])?,
//!     eps: TensorView::from_slice(&[0.0f32], &[1])?,
//!     cos_sin_cache: TensorView::from_slice(&table, &[2, 2])?,
//!     positions: TensorView::from_slice(&[1i64], &[1])?,
//!     value_scale: None,
//! };
//!
//! // Checks everything that can be known beforehand; here the plan also allocates the outputs.
//! let mut plan = Plan::new(config, inputs, Outputs::default())?;
//! plan.run()?;
//! // What only the data can tell: a position outside the table.
//! plan.check()?;
//!
//! let (k, v) = plan.into_outputs();
//! let (k, v) = (k.unwrap(), v.unwrap());
//! // The root of the mean square of (3, 4) is sqrt(12.5), so n = (2.1213, 2.8284).
//! let expected = [-2.8284, 2.1213];
//! for (found, expected) in k.as_slice::<f32>().unwrap().iter().zip(expected) {
//!     assert!((found - expected).abs() < 1e-4);
//! }
//! assert_eq!(v.as_slice::<f32>().unwrap(), [5.0, 6.0]);
//! # Ok::<(), fused_kv::Error>(())
//! ```
//!
//! # Into a KV pool
//!
//! [`Plan::paged`] writes each token's rows to its slot of the pool that attention reads, for all
//! layers in one launch, converted to the pool's type. Here to FP8, in pages of 16 tokens:
//!
//! ```
//! # use fused_kv::{Config, Inputs, NormWeight, Plan, RopeStyle, TensorView, half::bf16};
//! use fused_kv::{F8E4M3Fn, PoolTarget, TensorViewMut, dequantize};
//! # let config = Config {
//! #     num_kv_heads: 1,
//! #     head_dim: 2,
//! #     rotary_dim: 2,
//! #     rope_style: RopeStyle::Neox,
//! #     norm_weight: NormWeight::Plain,
//! # };
//! # let kv = [3.0, 4.0, 5.0, 6.0].map(bf16::from_f32);
//! # let inputs = Inputs {
//! #     kv: TensorView::from_slice(&kv, &[1, 1, 4])?,
//! #     k_norm_weight: TensorView::from_slice(&[1.0f32, 1.0], &[1, 2])?,
//! #     eps: TensorView::from_slice(&[0.0f32], &[1])?,
//! #     cos_sin_cache: TensorView::from_slice(&[1.0f32, 0.0], &[1, 2])?,
//! #     positions: TensorView::from_slice(&[0i64], &[1])?,
//! #     value_scale: None,
//! # };
//!
//! // [L, pages, page size, H, D] of K and of V: one layer, two pages, one head of two elements.
//! let shape = [1, 2, 16, 1, 2];
//! let mut k_pool = [F8E4M3Fn::default(); 64];
//! let mut v_pool = k_pool;
//! let pool = PoolTarget::paged_nhd(
//!     TensorViewMut::from_slice(&mut k_pool, &shape)?,
//!     TensorViewMut::from_slice(&mut v_pool, &shape)?,
//!     TensorView::from_slice(&[17i64], &[1])?, // slot 17: token 1 of page 1
//! )
//! .with_descales(&[1.0], &[2.0]); // of K and V, one a layer
//!
//! let mut plan = Plan::paged(config, inputs, pool)?;
//! plan.run()?;
//! plan.check()?; // was a slot past the end?
//! drop(plan);
//!
//! let v = dequantize(TensorView::from_slice(&v_pool, &shape)?, 2.0)?;
//! assert_eq!(v[2 * 17..][..2], [5.0, 6.0]);
//! # Ok::<(), fused_kv::Error>(())
//! ```
//!
//! # Errors
//!
//! What does not fit is refused before anything is written, each with its own variant of
//! [`Error`]. An output of another type or on another device than `kv` is one such thing: the
//! kernel writes raw values, it never casts and never transfers.
//!
//! ```
//! # use fused_kv::{Config, Inputs, NormWeight, Output, Outputs, Plan, RopeStyle, TensorView};
//! # use fused_kv::{TensorViewMut, half::bf16};
//! # let config = Config {
//! #     num_kv_heads: 1,
//! #     head_dim: 2,
//! #     rotary_dim: 2,
//! #     rope_style: RopeStyle::Neox,
//! #     norm_weight: NormWeight::Plain,
//! # };
//! # let kv = [bf16::ONE; 4];
//! # let inputs = Inputs {
//! #     kv: TensorView::from_slice(&kv, &[1, 1, 4])?,
//! #     k_norm_weight: TensorView::from_slice(&[1.0f32, 1.0], &[1, 2])?,
//! #     eps: TensorView::from_slice(&[0.0f32], &[1])?,
//! #     cos_sin_cache: TensorView::from_slice(&[1.0f32, 0.0], &[1, 2])?,
//! #     positions: TensorView::from_slice(&[0i64], &[1])?,
//! #     value_scale: None,
//! # };
//! let mut v_out = [0.0f32; 2]; // but kv is bf16
//! let outputs = Outputs {
//!     k: Output::Allocate,
//!     v: Output::Into(TensorViewMut::from_slice(&mut v_out, &[1, 1, 1, 2])?),
//! };
//! let error = Plan::new(config, inputs, outputs).unwrap_err();
//! assert_eq!(
//!     error.to_string(),
//!     "Invalid v_out device/dtype for fused KV materialization: got device=cpu, \
//!      dtype=float32, expected device=cpu, dtype=bfloat16."
//! );
//! # Ok::<(), fused_kv::Error>(())
//! ```
//!
//! # Features
//!
//! - `cli` (default): the program `fused-kv`. Libraries do without: `default-features = false`.
//! - `cuda`: the CUDA backend. Links `libcuda`; the PTX is embedded.

mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod dtype;
mod error;
mod float8;
mod footprint;
mod launches;
mod owned;
mod plan;
mod pool;
mod problem;
mod tensor;
mod validate;

pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{Argument, Error, Shape, ViewError};
pub use float8::{F8E4M3Fn, F8E5M2};
pub use fused_kv_kernels::emulator::Permissions;
pub use fused_kv_kernels::launch::Path;
pub use half;
pub use launches::Dispatch;
pub use owned::OwnedTensor;
pub use plan::{Config, Inputs, NormWeight, Output, Outputs, Plan, RopeStyle};
pub use pool::{PoolLayout, PoolTarget, PoolTensors, dequantize};
pub use tensor::{MAX_RANK, TensorView, TensorViewMut};

/// The Rust code in README.md.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
