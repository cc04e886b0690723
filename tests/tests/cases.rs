//! Faults that broke real systems of this kind, each reduced to the smallest input. The list with
//! its numbers is `tests/CASES.md`; the projects are the ones where users met them.

use fused_kv::{
    Argument, Config, DType, Device, Error, Inputs, NormWeight, Output, Outputs, Plan, RopeStyle,
    TensorView, TensorViewMut,
};
use fused_kv_tests::case::Values;
use fused_kv_tests::cases::{self, FLOATS, STYLES};
use fused_kv_tests::compare::{assert_bits, assert_oracle};
use fused_kv_tests::element::{decode, encode, encode_all};
use fused_kv_tests::{Case, Layout, Outcome, Runner, Spec, Tensor, oracle, reference};
use memmap2::{MmapMut, MmapOptions};

/// Runs a built case on the CPU and compares it bit for bit with the reference.
fn run(case: &Case) -> Outcome {
    let outcome = Runner::Cpu.run(case).expect("a valid case");
    assert_bits(case, &outcome, &reference::compute(case));
    outcome
}

/// Runs a spec, and compares it with the f64 oracle too.
fn check(spec: &Spec) -> Outcome {
    let case = spec.build();
    let outcome = run(&case);
    if spec.values == Values::Normal {
        assert_oracle(&case, &outcome, &oracle::compute(&case));
    }
    outcome
}

fn check_all(specs: Vec<Spec>) {
    assert!(!specs.is_empty());
    for spec in specs {
        check(&spec);
    }
}

/// A tensor of f32 values, contiguous.
fn tensor(dtype: DType, shape: &[usize], values: impl IntoIterator<Item = f32>) -> Tensor {
    let bytes = encode_all(dtype, values);
    Tensor::input(dtype, shape, &Layout::default(), &bytes)
}

/// Offsets and launch geometry.
mod offsets {
    use super::*;

    /// Address space of `len` bytes of which only what is touched takes memory.
    fn reserve(len: usize) -> MmapMut {
        MmapOptions::new()
            .len(len)
            .no_reserve_swap()
            .map_anon()
            .expect("address space that is not committed")
    }

