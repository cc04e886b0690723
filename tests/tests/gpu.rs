//! GPU results against the CPU backend, bit for bit.

/// Says aloud that the GPU tests are not in this build.
#[cfg(not(feature = "cuda"))]
#[test]
fn gpu_tests_are_not_compiled_in() {
    use std::io::Write;
    // Straight to the stream: what the print macros write is shown for failing tests only.
    writeln!(
        std::io::stderr(),
        "GPU tests are not compiled in: build with `--features cuda`"
    )
    .expect("stderr");
    assert!(
        std::env::var_os("FUSED_KV_REQUIRE_GPU").is_none_or(|value| value != "1"),
        "FUSED_KV_REQUIRE_GPU=1, but this build has no GPU tests: build with `--features cuda`"
    );
}
