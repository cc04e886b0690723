//! Random geometry, types, layouts and positions, with shrinking.

use std::collections::HashSet;

use fused_kv::{
    Argument, Config, DType, Device, Error, Inputs, NormWeight, Output, Outputs, Plan, RopeStyle,
    TensorView, TensorViewMut,
};
use fused_kv_tests::arbitrary::{Alignment, config, spec, spec_with_bad_positions};
use fused_kv_tests::case::{Layouts, Values};
use fused_kv_tests::compare::{assert_bits, assert_oracle};
use fused_kv_tests::{Runner, Spec, oracle, reference};
use proptest::prelude::*;

proptest! {
    #![proptest_config(config(1500))]

    /// Results equal the scalar reference bit for bit, inputs and canaries stay as they were, and
    /// finite K is within the bound of the f64 oracle.
    #[test]
    fn results_equal_both_references(spec in spec(Alignment::Byte)) {
        let case = spec.build();
        let outcome = Runner::Cpu.run(&case).expect("a valid case");
        assert_bits(&case, &outcome, &reference::compute(&case));
        if spec.values == Values::Normal {
            assert_oracle(&case, &outcome, &oracle::compute(&case));
        }
    }

    /// Rows of tokens with a bad position stay untouched, the others are complete, and the record
    /// names the lowest token and the count.
    #[test]
    fn bad_positions_leave_rows_untouched(spec in spec_with_bad_positions(Alignment::Byte)) {
        let case = spec.build();
        let outcome = Runner::Cpu.run(&case).expect("a valid case");
        assert_bits(&case, &outcome, &reference::compute(&case));
    }
}

proptest! {
    #![proptest_config(config(300))]

    /// The layout changes where results are, not what they are.
    #[test]
    fn layouts_do_not_change_results(spec in spec(Alignment::Byte)) {
        let laid_out = Runner::Cpu.run(&spec.build()).expect("a valid case");
        let plain = Spec { layouts: Layouts::default(), ..spec };
        let plain = Runner::Cpu.run(&plain.build()).expect("a valid case");
        prop_assert!(laid_out.k.gather() == plain.k.gather());
        prop_assert!(laid_out.v.gather() == plain.v.gather());
    }

    /// A plan that is run again gives the same.
    #[test]
    fn plans_can_run_again(spec in spec(Alignment::Byte)) {
        let case = spec.build();
        let outcome = Runner::Cpu.run_times(&case, 3).expect("a valid case");
        assert_bits(&case, &outcome, &reference::compute(&case));
    }
}

/// Two outputs and an input somewhere in one small buffer of bytes, as bf16.
#[derive(Clone, Debug)]
struct Places {
    shape: [usize; 4],
    k: (usize, [isize; 3]),
    v: (usize, [isize; 3]),
    kv: usize,
}

fn places() -> impl Strategy<Value = Places> {
    let strides = || {
        // Mostly nested as in real layouts, sometimes anything.
        prop_oneof![
            3 => (0usize..3, 0usize..4, 0usize..3).prop_map(|(a, b, c)| [a, b, c].map(|x| x as isize)),
            1 => prop::array::uniform3(-9isize..40).prop_map(|s| s.map(|x| x + 1000)),
        ]
    };
    (
        (1usize..3, 1usize..4, 1usize..4, 1usize..3),
        prop::sample::select(vec![0usize, 1, 2]),
        (0usize..60, strides()),
        (0usize..60, strides()),
        0usize..400,
    )
        .prop_map(|((l, t, h, half), kind, k, v, kv)| {
            let d = 2 * half;
            // Strides below 1000 are paddings of a layout of a kind, others are taken as they are.
            let resolve = |strides: [isize; 3]| {
                if strides.iter().any(|&stride| stride > 100) {
                    return strides.map(|stride| stride - 1000);
                }
                let [a, b, c] = strides;
                let (d, h, t, l) = (d as isize, h as isize, t as isize, l as isize);
                match kind {
                    // [L, T, H, D]
                    0 => {
                        let head = d + a;
                        let token = h * head + b;
                        [t * token + c, token, head]
                    }
                    // [T, L, H, D]
                    1 => {
                        let head = d + a;
                        let layer = h * head + b;
                        [layer, l * layer + c, head]
                    }
                    // [L, T, H, 2*D]
                    _ => {
                        let head = 2 * d + a;
                        let token = h * head + b;
                        [t * token + c, token, head]
                    }
                }
            };
            Places {
                shape: [l, t, h, d],
                k: (k.0, resolve(k.1)),
                v: (v.0, resolve(v.1)),
                kv,
            }
        })
}