    /// A view of `shape` with `strides`, `first` bytes into the mapping.
    fn view<'a>(
        map: &'a MmapMut,
        first: usize,
        dtype: DType,
        shape: &[usize],
        strides: &[isize],
    ) -> TensorView<'a> {
        // SAFETY: the callers' layouts end within the mapping, and nothing writes it while the
        // view is borrowed from it.
        unsafe {
            TensorView::from_raw_parts(
                map.as_ptr() as u64 + first as u64,
                Device::Cpu,
                dtype,
                shape,
                strides,
            )
        }
        .expect("a view")
    }

    fn view_mut<'a>(
        map: &'a mut MmapMut,
        dtype: DType,
        shape: &[usize],
        strides: &[isize],
    ) -> TensorViewMut<'a> {
        // SAFETY: the callers' layouts end within the mapping, which the view borrows alone.
        unsafe {
            TensorViewMut::from_raw_parts(
                map.as_mut_ptr() as u64,
                Device::Cpu,
                dtype,
                shape,
                strides,
            )
        }
        .expect("a view")
    }

    /// Three tokens whose stride is `stride` elements, as source and as destination, give the
    /// rows that the same tokens give in small memory.
    fn far_tokens(stride: usize, axis: usize) {
        // `axis` 0: tokens are far apart; 1: layers are.
        let (tokens, layers) = if axis == 0 { (3, 2) } else { (2, 3) };
        let case = Spec {
            tokens,
            layers,
            heads: 2,
            head_dim: 16,
            rotary_dim: 8,
            ..Spec::default()
        }
        .build();
        let expected = reference::compute(&case);
        let size = 2;
        let row = 2 * 2 * 16;
        let kv_strides = if axis == 0 {
            [stride as isize, row as isize, 1]
        } else {
            [row as isize, stride as isize, 1]
        };
        // Outputs are [L, T, H, D]; the far axis is far here too.
        let out_strides = if axis == 0 {
            [32, stride as isize, 16, 1]
        } else {
            [stride as isize, 32, 16, 1]
        };
        let len = 2 * stride * size + 4096;
        let (mut kv, mut k, mut v) = (reserve(len), reserve(len), reserve(len));
        let kv_bytes = case.kv.gather();
        let place = |strides: &[isize], outer: usize, inner: usize| {
            (outer as isize * strides[0] + inner as isize * strides[1]) as usize * size
        };
        for token in 0..tokens {
            for layer in 0..layers {
                let to = place(&kv_strides, token, layer);
                let from = (token * layers + layer) * row * size;
                kv[to..to + row * size].copy_from_slice(&kv_bytes[from..from + row * size]);
            }
        }
        let view_of = |tensor: &Tensor| {
            TensorView::from_bytes(
                &tensor.memory[tensor.first..][..tensor.len() * tensor.dtype.size()],
                tensor.dtype,
                &tensor.shape,
            )
            .map(|view| view.address())
            .expect("a contiguous tensor")
        };
        let contiguous = |tensor: &Tensor| {
            // SAFETY: a contiguous tensor of the case, which outlives the plan.
            unsafe {
                TensorView::from_raw_parts(
                    view_of(tensor),
                    Device::Cpu,
                    tensor.dtype,
                    &tensor.shape,
                    &tensor.strides,
                )
            }
            .expect("a view")
        };
        let shape = case.out_shape();
        let mut plan = Plan::new(
            case.config,
            Inputs {
                kv: view(&kv, 0, DType::Bf16, &case.kv.shape, &kv_strides),
                k_norm_weight: contiguous(&case.k_norm_weight),
                eps: contiguous(&case.eps),
                cos_sin_cache: contiguous(&case.cos_sin_cache),
                positions: contiguous(&case.positions),
                value_scale: None,
            },
            Outputs {
                k: Output::Into(view_mut(&mut k, DType::Bf16, &shape, &out_strides)),
                v: Output::Into(view_mut(&mut v, DType::Bf16, &shape, &out_strides)),
            },
        )
        .expect("a valid job");
        plan.run().expect("a run");
        plan.check().expect("positions of the table");
        drop(plan);
        let out_row = 32 * size;
        for (map, expected) in [(&k, &expected.k), (&v, &expected.v)] {
            for layer in 0..layers {
                for token in 0..tokens {
                    let at = place(&out_strides, layer, token);
                    let from = (layer * tokens + token) * out_row;
                    assert!(
                        map[at..at + out_row] == expected[from..from + out_row],
                        "layer {layer}, token {token}, stride {stride}"
                    );
                    // What follows the row is still zero, or the next row.
                    assert!(place(&out_strides, layer, token) + out_row <= len);
                }
            }
            // Where an offset cut to 32 bits would have landed, nothing was written.
            let near = 2 * 32 * 3 * size;
            assert!(map[near..near + 2048].iter().all(|&byte| byte == 0));
        }
    }

    /// 1 (Liger 803, sglang PR 27638): three tokens whose stride is 2^30 elements; the third is at
    /// 2^31.
    #[test]
    fn offsets_past_two_to_the_31_elements() {
        far_tokens(1 << 30, 0);
        far_tokens(1 << 30, 1);
    }

    /// 5 (llama.cpp PR 18340): a stride at and above 2^31 survives the border to the kernel, also
    /// one that wraps to a small number in 32 bits.
    #[test]
    fn strides_of_two_to_the_31_and_more() {
        for stride in [1 << 31, (1 << 31) + 64, (1 << 32) + 64] {
            far_tokens(stride, 0);
            far_tokens(stride, 1);
        }
    }

    /// 3 (FreeToken 186, fla PR 1077): each count above 65535, where a grid's second and third
    /// dimensions end.
    #[test]
    fn counts_above_65535() {
        check_all(cases::counts_above_65535());
    }

    /// 4 (sglang PR 23636): no tokens validate, launch nothing, succeed, and give two distinct
    /// outputs.
    #[test]
    fn no_tokens() {
        check_all(cases::no_tokens());
    }
}

