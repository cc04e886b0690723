//! Shared helpers of the integration tests: cases and their layouts, two independent
//! implementations of the contract, the golden files, comparison, and one runner over backends.

pub mod case;
pub mod compare;
pub mod element;
pub mod golden;
pub mod oracle;
pub mod reference;
pub mod runner;
pub mod tensor;

pub use case::{Case, Spec};
pub use runner::{Outcome, Runner};
pub use tensor::{Fill, Layout, Tensor};
