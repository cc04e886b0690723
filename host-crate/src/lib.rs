//! Fused KV materialization: RMSNorm and RoPE on K, a copy of V, in one pass over the stacked
//! projection of a block drafter.

mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod dtype;
mod error;
mod launches;
mod owned;
mod plan;
mod problem;
mod tensor;
mod validate;

pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{Argument, Error, Shape, ViewError};
pub use fused_kv_kernels::launch::Path;
pub use half;
pub use launches::Dispatch;
pub use owned::OwnedTensor;
pub use plan::{Config, Inputs, NormWeight, Output, Outputs, Plan, RopeStyle};
pub use tensor::{MAX_RANK, TensorView, TensorViewMut};