/// Positions and the table.
mod positions {
    use super::*;

    /// 6 (vLLM 57941 and PR 57964, sglang PR 10788, pegainfer 220): the last row works; past the
    /// end, negative and huge positions are reported, their rows stay untouched, and the guard
    /// after the table is not read into anything.
    #[test]
    fn the_ends_of_the_table() {
        for spec in cases::ends_of_the_table() {
            let case = spec.build();
            let outcome = run(&case);
            let positions = spec.positions.expect("given positions");
            let bad: Vec<usize> = (0..positions.len())
                .filter(|&token| !(0..64).contains(&positions[token]))
                .collect();
            assert_eq!(
                outcome.check,
                Err(Error::PositionOutOfRange {
                    token: bad[0] as u64,
                    position: positions[bad[0]],
                    table_rows: 64,
                    count: bad.len() as u64,
                })
            );
            // The guard after the table is NaN, and so is what lies between padded rows.
            let row = 2 * 128;
            for (index, value) in outcome.k.values().iter().enumerate() {
                if !bad.contains(&(index / row % positions.len())) {
                    assert!(value.is_finite());
                }
            }
        }
    }

    /// An empty table has no valid position, and no row is written.
    #[test]
    fn an_empty_table() {
        let outcome = run(&cases::an_empty_table().build());
        assert!(matches!(
            outcome.check,
            Err(Error::PositionOutOfRange {
                token: 0,
                position: 0,
                table_rows: 0,
                count: 5
            })
        ));
    }

    /// 7 (sglang 35345): M-RoPE positions `[3, T]` are refused, also a `[3, n]` view of a
    /// `[3, max]` buffer.
    #[test]
    fn three_rows_of_positions() {
        for layout in [Layout::default(), Layout::padded(&[11, 0])] {
            let mut case = Spec::default().build();
            let bytes = [0i64; 15].map(i64::to_le_bytes).concat();
            case.positions = Tensor::input(DType::I64, &[3, 5], &layout, &bytes);
            assert_eq!(
                Runner::Cpu.run(&case).expect_err("rank 2"),
                Error::PositionsRank {
                    found: [3, 5].into(),
                    tokens: 5
                }
            );
        }
    }

    /// 8 (vLLM PR 43676): D = 128, R = 64 with a `[P, 64]` table is right; any other width is
    /// refused.
    #[test]
    fn the_width_of_the_table_is_the_rotary_dim() {
        check_all(cases::half_rotated());
        for width in [32, 63, 128] {
            let mut case = Spec {
                rotary_dim: 64,
                ..Spec::default()
            }
            .build();
            case.cos_sin_cache = tensor(DType::F32, &[64, width], vec![0.5; 64 * width]);
            assert_eq!(
                Runner::Cpu.run(&case).expect_err("another width"),
                Error::TableShape {
                    found: [64, width].into(),
                    rotary_dim: 64
                }
            );
        }
    }

    /// 9 (vLLM PR 1004, TensorRT-LLM PR 16069) and 21 (vLLM PR 43520): every type of the table,
    /// and of the weight, with every type of kv.
    #[test]
    fn pairs_of_types() {
        check_all(cases::pairs_of_types());
    }

    /// 10 (sglang PR 29729): inputs are never modified; the second call gives what the first gave.
    /// (The runner compares the bytes of every input, guards too.)
    #[test]
    fn inputs_stay_as_they_are() {
        for dtype in FLOATS {
            let case = Spec {
                value_scale: true,
                norm_weight: NormWeight::Offset,
                ..Spec::default().dtype(dtype)
            }
            .build();
            let once = run(&case);
            let twice = Runner::Cpu.run_times(&case, 2).expect("a valid case");
            assert_eq!((once.k, once.v), (twice.k, twice.v));
        }
    }

