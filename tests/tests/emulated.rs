//! The GPU's kernels without a GPU: every dispatch path on the emulated device, from the plan to
//! the bytes, against the CPU backend bit for bit. The emulated device is slow, so cases are
//! small; `tests/gpu.rs` runs the large ones.

use fused_kv::{
    Config, DType, Dispatch, Error, Inputs, NormWeight, Output, Outputs, Path, Permissions, Plan,
    RopeStyle, TensorView, TensorViewMut,
};
use fused_kv_tests::arbitrary::{Alignment, config, spec_with_bad_positions};
use fused_kv_tests::case::{SHAPES, Values};
use fused_kv_tests::runner::{ALIGNED, check_dispatches, few_dispatches, random_dispatches};
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

/// Permissions that lack the last bytes of a tensor; what the plan allocated needs none.
#[test]
fn memory_without_permission() {
    let config = Config {
        num_kv_heads: 1,
        head_dim: 2,
        rotary_dim: 2,
        rope_style: RopeStyle::Neox,
        norm_weight: NormWeight::Plain,
    };
    let (kv, weight, eps, table) = ([1.0f32; 4], [1.0f32; 2], [0.0f32], [1.0f32; 2]);
    let (positions, scale, mut k) = ([0i64], [2.0f32], [0.0f32; 2]);
    let read = [
        (kv.as_ptr() as u64, size_of_val(&kv)),
        (weight.as_ptr() as u64, size_of_val(&weight)),
        (eps.as_ptr() as u64, size_of_val(&eps)),
        (table.as_ptr() as u64, size_of_val(&table)),
        (positions.as_ptr() as u64, size_of_val(&positions)),
        (scale.as_ptr() as u64, size_of_val(&scale)),
    ];
    let written = (k.as_mut_ptr() as u64, size_of_val(&k));
    // The tensor that lacks some bytes (6 is K), how many, and the number of early blocks.
    let mut run = |short: usize, lacks: usize, early: u32| {
        let mut permissions = Permissions::default();
        for (index, (address, bytes)) in read.into_iter().enumerate() {
            permissions.allow_reads(address, bytes - if short == index { lacks } else { 0 });
        }
        permissions.allow_writes(written.0, written.1 - if short == 6 { lacks } else { 0 });
        let inputs = Inputs {
            kv: TensorView::from_slice(&kv, &[1, 1, 4])?,
            k_norm_weight: TensorView::from_slice(&weight, &[1, 2])?,
            eps: TensorView::from_slice(&eps, &[1])?,
            cos_sin_cache: TensorView::from_slice(&table, &[1, 2])?,
            positions: TensorView::from_slice(&positions, &[1])?,
            value_scale: Some(TensorView::from_slice(&scale, &[1])?),
        };
        let outputs = Outputs {
            k: Output::Into(TensorViewMut::from_slice(&mut k, &[1, 1, 1, 2])?),
            v: Output::Allocate,
        };
        let dispatch = Dispatch {
            early_blocks: Some(early),
            ..Dispatch::default()
        };
        Plan::new(config, inputs, outputs)?.run_emulated_within(dispatch, permissions)
    };
    assert_eq!(run(0, 0, 0), Ok(()));
    for short in 0..7 {
        let error = run(short, 1, 0).expect_err("a byte too few").to_string();
        let start = "A kernel is at fault on the emulated device: fused_kv_";
        assert!(error.starts_with(start), "{error}");
        assert!(error.contains("is not allowed to touch byte"), "{error}");
    }
    // Early blocks prefetch K first, others V alone.
    for (early, first) in [(0, 8), (u32::MAX, 0)] {
        let error = run(0, 16, early).expect_err("no kv").to_string();
        let prefetch = format!("the Prefetch of 1 bytes at {:#x} ", read[0].0 + first);
        assert!(error.contains(&prefetch), "{error}");
    }
}

/// Host memory may have any alignment, kernels need that of the elements.
#[test]
fn elements_at_no_multiple_of_their_size() {
    let mut spec = Spec::default();
    spec.layouts.kv.byte_offset = 1;
    let case = spec.build();
    Runner::Cpu.run(&case).expect("a valid case");
    let error = Runner::Emulated(Dispatch::default())
        .run(&case)
        .expect_err("an odd address");
    assert!(error.to_string().contains("is misaligned"), "{error}");
}

proptest! {
    #![proptest_config(config(500))]

    #[test]
    fn random_cases(mut spec in spec_with_bad_positions(Alignment::Element)) {
        spec.tokens = spec.tokens.min(3);
        spec.layers = spec.layers.min(2);
        if let Some(positions) = &mut spec.positions {
            positions.truncate(3);
        }
        check_dispatches(&spec.build(), &random_dispatches(spec.seed), Runner::Emulated);
    }
}
