//! Fused KV materialization: RMSNorm and RoPE on K, a copy of V, in one pass over the stacked
//! projection of a block drafter.

mod device;
mod dtype;
mod error;
mod plan;
mod problem;
mod tensor;

pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{Argument, Error, Shape, ViewError};
pub use half;
pub use plan::{Config, Inputs, NormWeight, Output, Outputs, Plan, RopeStyle};
pub use tensor::{MAX_RANK, TensorView, TensorViewMut};