    /// 11 (sglang PR 22711): a table scaled by an attention factor is used as given.
    #[test]
    fn a_table_that_is_not_of_unit_length() {
        let plain = Spec {
            table: DType::F32,
            kv: DType::F32,
            ..Spec::default()
        };
        let scaled = check(&Spec {
            attention_factor: 1.28,
            ..plain.clone()
        });
        let plain = check(&plain);
        for (scaled, plain) in scaled.k.values().iter().zip(plain.k.values()) {
            approx::assert_relative_eq!(*scaled, 1.28 * plain, max_relative = 1e-5, epsilon = 1e-5);
        }
    }

    /// 12 (FlashInfer PR 4349): no rotation, odd ones and ones beyond the head are refused.
    #[test]
    fn impossible_rotary_dims() {
        for rotary_dim in [0, 1, 63, 65, 127, 129, 130, 256] {
            let mut case = Spec::default().build();
            case.config.rotary_dim = rotary_dim;
            assert_eq!(
                Runner::Cpu
                    .run(&case)
                    .expect_err("an impossible rotary_dim"),
                Error::Geometry {
                    head_dim: 128,
                    rotary_dim,
                    num_kv_heads: 2
                }
            );
        }
    }
}

/// Rotary layout and geometry.
mod rotary {
    use super::*;

    /// 13 (vLLM 51049): D = 128, R = 64 and many heads. (On the GPU every dispatch path is forced
    /// in the GPU tests.)
    #[test]
    fn many_heads_and_half_rotated() {
        check_all(cases::many_heads());
    }

    /// 14 (pie 602): pairs are (i, i + R/2), not (i, i + D/2): D = 256, R = 64, position 700, seen
    /// on the rotated K.
    #[test]
    fn the_partner_is_half_of_the_rotary_dim_away() {
        let spec = Spec {
            tokens: 1,
            layers: 1,
            heads: 1,
            head_dim: 256,
            rotary_dim: 64,
            table_rows: 701,
            positions: Some(vec![700]),
            ..Spec::default().dtype(DType::F32)
        };
        check(&spec);
        // One element of 16 in a row of zeros: it is normed to 16 (256 elements, eps 0) and turns
        // into its partner, 32 further on, and nowhere else.
        let mut case = spec.build();
        let mut row = vec![0.0; 512];
        row[3] = 16.0;
        case.kv = tensor(DType::F32, &[1, 1, 512], row);
        case.k_norm_weight = tensor(DType::F32, &[1, 256], vec![1.0; 256]);
        case.eps = tensor(DType::F32, &[1], [0.0]);
        let k = run(&case).k.values();
        let angle = 700.0 * 10_000f64.powf(-2.0 * 3.0 / 64.0);
        approx::assert_abs_diff_eq!(f64::from(k[3]), 16.0 * angle.cos(), epsilon = 1e-5);
        approx::assert_abs_diff_eq!(f64::from(k[35]), 16.0 * angle.sin(), epsilon = 1e-5);
        let elsewhere = (0..256).filter(|i| ![3, 35].contains(i));
        assert!(elsewhere.into_iter().all(|i| k[i] == 0.0));
    }

    /// 15 (vllm-ascend PR 15688): the sine begins at column R/2 also where R is no power of two.
    #[test]
    fn rotary_dims_that_are_no_power_of_two() {
        check_all(cases::odd_rotary_dims());
    }

    /// 16 (FlashInfer 4299, 528, 2104): head sizes off the beaten track, rotated in full and in
    /// part.
    #[test]
    fn uncommon_head_dims() {
        check_all(cases::uncommon_head_dims());
    }

