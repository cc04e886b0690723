//! Build and check tasks of the workspace.
fn main() {}
