//! Shared helpers of the integration tests: cases and their layouts, two independent
//! implementations of the contract, the golden files, comparison, and one runner over backends.

pub mod arbitrary;
pub mod case;
pub mod cases;
pub mod compare;
pub mod element;
pub mod golden;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod oracle;
pub mod pool;
pub mod reference;
pub mod runner;
pub mod tensor;

pub use case::{Case, Spec};
pub use runner::{Outcome, Runner};
pub use tensor::{Fill, Layout, Tensor};