    /// 17 (sglang PR 30342): the wrong style gives plausible numbers. K = [1, 2, 3, 4], D = R = 4:
    /// the numbers of either style, worked by hand.
    #[test]
    fn the_styles_differ_as_they_should() {
        // Angles of 30 and 60 degrees.
        let (a, b) = ((0.5f64 * 3f64.sqrt(), 0.5), (0.5, 0.5f64 * 3f64.sqrt()));
        // eps = 0: the mean square of [1, 2, 3, 4] is 7.5.
        let n = [1.0, 2.0, 3.0, 4.0].map(|x: f64| x / 7.5f64.sqrt());
        let turn = |x: f64, y: f64, (cos, sin)| (x * cos - y * sin, y * cos + x * sin);
        let ((k0, k2), (k1, k3)) = (turn(n[0], n[2], a), turn(n[1], n[3], b));
        let neox = [k0, k1, k2, k3];
        let ((k0, k1), (k2, k3)) = (turn(n[0], n[1], a), turn(n[2], n[3], b));
        let interleaved = [k0, k1, k2, k3];
        for (style, expected) in STYLES.into_iter().zip([neox, interleaved]) {
            let mut case = Spec {
                tokens: 1,
                layers: 1,
                heads: 1,
                head_dim: 4,
                rotary_dim: 4,
                style,
                positions: Some(vec![1]),
                ..Spec::default().dtype(DType::F32)
            }
            .build();
            case.kv = tensor(DType::F32, &[1, 1, 8], [1., 2., 3., 4., 5., 6., 7., 8.]);
            case.k_norm_weight = tensor(DType::F32, &[1, 4], [1.0; 4]);
            case.eps = tensor(DType::F32, &[1], [0.0]);
            let table = [a.0, b.0, a.1, b.1].map(|x| x as f32);
            case.cos_sin_cache = tensor(DType::F32, &[2, 4], [[9.0; 4], table].concat());
            let outcome = run(&case);
            for (found, expected) in outcome.k.values().into_iter().zip(expected) {
                approx::assert_abs_diff_eq!(f64::from(found), expected, epsilon = 1e-6);
            }
            assert_eq!(outcome.v.values(), [5.0, 6.0, 7.0, 8.0]);
        }
    }
}

/// The norm.
mod norm {
    use super::*;

    /// 18 (vLLM PR 56431): each layer has its own weight and eps.
    #[test]
    fn weights_and_eps_of_each_layer() {
        let mut case = Spec {
            layers: 2,
            positions: Some(vec![0; 5]),
            ..Spec::default().dtype(DType::F32)
        }
        .build();
        case.kv = tensor(DType::F32, &case.kv.shape.clone(), vec![1.0; case.kv.len()]);
        let weights = [[1.0f32; 128], [2.0; 128]].concat();
        case.k_norm_weight = tensor(DType::F32, &[2, 128], weights);
        case.eps = tensor(DType::F32, &[2], [0.0, 3.0]);
        // Position 0: no rotation. Layer 0: 1 / sqrt(1 + 0) * 1; layer 1: 1 / sqrt(1 + 3) * 2 is
        // the same number, so the layers are told apart by a third weight as well.
        let k = run(&case).k.values();
        assert!(k.iter().all(|&k| k == 1.0));
        let weights = [[1.0f32; 128], [6.0; 128]].concat();
        case.k_norm_weight = tensor(DType::F32, &[2, 128], weights);
        let k = run(&case).k.values();
        let (first, second) = k.split_at(k.len() / 2);
        assert!(first.iter().all(|&k| k == 1.0));
        assert!(second.iter().all(|&k| k == 3.0));
    }

