//! The CPU backend against the f64 oracle and, bit for bit, the scalar reference, over the seed
//! table of shapes, every type and both rotation styles.

use fused_kv::{DType, NormWeight};
use fused_kv_tests::case::{SHAPES, Values, every_value};
use fused_kv_tests::cases::{FLOATS, STYLES};
use fused_kv_tests::compare::{assert_bits, assert_oracle};
use fused_kv_tests::{Runner, Spec, oracle, reference};

fn check(spec: &Spec) {
    let case = spec.build();
    let outcome = Runner::Cpu.run(&case).expect("a valid case");
    assert_bits(&case, &outcome, &reference::compute(&case));
    if spec.values == Values::Normal {
        assert_oracle(&case, &outcome, &oracle::compute(&case));
    }
}

#[test]
fn every_shape_type_and_style() {
    for (index, &shape) in SHAPES.iter().enumerate() {
        for dtype in FLOATS {
            for style in STYLES {
                check(&Spec {
                    style,
                    seed: index as u64,
                    ..Spec::shape(shape).dtype(dtype)
                });
            }
        }
    }
}

#[test]
fn allocated_outputs() {
    for (index, &shape) in SHAPES.iter().enumerate() {
        let mut spec = Spec::shape(shape).allocated();
        check(&spec);
        // Each on its own.
        spec.layouts.k_out = (index % 2 == 0).then(Default::default);
        spec.layouts.v_out = (index % 2 == 1).then(Default::default);
        check(&spec);
    }
}

#[test]
fn offset_weights_and_value_scales() {
    for (index, &shape) in SHAPES.iter().enumerate() {
        for dtype in FLOATS {
            check(&Spec {
                norm_weight: NormWeight::Offset,
                value_scale: true,
                seed: 100 + index as u64,
                ..Spec::shape(shape).dtype(dtype)
            });
        }
    }
}

/// NaN, infinities and subnormals anywhere in K: bit for bit, a computed NaN being the canonical
/// one.
#[test]
fn arbitrary_bits_in_k() {
    for (index, &shape) in SHAPES.iter().enumerate() {
        for dtype in FLOATS {
            check(&Spec {
                values: Values::Wild,
                value_scale: index % 2 == 0,
                seed: 200 + index as u64,
                ..Spec::shape(shape).dtype(dtype)
            });
        }
    }
}

/// All 65536 values of each 16-bit type as V, copied and scaled, and as K: a head of two elements
/// per value.
#[test]
fn every_value_of_the_16_bit_types() {
    for dtype in [DType::Bf16, DType::F16] {
        for value_scale in [false, true] {
            let case = every_value(dtype, value_scale);
            let outcome = Runner::Cpu.run(&case).expect("a valid case");
            assert_bits(&case, &outcome, &reference::compute(&case));
            if !value_scale {
                let values: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
                assert!(outcome.v.gather() == values);
            }
        }
    }
}
