//! The program `fused-kv`.
fn main() {}