    /// 19 (vLLM PR 53115, 42325): one rounding, at the store. The results of an added rounding
    /// after the norm, and after the weight, differ here in many elements, and the library's are
    /// those without.
    #[test]
    fn one_rounding_at_the_store() {
        for dtype in [DType::Bf16, DType::F16] {
            for style in STYLES {
                let case = Spec {
                    tokens: 16,
                    style,
                    ..Spec::default().dtype(dtype)
                }
                .build();
                let found = run(&case).k.bits();
                let round = |x: f32| decode(dtype, encode(dtype, x));
                let variant = |after_norm: bool, after_weight: bool| -> Vec<u32> {
                    let [layers, tokens, heads, dim] = case.out_shape();
                    let (kv, weight) = (case.kv.values(), case.k_norm_weight.values());
                    let (eps, table) = (case.eps.values(), case.cos_sin_cache.values());
                    let positions = case.positions.indices();
                    let mut out = vec![0; layers * tokens * heads * dim];
                    for (row, out) in out.chunks_exact_mut(dim).enumerate() {
                        let (layer, token, head) =
                            (row / heads / tokens, row / heads % tokens, row % heads);
                        let from = ((token * layers + layer) * 2 * heads + head) * dim;
                        let x = &kv[from..from + dim];
                        let sum = reference::sum_of_squares(x);
                        let inv = 1.0 / (sum / dim as f32 + eps[layer]).sqrt();
                        let n: Vec<f32> = (0..dim)
                            .map(|i| {
                                let normed = x[i] * inv;
                                let normed = if after_norm { round(normed) } else { normed };
                                let n = normed * weight[layer * dim + i];
                                if after_weight { round(n) } else { n }
                            })
                            .collect();
                        let angles = &table[positions[token] as usize * dim..][..dim];
                        for pair in 0..dim / 2 {
                            let (i, j) = match style {
                                RopeStyle::Neox => (pair, pair + dim / 2),
                                RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
                            };
                            let (cos, sin) = (angles[pair], angles[dim / 2 + pair]);
                            out[i] = encode(dtype, n[i] * cos - n[j] * sin);
                            out[j] = encode(dtype, n[j] * cos + n[i] * sin);
                        }
                    }
                    out
                };
                assert!(found == variant(false, false));
                for (after_norm, after_weight) in [(true, false), (false, true)] {
                    let rounded = variant(after_norm, after_weight);
                    let differing = found.iter().zip(&rounded).filter(|(a, b)| a != b).count();
                    assert!(
                        differing * 20 > found.len(),
                        "an added rounding changes only {differing} of {}",
                        found.len()
                    );
                }
            }
        }
    }

    /// 20 (Liger-Kernel 74, llmman PR 151): offset weights are added in f32.
    #[test]
    fn offset_weights_are_added_in_f32() {
        let case = |norm_weight, weight: f32| {
            let mut case = Spec {
                tokens: 1,
                layers: 1,
                heads: 1,
                norm_weight,
                positions: Some(vec![0]),
                ..Spec::default().dtype(DType::F32)
            }
            .build();
            case.k_norm_weight = tensor(DType::Bf16, &[1, 128], [weight; 128]);
            case
        };
        // w = 0 gives the plain normed row.
        let zero = run(&case(NormWeight::Offset, 0.0));
        let one = run(&case(NormWeight::Plain, 1.0));
        assert_eq!(zero.k, one.k);
        // A row of ones is normed to ones (eps 0): the result is the weight itself.
        let mut case = case(NormWeight::Offset, 15.8125);
        assert_eq!(case.k_norm_weight.values()[0], 15.8125);
        case.kv = tensor(DType::F32, &[1, 1, 256], [1.0; 256]);
        case.eps = tensor(DType::F32, &[1], [0.0]);
        assert!(run(&case).k.values().iter().all(|&k| k == 16.8125));
    }

    /// 22 (pytorch PR 133085): an f16 row of 300s has squares beyond f16; the sum is f32.
    #[test]
    fn squares_beyond_half_precision() {
        let mut case = Spec {
            positions: Some(vec![0; 5]),
            ..Spec::default().dtype(DType::F16)
        }
        .build();
        let values = (0..case.kv.len()).map(|i| if i % 3 == 0 { -300.0 } else { 300.0 });
        case.kv = tensor(DType::F16, &case.kv.shape.clone(), values);
        case.eps = tensor(DType::F32, &[2], [1e-6; 2]);
        let weight = case.k_norm_weight.values();
        let kv = case.kv.values();
        for (index, k) in run(&case).k.values().into_iter().enumerate() {
            let (layer, token, column) = (index / 1280, index / 256 % 5, index % 256);
            let sign = kv[(token * 2 + layer) * 512 + column].signum();
            assert_eq!(k, sign * weight[layer * 128 + column % 128]);
        }
    }