fn elements(first: isize, shape: [usize; 4], strides: [isize; 3]) -> Vec<isize> {
    let [l, t, h, d] = shape.map(|extent| extent as isize);
    let mut all = Vec::new();
    for (layer, token, head) in
        (0..l).flat_map(|a| (0..t).flat_map(move |b| (0..h).map(move |c| (a, b, c))))
    {
        let row = first + layer * strides[0] + token * strides[1] + head * strides[2];
        all.extend(row..row + d);
    }
    all
}

proptest! {
    #![proptest_config(config(4000))]

    /// Against a count of every element: what is accepted has no two elements in one place, and
    /// the named pair really may meet. Contiguous outputs apart from everything are accepted.
    #[test]
    fn overlap_is_never_missed(places in places()) {
        let Places { shape, k, v, kv } = places;
        let [l, t, h, d] = shape;
        // Room for negative and large strides around the middle.
        let mut buffer = vec![half::bf16::ZERO; 4096];
        let middle = 2000usize;
        let base = buffer.as_mut_ptr() as u64;
        let place = |first: usize| base + 2 * (middle + first) as u64;
        let out = |(first, strides): (usize, [isize; 3])| {
            let strides = [strides[0], strides[1], strides[2], 1];
            // SAFETY: extents up to 3 and strides up to 100 stay within the buffer around its
            // middle; overlapping views are never run.
            unsafe {
                TensorViewMut::from_raw_parts(
                    place(first), Device::Cpu, DType::Bf16, &shape, &strides)
            }.expect("a view")
        };
        let kv_shape = [t, l, 2 * h * d];
        let kv_strides = [(l * 2 * h * d) as isize, (2 * h * d) as isize, 1];
        // SAFETY: as above, and the view is only read.
        let kv_view = unsafe {
            TensorView::from_raw_parts(place(kv), Device::Cpu, DType::Bf16, &kv_shape, &kv_strides)
        }.expect("a view");
        let (ones, eps) = (vec![half::bf16::ONE; l.max(1) * d], vec![1e-6f32; l]);
        let positions = vec![0i64; t];
        let inputs = Inputs {
            kv: kv_view,
            k_norm_weight: TensorView::from_slice(&ones, &[l, d]).expect("weights"),
            eps: TensorView::from_slice(&eps, &[l]).expect("eps"),
            cos_sin_cache: TensorView::from_slice(&ones[..d], &[1, d]).expect("a table"),
            positions: TensorView::from_slice(&positions, &[t]).expect("positions"),
            value_scale: None,
        };
        let geometry = Config {
            num_kv_heads: h,
            head_dim: d,
            rotary_dim: d,
            rope_style: RopeStyle::Neox,
            norm_weight: NormWeight::Plain,
        };
        let outputs = Outputs { k: Output::Into(out(k)), v: Output::Into(out(v)) };
        let result = Plan::new(geometry, inputs, outputs).map(|_| ());

        let k_elements = elements(k.0 as isize, shape, k.1);
        let v_elements = elements(v.0 as isize, shape, v.1);
        let kv_elements: Vec<isize> =
            (kv as isize..(kv + t * l * 2 * h * d) as isize).collect();
        let set = |elements: &[isize]| elements.iter().copied().collect::<HashSet<_>>();
        let (k_set, v_set, kv_set) = (set(&k_elements), set(&v_elements), set(&kv_elements));
        let apart = k_set.len() == k_elements.len()
            && v_set.len() == v_elements.len()
            && k_set.is_disjoint(&v_set)
            && k_set.is_disjoint(&kv_set)
            && v_set.is_disjoint(&kv_set);
        match result {
            Ok(()) => prop_assert!(apart, "accepted though elements meet"),
            Err(Error::Overlap { argument, other }) => {
                // Refusing more than needed is allowed, but not where the ranges are apart.
                let elements = |argument| match argument {
                    Argument::KOut => &k_elements,
                    Argument::VOut => &v_elements,
                    Argument::Kv => &kv_elements,
                    other => panic!("{other} has memory of its own"),
                };
                if argument != other {
                    let range = |elements: &[isize]| {
                        let first = *elements.iter().min().expect("an element");
                        first..=*elements.iter().max().expect("an element")
                    };
                    let (a, b) = (range(elements(argument)), range(elements(other)));
                    prop_assert!(a.start() <= b.end() && b.start() <= a.end());
                }
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}
