//! The GPU's kernels without a GPU: every dispatch path on the emulated device, from the plan to
//! the bytes, against the CPU backend bit for bit. The emulated device is slow, so cases are
//! small; `tests/gpu.rs` runs the large ones.

use fused_kv::{DType, Dispatch, Error, NormWeight, Path, RopeStyle};
use fused_kv_tests::arbitrary::{Alignment, config, spec_with_bad_positions};
use fused_kv_tests::case::{SHAPES, Values};
use fused_kv_tests::runner::{ALIGNED, check_dispatches, few_dispatches};
use fused_kv_tests::{Runner, Spec, golden};
use proptest::prelude::*;

fn check(spec: &Spec) -> Vec<Path> {
    check_dispatches(&spec.build(), &few_dispatches(), Runner::Emulated)
}

/// The smallest golden file; the others go through the same kernels on a GPU.
#[test]
fn a_golden_file() {
    let golden = golden::load("tiny");
    let served = check_dispatches(&golden.case, &few_dispatches(), Runner::Emulated);
    assert_eq!(served, ALIGNED);
}

#[test]
fn every_head_dim_of_the_seed_table() {
    let mut served = Vec::new();
    for (index, &(_, _, _, head_dim, rotary_dim)) in SHAPES.iter().enumerate() {
        let pick = |count: usize| index % count == 0;
        let spec = Spec {
            style: if pick(4) {
                RopeStyle::Interleaved
            } else {
                RopeStyle::Neox
            },
            values: if pick(2) {
                Values::Wild
            } else {
                Values::Normal
            },
            norm_weight: if pick(4) {
                NormWeight::Offset
            } else {
                NormWeight::Plain
            },
            value_scale: pick(5),
            seed: index as u64,
            ..Spec::shape((1, 1, 2, head_dim, rotary_dim))
                .dtype([DType::Bf16, DType::F16, DType::F32][index % 3])
        };
        served.extend(check(&spec));
        served.extend(check(&spec.shifted(1)));
    }
    for path in Path::ALL {
        assert!(served.contains(&path), "{path:?} served no case");
    }
}

/// Tokens and layers in several launches.
#[test]
fn many_launches() {
    let case = Spec {
        tokens: 5,
        layers: 3,
        heads: 1,
        head_dim: 16,
        rotary_dim: 16,
        positions: Some(vec![0, -1, 63, 64, 5]),
        ..Spec::default()
    }
    .build();
    let dispatch = Dispatch {
        tokens_per_launch: Some(2),
        layers_per_launch: Some(2),
        threads: Some(64),
        ..Dispatch::default()
    };
    check_dispatches(&case, &[dispatch], Runner::Emulated);
}

/// A path that cannot serve a job says so, and nothing is written.
#[test]
fn a_path_that_cannot_serve() {
    let case = Spec {
        head_dim: 46,
        rotary_dim: 46,
        ..Spec::default()
    }
    .build();
    let vector = Dispatch {
        path: Some(Path::Vector),
        ..Dispatch::default()
    };
    let error = Runner::Emulated(vector)
        .run(&case)
        .expect_err("46 elements");
    assert!(
        matches!(error, Error::Path { path: "vector", .. }),
        "{error}"
    );
}

proptest! {
    #![proptest_config(config(40))]

    #[test]
    fn random_cases(mut spec in spec_with_bad_positions(Alignment::Element)) {
        // Two tokens: a valid position and whatever came.
        spec.layers = 1;
        spec.heads = spec.heads.min(2);
        spec.tokens = spec.tokens.min(2);
        if let Some(positions) = &mut spec.positions {
            positions.truncate(2);
        }
        check(&spec);
    }
}