    /// 23 (nntrainer PR 4318): eps stays f32 and is not lost; a row of zeros gives zeros.
    #[test]
    fn small_rows_and_zero_rows() {
        for dtype in FLOATS {
            let mut case = Spec {
                tokens: 2,
                layers: 1,
                heads: 1,
                positions: Some(vec![0; 2]),
                ..Spec::default().dtype(dtype)
            }
            .build();
            // Mean square 2e-4 in the first token, zeros in the second.
            let small = 2e-4f32.sqrt();
            let values = (0..512).map(|i| if i < 128 { small } else { 0.0 });
            case.kv = tensor(dtype, &[2, 1, 256], values);
            case.k_norm_weight = tensor(dtype, &[1, 128], [1.0; 128]);
            for eps in [1e-6f32, 1e-5] {
                case.eps = tensor(DType::F32, &[1], [eps]);
                let outcome = run(&case);
                assert_oracle(&case, &outcome, &oracle::compute(&case));
                let k = outcome.k.values();
                let stored = f64::from(decode(dtype, encode(dtype, small)));
                let expected = stored / (stored * stored + f64::from(eps)).sqrt();
                if dtype == DType::F32 {
                    approx::assert_relative_eq!(f64::from(k[0]), expected, max_relative = 1e-6);
                    assert!(k[0] < 0.998, "eps counts");
                }
                assert!(k[128..].iter().all(|&k| k.to_bits() << 1 == 0));
            }
        }
    }
}

/// Layout.
mod layout {
    use super::*;

    /// 24 (vLLM PR 17091, llama.cpp PR 14580): kv as the middle slice of a wider buffer, a layer
    /// stride larger than 2*H*D, every second position, padded weight and table rows, outputs as
    /// the first T rows of a larger workspace, token-major outputs.
    #[test]
    fn slices_of_larger_buffers() {
        check_all(cases::slices());
    }

    /// Tokens and layers from the last to the first.
    #[test]
    fn negative_strides() {
        check(&cases::negative_strides());
    }

    /// 24: an innermost stride other than 1 is refused.
    #[test]
    fn transposed_tensors() {
        let mut case = Spec::default().build();
        case.kv = Tensor::input(
            DType::Bf16,
            &case.kv.shape.clone(),
            &Layout {
                order: vec![2, 0, 1],
                ..Layout::default()
            },
            &case.kv.gather(),
        );
        assert_eq!(
            Runner::Cpu.run(&case).expect_err("transposed"),
            Error::InnermostStride {
                argument: Argument::Kv,
                found: 10
            }
        );
    }

    /// 25 (vLLM 41257): rows whose length is no multiple of 16 bytes, in sources and destinations
    /// that are aligned and that are not.
    #[test]
    fn rows_that_are_not_aligned() {
        check_all(cases::unaligned_rows());
    }

    /// 26 (TransformerEngine PR 886): every tensor in turn shifted by 1, 2, 4 elements (and, on
    /// the CPU, by single bytes): the same bits as aligned.
    #[test]
    fn every_tensor_shifted_in_turn() {
        for dtype in FLOATS {
            let (aligned, mut specs) = cases::shifted_in_turn(dtype);
            for tensor in 0..8 {
                let mut spec = aligned.clone();
                spec.layouts.get_mut(tensor).byte_offset = 1;
                specs.push(spec);
            }
            let aligned = check(&aligned);
            for spec in specs {
                let shifted = check(&spec);
                assert!(shifted.k.gather() == aligned.k.gather());
                assert!(shifted.v.gather() == aligned.v.gather());
            }
        }
    }

    /// 27: one buffer as both outputs, K written into kv, outputs of stride zero.
    #[test]
    fn overlapping_memory() {
        let (t, l, h, d) = (3, 2, 2, 8);
        let len = l * t * h * d;
        let mut buffer = vec![0.0f32; 3 * len];
        let base = buffer.as_mut_ptr() as u64;
        let shape = [l, t, h, d];
        let contiguous = [(t * h * d) as isize, (h * d) as isize, d as isize, 1];
        let out = |first: usize, strides: &[isize]| {
            // SAFETY: within the buffer; the plans are refused and never run.
            let view = unsafe {
                TensorViewMut::from_raw_parts(
                    base + 4 * first as u64,
                    Device::Cpu,
                    DType::F32,
                    &shape,
                    strides,
                )
            };
            Output::Into(view.expect("a view"))
        };
        let (weights, eps, positions) = (vec![1.0f32; l * d], vec![0.0f32; l], vec![0i64; t]);
        let own = vec![0.0f32; 2 * len];
        let plan = |kv_first: Option<usize>, k, v| {
            let kv_shape = [t, l, 2 * h * d];
            let kv = match kv_first {
                None => TensorView::from_slice(&own, &kv_shape),
                // SAFETY: as above.
                Some(first) => unsafe {
                    TensorView::from_raw_parts(
                        base + 4 * first as u64,
                        Device::Cpu,
                        DType::F32,
                        &kv_shape,
                        &[(l * 2 * h * d) as isize, (2 * h * d) as isize, 1],
                    )
                },
            };
            let inputs = Inputs {
                kv: kv.expect("a view"),
                k_norm_weight: TensorView::from_slice(&weights, &[l, d]).expect("a view"),
                eps: TensorView::from_slice(&eps, &[l]).expect("a view"),
                cos_sin_cache: TensorView::from_slice(&weights[..d], &[1, d]).expect("a view"),
                positions: TensorView::from_slice(&positions, &[t]).expect("a view"),
                value_scale: None,
            };
            let config = Config {
                num_kv_heads: h,
                head_dim: d,
                rotary_dim: d,
                rope_style: RopeStyle::Neox,
                norm_weight: NormWeight::Plain,
            };
            Plan::new(config, inputs, Outputs { k, v }).map(|_| ())
        };
        let meets = |argument, other| Err(Error::Overlap { argument, other });
        assert_eq!(
            plan(None, out(0, &contiguous), out(len, &contiguous)),
            Ok(())
        );
        assert_eq!(
            plan(None, out(0, &contiguous), out(0, &contiguous)),
            meets(Argument::KOut, Argument::VOut)
        );
        assert_eq!(
            plan(Some(0), out(len, &contiguous), Output::Allocate),
            meets(Argument::KOut, Argument::Kv)
        );
        assert_eq!(
            plan(Some(0), Output::Allocate, out(0, &contiguous)),
            meets(Argument::VOut, Argument::Kv)
        );
        let mut zero = contiguous;
        zero[1] = 0;
        assert_eq!(
            plan(None, out(0, &zero), out(len, &contiguous)),
            meets(Argument::KOut, Argument::KOut)
        );
    }
}

/// 42 (a serving worker that left the value scale out: 2.93 against 3.09 accepted tokens):
/// layer 0 is scaled, layer 1 is copied; without scales both are copied bit for bit.
#[test]
fn value_scales_of_each_layer() {
    for dtype in FLOATS {
        let mut case = Spec {
            value_scale: true,
            ..Spec::default().dtype(dtype)
        }
        .build();
        let kv = (0..case.kv.len()).map(|i| (i % 251) as f32 - 125.0);
        case.kv = tensor(dtype, &case.kv.shape.clone(), kv);
        case.value_scale = Some(tensor(DType::F32, &[2], [0.612, 1.0]));
        let scaled = run(&case).v;
        case.value_scale = None;
        let copied = run(&case).v;
        let (scaled, copied) = (scaled.bits(), copied.bits());
        let layer = scaled.len() / 2;
        for index in 0..layer {
            let expected = encode(dtype, decode(dtype, copied[index]) * 0.612f32);
            assert_eq!(scaled[index], expected);
        }
        assert_eq!(scaled[layer..], copied[layer..]);
        assert_ne!(scaled[..layer], copied[..layer]);
    }
}
