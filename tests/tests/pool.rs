//! KV pools on the CPU backend and, through the same plan, on the emulated device: every dispatch
//! path against the scalar reference, bit for bit, canaries before, between and after all pages.
//! `tests/gpu_pool.rs` runs the same on a GPU. The numbers of the cases are those of
//! `CASES.md`.

use fused_kv::{
    Argument, Config, DType, Device, Error, F8E4M3Fn, F8E5M2, Inputs, NormWeight, Path,
    Permissions, Plan, PoolLayout, PoolTarget, PoolTensors, RopeStyle, TensorView, TensorViewMut,
    ViewError, dequantize,
};
use fused_kv_tests::element::{decode, encode, encode_all};
use fused_kv_tests::pool::{
    Form, LAYOUTS, POOL_TYPES, PoolCase, PoolSpec, check_dispatches, every_value,
    skipped_and_reported, specs,
};
use fused_kv_tests::runner::{ALIGNED, few_dispatches, random_dispatches};
use fused_kv_tests::{Case, Layout, Runner, Spec, Tensor};
use half::{bf16, f16};

/// On the CPU, against the reference.
fn cpu(case: &PoolCase) {
    let outcome = case.run(&Runner::Cpu).expect("a valid case");
    case.assert("the CPU", &outcome, &case.expected());
}

#[test]
fn every_spec_on_the_cpu() {
    for spec in specs() {
        cpu(&spec.build());
    }
}

#[test]
fn every_spec_on_the_emulated_device() {
    let mut served = Vec::new();
    for spec in specs() {
        served.extend(check_dispatches(
            &spec.build(),
            &few_dispatches(),
            Runner::Emulated,
        ));
    }
    for path in Path::ALL {
        assert!(served.contains(&path), "{path:?} served no case");
    }
}

/// More tokens and layers than one task or one launch takes.
#[test]
fn larger_jobs() {
    for (index, dtype) in POOL_TYPES.into_iter().enumerate() {
        let spec = PoolSpec {
            job: Spec {
                tokens: 150,
                layers: 3,
                heads: 3,
                rotary_dim: 64,
                seed: index as u64,
                ..Spec::default()
            },
            layout: LAYOUTS[index % 3],
            dtype,
            pages: if LAYOUTS[index % 3] == PoolLayout::Nhd {
                400
            } else {
                40
            },
            page_size: 10,
            ..PoolSpec::default()
        };
        cpu(&spec.build());
    }
    let mut spec = PoolSpec {
        job: Spec {
            tokens: 5,
            layers: 3,
            heads: 1,
            head_dim: 16,
            rotary_dim: 16,
            positions: Some(vec![0, -1, 63, 64, 5]),
            ..Spec::default()
        },
        slots: Some(vec![3, 1, 16, 2, 0]),
        ..PoolSpec::default()
    };
    for dtype in [DType::Bf16, DType::F8E4M3Fn] {
        spec.dtype = dtype;
        let split = fused_kv::Dispatch {
            tokens_per_launch: Some(2),
            layers_per_launch: Some(2),
            threads: Some(64),
            ..fused_kv::Dispatch::default()
        };
        check_dispatches(&spec.build(), &[split], Runner::Emulated);
    }
}

/// No tokens, and no slots.
#[test]
fn empty_jobs_and_pools() {
    let mut spec = PoolSpec {
        slots: Some(Vec::new()),
        ..PoolSpec::default()
    };
    spec.job.tokens = 0;
    cpu(&spec.build());
    for (layout, page_size) in [
        (PoolLayout::Nhd, 1),
        (PoolLayout::PagedNhd, 4),
        (PoolLayout::PagedHnd, 3),
    ] {
        let spec = PoolSpec {
            layout,
            page_size,
            pages: 0,
            slots: Some(vec![0, -1, 5, 1, 2]),
            ..PoolSpec::default()
        };
        cpu(&spec.build());
        check_dispatches(&spec.build(), &few_dispatches(), Runner::Emulated);
    }

    // No pages, of the largest size that 64 bits can count.
    let case = Spec {
        tokens: 1,
        layers: 1,
        ..Spec::default()
    }
    .build();
    let shape = [
        1,
        0,
        1 << 63,
        case.config.num_kv_heads,
        case.config.head_dim,
    ];
    let strides = [0, 0, 0, case.config.head_dim as isize, 1];
    let half =
        || TensorViewMut::from_strided::<bf16>(&mut [], 0, &shape, &strides).expect("a view");
    let slots = TensorView::from_slice(&[0i64], &[1]).expect("slots");
    let pool = PoolTarget::paged_nhd(half(), half(), slots);
    let mut plan = Plan::paged(case.config, inputs(&case), pool).expect("a valid job");
    for emulated in [false, true] {
        match emulated {
            false => plan.run(),
            true => plan.run_emulated(fused_kv::Dispatch::default()),
        }
        .expect("a run");
        assert!(matches!(plan.check(), Err(Error::SlotOutOfRange { .. })));
    }
}

/// 2 (tokenspeed PR 748): a slot times the row stride past 2^31: the last slot of a pool of 2^21
/// rows of 1024 bytes, and one further, for both slot types.
#[test]
fn the_last_slot_of_a_large_pool() {
    let (slots, heads, dim) = ((1usize << 21) + 1, 8, 128);
    let row = heads * dim;
    let case = Spec {
        tokens: 2,
        layers: 1,
        heads,
        ..Spec::default()
    }
    .build();
    let mut maps = [(); 2].map(|()| {
        memmap2::MmapOptions::new()
            .len(slots * row)
            .no_reserve_swap()
            .map_anon()
            .expect("address space that is not committed")
    });
    for narrow in [false, true] {
        for path in [None].into_iter().chain(ALIGNED.map(Some)) {
            let [k, v] = &mut maps;
            k.fill_at(&[(slots - 2) * row, (slots - 1) * row], row);
            v.fill_at(&[(slots - 2) * row, (slots - 1) * row], row);
            let wide = [slots as i64 - 1, slots as i64 - 2];
            let small = wide.map(|slot| slot as i32);
            let list = if narrow {
                TensorView::from_slice(&small, &[2])
            } else {
                TensorView::from_slice(&wide, &[2])
            };
            let shape = [slots, heads, dim];
            let pool = PoolTarget::nhd(
                vec![TensorViewMut::from_bytes(k, DType::F8E4M3Fn, &shape).expect("a view")],
                vec![TensorViewMut::from_bytes(v, DType::F8E4M3Fn, &shape).expect("a view")],
                list.expect("slots"),
            )
            .with_descales(&[0.5], &[0.25]);
            let mut plan = Plan::paged(case.config, inputs(&case), pool).expect("a valid job");
            match path {
                None => plan.run(),
                Some(path) => plan.run_emulated(fused_kv::Dispatch {
                    path: Some(path),
                    threads: Some(64),
                    ..fused_kv::Dispatch::default()
                }),
            }
            .expect("a run");
            plan.check().expect("slots of the pool");
            drop(plan);
            let results = fused_kv_tests::reference::unrounded(&case, &[true; 2]);
            for (map, values, descale) in
                [(&maps[0], &results.k, 0.5), (&maps[1], &results.v, 0.25)]
            {
                for (token, slot) in wide.into_iter().enumerate() {
                    let expected: Vec<u8> = values[token * row..][..row]
                        .iter()
                        .map(|value| encode(DType::F8E4M3Fn, value / descale) as u8)
                        .collect();
                    let found = &map[slot as usize * row..][..row];
                    assert!(found == expected, "slot {slot} by {path:?}");
                }
                // Where offsets cut to 32 bits would have landed.
                assert!(map[..8 * row].iter().all(|&byte| byte == 0));
            }
        }
    }
}

trait FillAt {
    fn fill_at(&mut self, places: &[usize], len: usize);
}

impl FillAt for memmap2::MmapMut {
    fn fill_at(&mut self, places: &[usize], len: usize) {
        for &place in places {
            self[place..place + len].fill(0xcc);
        }
    }
}

/// Views of a case's inputs where they are.
fn inputs(case: &fused_kv_tests::Case) -> Inputs<'_> {
    fn view(tensor: &Tensor) -> TensorView<'_> {
        let address = tensor.memory.as_ptr() as u64 + tensor.first as u64;
        // SAFETY: the tensor's layout lies within its memory, which is borrowed.
        unsafe {
            TensorView::from_raw_parts(
                address,
                Device::Cpu,
                tensor.dtype,
                &tensor.shape,
                &tensor.strides,
            )
        }
        .expect("a view")
    }
    Inputs {
        kv: view(&case.kv),
        k_norm_weight: view(&case.k_norm_weight),
        eps: view(&case.eps),
        cos_sin_cache: view(&case.cos_sin_cache),
        positions: view(&case.positions),
        value_scale: case.value_scale.as_ref().map(view),
    }
}

/// 29 (sglang PR 32477, 36207): slots [0, 5, -1] with NaN in the first and last rows and reserved
/// slot 0: only slot 5 changes.
#[test]
fn padding_rows_of_nan() {
    for dtype in POOL_TYPES {
        let spec = PoolSpec {
            job: Spec {
                tokens: 3,
                layers: 2,
                heads: 1,
                head_dim: 32,
                rotary_dim: 32,
                ..Spec::default()
            },
            layout: PoolLayout::Nhd,
            dtype,
            pages: 8,
            slots: Some(vec![0, 5, -1]),
            reserved_slot: Some(0),
            ..PoolSpec::default()
        };
        let mut case = spec.build();
        let mut kv = case.case.kv.gather();
        let token = kv.len() / 3;
        for row in [0, 2] {
            kv[row * token..][..token].fill(0xff);
        }
        case.case.kv.scatter(&kv);
        cpu(&case);
        check_dispatches(&case, &few_dispatches(), Runner::Emulated);
        let outcome = case.run(&Runner::Cpu).expect("a valid case");
        assert_eq!(outcome.check, Ok(()));
        assert!(
            case.row(&outcome, 0, 5)
                .iter()
                .all(|value| value.is_finite())
        );
        // Without a reserved slot, slot 0 is data: its NaN is stored.
        case.reserved_slot = None;
        cpu(&case);
        let outcome = case.run(&Runner::Cpu).expect("a valid case");
        assert!(case.row(&outcome, 0, 0).iter().all(|value| value.is_nan()));
    }
}

/// 30 (FlashInfer PR 3740): slot = number of slots, and the largest i64: reported, nothing written.
/// (The positions of such tokens are not looked at; those of skipped ones neither.)
#[test]
fn slots_past_the_end() {
    for spec in skipped_and_reported() {
        cpu(&spec.build());
    }
    let spec = PoolSpec {
        slots: Some(vec![3, 16, i64::MAX, 17, -1]),
        ..PoolSpec::default()
    };
    let case = spec.build();
    let outcome = case.run(&Runner::Cpu).expect("a valid case");
    let error = outcome.check.expect_err("slot 16 of 16");
    assert_eq!(
        error,
        Error::SlotOutOfRange {
            token: 1,
            slot: 16,
            num_slots: 16,
            count: 3
        }
    );
    assert_eq!(
        error.to_string(),
        "Slot out of range in fused KV materialization: slots[1] is 16, expected slot < 16 \
         (3 such tokens; their rows were not written)."
    );
    // Fewer slots than the tensors hold.
    let mut fewer = spec;
    fewer.num_slots = Some(3);
    let case = fewer.build();
    cpu(&case);
    check_dispatches(&case, &few_dispatches(), Runner::Emulated);
    let outcome = case.run(&Runner::Cpu).expect("a valid case");
    assert!(matches!(
        outcome.check,
        Err(Error::SlotOutOfRange {
            token: 0,
            slot: 3,
            num_slots: 3,
            count: 4
        })
    ));
}

/// 31 (vLLM PR 22036, aiter PR 4531): pages of tokens seen through the strides of a
/// `[pages, H, 16, 2*D]` allocation; K and V with different strides.
#[test]
fn foreign_strides() {
    // Two groups of rows: a grid whose axes are exchanged does not go unseen.
    let job = Spec {
        layers: 3,
        ..Spec::default()
    };
    for dtype in [DType::Bf16, DType::F8E4M3Fn, DType::F8E5M2] {
        let side_by_side = PoolSpec {
            form: Form::SideBySide,
            page_size: 16,
            pages: 2,
            dtype,
            job: job.clone(),
            ..PoolSpec::default()
        };
        let apart = PoolSpec {
            job: job.clone(),
            page_size: 16,
            pages: 2,
            dtype,
            k: Layout {
                order: vec![0, 2, 1, 3],
                ..Layout::padded(&[3, 0, 16])
            },
            v: Layout {
                order: vec![2, 0, 1, 3],
                ..Layout::padded(&[0, 8, 5])
            },
            ..PoolSpec::default()
        };
        for spec in [side_by_side, apart] {
            let case = spec.build();
            cpu(&case);
            check_dispatches(&case, &few_dispatches(), Runner::Emulated);
        }
    }
}

/// Which block writes which token of which layer, told by forbidding it to: with all layers of a token
/// first, layers differ in the order of their tokens.
#[test]
fn the_order_of_blocks() {
    const TOKENS: usize = 9;
    const LAYERS: usize = 9;
    let slots: Vec<i64> = (0..TOKENS as i64).rev().collect();
    // One token a block.
    let spec = |heads, head_dim| Spec {
        tokens: TOKENS,
        layers: LAYERS,
        heads,
        head_dim,
        rotary_dim: head_dim,
        ..Spec::default()
    };
    let fault = |case: &Case, dtype: DType, layers_first, layer: usize, token: usize| {
        let row = case.config.num_kv_heads * case.config.head_dim * dtype.size();
        let mut pools = [(); 2 * LAYERS].map(|()| vec![0u8; TOKENS * row]);
        let mut permissions = Permissions::default();
        for tensor in [
            &case.kv,
            &case.k_norm_weight,
            &case.eps,
            &case.cos_sin_cache,
            &case.positions,
        ] {
            permissions.allow_reads(tensor.memory.as_ptr() as u64, tensor.memory.len());
        }
        permissions.allow_reads(slots.as_ptr() as u64, 8 * TOKENS);
        for (index, pool) in pools.iter().enumerate() {
            for slot in 0..TOKENS {
                if (index, slot) != (layer, TOKENS - 1 - token) {
                    permissions.allow_writes(pool.as_ptr() as u64 + (slot * row) as u64, row);
                }
            }
        }
        let shape = [TOKENS, case.config.num_kv_heads, case.config.head_dim];
        let mut views: Vec<_> = pools
            .iter_mut()
            .map(|pool| TensorViewMut::from_bytes(pool, dtype, &shape).expect("a view"))
            .collect();
        let v = views.split_off(LAYERS);
        let list = TensorView::from_slice(&slots, &[TOKENS]).expect("slots");
        let mut pool = PoolTarget::nhd(views, v, list);
        if dtype.size() == 1 {
            pool = pool.with_descales(&[1.0; LAYERS], &[1.0; LAYERS]);
        }
        let dispatch = fused_kv::Dispatch {
            threads: Some(64),
            layers_first,
            ..fused_kv::Dispatch::default()
        };
        Plan::paged(case.config, inputs(case), pool)
            .expect("a valid job")
            .run_emulated_within(dispatch, permissions)
            .expect_err("a row without permission")
            .to_string()
    };
    let (common, other) = (spec(8, 128).build(), spec(16, 64).build());
    for (case, dtype, layers_first, by_layers) in [
        (&common, DType::Bf16, None, true),
        (&common, DType::Bf16, Some(true), true),
        (&common, DType::Bf16, Some(false), false),
        // Its kernel has one order.
        (&common, DType::F8E4M3Fn, None, false),
        (&common, DType::F8E4M3Fn, Some(true), false),
        (&other, DType::F8E4M3Fn, None, false),
        (&other, DType::F8E4M3Fn, Some(true), true),
    ] {
        for layer in [0, 1, 6, 8] {
            for token in 0..TOKENS {
                let turned = token ^ (layer % 8);
                let block = match by_layers {
                    false => (token, layer),
                    true if turned < TOKENS => (layer, turned),
                    true => (layer, token),
                };
                let error = fault(case, dtype, layers_first, layer, token);
                assert!(
                    error.contains(&format!("block {block:?}")),
                    "{dtype:?}, {layers_first:?}, layer {layer}, token {token}: {error}"
                );
            }
        }
    }
}

/// 32 (tokenspeed PR 510): a bf16 source and an f16 pool: converted, not copied.
#[test]
fn conversion_between_16_bit_types() {
    for (kv, dtype) in [
        (DType::Bf16, DType::F16),
        (DType::F16, DType::Bf16),
        (DType::F32, DType::Bf16),
        (DType::Bf16, DType::F32),
    ] {
        let spec = PoolSpec {
            job: Spec {
                tokens: 1,
                ..Spec::default().dtype(kv)
            },
            dtype,
            slots: Some(vec![7]),
            ..PoolSpec::default()
        };
        let mut case = spec.build();
        let ones = encode_all(kv, vec![1.5; case.case.kv.len()]);
        case.case.kv.scatter(&ones);
        cpu(&case);
        check_dispatches(&case, &few_dispatches(), Runner::Emulated);
        let outcome = case.run(&Runner::Cpu).expect("a valid case");
        assert!(case.row(&outcome, 1, 7).iter().all(|&value| value == 1.5));
    }
}

/// 33 (vLLM PR 13922): a slot list shorter or longer than T, or of rank 2.
#[test]
fn slot_lists_of_another_length() {
    for shape in [vec![4], vec![6], vec![0], vec![5, 1], vec![]] {
        let mut case = PoolSpec::default().build();
        let bytes = vec![0; shape.iter().product::<usize>() * 8];
        case.slots = Tensor::input(DType::I64, &shape, &Layout::default(), &bytes);
        let error = case.run(&Runner::Cpu).expect_err("another shape");
        assert_eq!(
            error,
            Error::Shape {
                argument: Argument::Slots,
                found: shape.as_slice().into(),
                expected: [5].into()
            }
        );
    }
}

/// 36 (sglang 18818): K = V = [8], descales 2 and 4: the bytes decode to 4 and 2.
#[test]
fn descales_divide() {
    let (ones, eps, table) = ([8.0f32; 2], [0.0f32], [1.0f32, 0.0]);
    // A K of eights is normalized to ones, and the weight makes it eights again.
    let kv = [8.0f32; 4];
    for dtype in [DType::F8E4M3Fn, DType::F8E5M2] {
        let inputs = Inputs {
            kv: TensorView::from_slice(&kv, &[1, 1, 4]).expect("kv"),
            k_norm_weight: TensorView::from_slice(&ones, &[1, 2]).expect("weight"),
            eps: TensorView::from_slice(&eps, &[1]).expect("eps"),
            cos_sin_cache: TensorView::from_slice(&table, &[1, 2]).expect("table"),
            positions: TensorView::from_slice(&[0i64], &[1]).expect("positions"),
            value_scale: None,
        };
        let (mut k, mut v) = ([0u8; 2], [0u8; 2]);
        let pool = PoolTarget::nhd(
            vec![TensorViewMut::from_bytes(&mut k, dtype, &[1, 1, 2]).expect("K")],
            vec![TensorViewMut::from_bytes(&mut v, dtype, &[1, 1, 2]).expect("V")],
            TensorView::from_slice(&[0i64], &[1]).expect("slots"),
        )
        .with_descales(&[2.0], &[4.0]);
        let mut plan = Plan::paged(config(1, 2), inputs, pool).expect("a valid job");
        plan.run().expect("a run");
        plan.check().expect("one slot");
        drop(plan);
        let decoded = |bytes: &[u8], descale| {
            let view = TensorView::from_bytes(bytes, dtype, &[2]).expect("a view");
            dequantize(view, descale).expect("host memory")
        };
        assert_eq!(decoded(&k, 1.0), [4.0; 2]);
        assert_eq!(decoded(&v, 1.0), [2.0; 2]);
        assert_eq!(decoded(&k, 2.0), [8.0; 2]);
        assert_eq!(decoded(&v, 4.0), [8.0; 2]);
    }
}

fn config(num_kv_heads: usize, head_dim: usize) -> Config {
    Config {
        num_kv_heads,
        head_dim,
        rotary_dim: head_dim,
        rope_style: RopeStyle::Neox,
        norm_weight: NormWeight::Plain,
    }
}

/// 37, 38, 39 (FreeToken PR 103, sglang PR 40581, mistral.rs 1570, aiter PR 4102): all 65536 bf16
/// and f16 values as V, both formats, with a descale of 1 and another, on the CPU and by the
/// software conversion of the emulated device. 1.0 is byte 0x38 in e4m3fn.
#[test]
fn every_16_bit_value_to_fp8() {
    for kv in [DType::Bf16, DType::F16] {
        for dtype in [DType::F8E4M3Fn, DType::F8E5M2] {
            let case = every_value(kv, dtype);
            cpu(&case);
            check_dispatches(&case, &few_dispatches(), Runner::Emulated);
        }
    }
    assert_eq!(F8E4M3Fn::from_f32(1.0), F8E4M3Fn(0x38));
    assert_eq!(F8E5M2::from_f32(1.0), F8E5M2(0x3c));
}

/// A dense sweep of f32: every code's midpoint to the next, and 40 neighbours on each side, both
/// signs; and the ends.
#[test]
fn f32_around_every_tie_to_fp8() {
    for (dtype, largest) in [(DType::F8E4M3Fn, 0x7e), (DType::F8E5M2, 0x7b)] {
        let mut values = vec![
            0.0,
            f32::MIN_POSITIVE,
            1e-45,
            f32::MAX,
            f32::INFINITY,
            f32::NAN,
        ];
        for code in 0..largest {
            let middle = (decode(dtype, code) + decode(dtype, code + 1)) / 2.0;
            for step in -40i32..=40 {
                values.push(f32::from_bits(middle.to_bits().wrapping_add_signed(step)));
            }
            values.push(decode(dtype, code));
        }
        let top = decode(dtype, largest);
        values.extend([
            top,
            top.next_up(),
            top.next_down(),
            top * 1.0625,
            top * 1.07,
            top * 2.0,
        ]);
        let negative: Vec<f32> = values.iter().map(|value| -value).collect();
        values.extend(negative);
        for value in values {
            let found = match dtype {
                DType::F8E4M3Fn => F8E4M3Fn::from_f32(value).0,
                _ => F8E5M2::from_f32(value).0,
            };
            assert_eq!(
                u32::from(found),
                encode(dtype, value),
                "{value:e} to {dtype}"
            );
        }
        // Through a job: V in f32, as many as a row holds at a time.
        let spec = PoolSpec {
            job: Spec {
                tokens: 4,
                layers: 1,
                heads: 8,
                ..Spec::default().dtype(DType::F32)
            },
            dtype,
            slots: Some(vec![0, 1, 2, 3]),
            ..PoolSpec::default()
        };
        let mut case = spec.build();
        case.descales = Some([vec![1.0], vec![1.0]]);
        let mut kv = case.case.kv.values();
        let mut ties = (0..largest).cycle().map(|code| {
            let middle = (decode(dtype, code) + decode(dtype, code + 1)) / 2.0;
            [middle.next_down(), middle, middle.next_up()]
        });
        for row in kv.chunks_exact_mut(2048) {
            for three in row[1024..].chunks_exact_mut(3) {
                three.copy_from_slice(&ties.next().expect("endless"));
            }
        }
        case.case.kv.scatter(&encode_all(DType::F32, kv));
        cpu(&case);
        check_dispatches(&case, &few_dispatches(), Runner::Emulated);
    }
}

/// Each step of the way to a float type, by the types' own functions.
#[test]
fn fp8_types_agree_with_their_definition() {
    for bits in 0..=u8::MAX {
        for (found, dtype) in [
            (F8E4M3Fn(bits).to_f32(), DType::F8E4M3Fn),
            (F8E5M2(bits).to_f32(), DType::F8E5M2),
        ] {
            let expected = decode(dtype, bits.into());
            assert!(found == expected || found.is_nan() && expected.is_nan());
        }
    }
    for bits in 0..=u16::MAX {
        for value in [
            bf16::from_bits(bits).to_f32(),
            f16::from_bits(bits).to_f32(),
        ] {
            let found = (F8E4M3Fn::from_f32(value).0, F8E5M2::from_f32(value).0);
            let expected = (
                encode(DType::F8E4M3Fn, value) as u8,
                encode(DType::F8E5M2, value) as u8,
            );
            assert_eq!(found, expected, "{value:e}");
        }
    }
}

/// A round trip with descales other than 1: each value comes back within half a step of its
/// format, and exactly where the format holds it.
#[test]
fn dequantize_gives_back_what_was_stored() {
    for (dtype, step) in [(DType::F8E4M3Fn, 1.0 / 16.0), (DType::F8E5M2, 1.0 / 8.0)] {
        let spec = PoolSpec {
            dtype,
            form: Form::Stacked,
            layout: PoolLayout::PagedHnd,
            slots: Some(vec![3, 9, 14, 0, 5]),
            ..PoolSpec::default()
        };
        let mut case = spec.build();
        let (heads, dim) = (case.case.config.num_kv_heads, case.case.config.head_dim);
        let kv: Vec<f32> = (0..case.case.kv.len())
            .map(|i| ((i % 97) as f32 - 48.0) / 8.0)
            .collect();
        case.case
            .kv
            .scatter(&encode_all(DType::Bf16, kv.iter().copied()));
        let descale = 0.0371f32;
        case.descales = Some([vec![descale; 2], vec![descale; 2]]);
        let outcome = case.run(&Runner::Cpu).expect("a valid case");
        // The V tensor as a view in the memory that the run left: [L, pages, H, page, D].
        let tensor = &case.allocations[1];
        let bytes = &outcome.memory[1][tensor.first..][..tensor.len()];
        let view = TensorView::from_bytes(bytes, dtype, &tensor.shape).expect("a view");
        let values = dequantize(view, descale).expect("host memory");
        let mut compared = 0;
        for (token, slot) in case.slots.indices().into_iter().enumerate() {
            for layer in 0..2 {
                for (head, i) in (0..heads).flat_map(|h| (0..dim).map(move |i| (h, i))) {
                    let (page, inside) = (slot as usize / 4, slot as usize % 4);
                    let at = (((layer * 4 + page) * heads + head) * 4 + inside) * dim + i;
                    let from = ((token * 2 + layer) * 2 + 1) * heads * dim + head * dim + i;
                    let (found, stored) = (values[at], kv[from]);
                    assert!(
                        (found - stored).abs() <= step * stored.abs() + descale * 2e-3,
                        "{found} for {stored}"
                    );
                    compared += 1;
                }
            }
        }
        assert_eq!(compared, 5 * 2 * heads * dim);
    }
    // Strided, of every type.
    for dtype in POOL_TYPES {
        let bytes = encode_all(dtype, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let view = TensorView::from_bytes(&bytes, dtype, &[2, 3]).expect("a view");
        let turned = view.permute(&[1, 0]).expect("both axes");
        assert_eq!(
            dequantize(turned, 0.5).expect("host memory"),
            [0.5, 2.0, 1.0, 2.5, 1.5, 3.0]
        );
        let rows = view.unbind(0).expect("two rows");
        assert_eq!(
            dequantize(rows[1], 1.0).expect("host memory"),
            [4.0, 5.0, 6.0]
        );
    }
    let integers = [1i32, 2];
    let view = TensorView::from_slice(&integers, &[2]).expect("a view");
    assert!(matches!(
        dequantize(view, 1.0),
        Err(Error::Dtype {
            argument: Argument::KPool,
            found: DType::I32,
            ..
        })
    ));
}

/// value_scale and descale are apart: scaled, then divided, rounded once.
#[test]
fn value_scale_and_descale() {
    for dtype in [DType::F8E4M3Fn, DType::F8E5M2] {
        let spec = PoolSpec {
            job: Spec {
                value_scale: true,
                ..Spec::default()
            },
            dtype,
            ..PoolSpec::default()
        };
        let case = spec.build();
        cpu(&case);
        check_dispatches(&case, &few_dispatches(), Runner::Emulated);
    }
}

/// Duplicates: the last token wins on the CPU; refused where that is asked for, and before the
/// emulated device would write one slot from two threads.
#[test]
fn duplicate_slots() {
    let spec = PoolSpec {
        slots: Some(vec![3, 7, 3, -1, -1]),
        ..PoolSpec::default()
    };
    let mut case = spec.build();
    cpu(&case);
    let duplicate = Error::DuplicateSlot {
        slot: 3,
        first: 0,
        second: 2,
    };
    let refused = case.run_with(&Runner::Cpu, |target| target.refuse_duplicates = true);
    assert_eq!(refused, Err(duplicate.clone()));
    for dispatch in few_dispatches() {
        assert_eq!(
            case.run(&Runner::Emulated(dispatch)),
            Err(duplicate.clone())
        );
    }
    // The last of them has no position: the one before stays.
    case.case.positions = Tensor::input(
        DType::I64,
        &[5],
        &Layout::default(),
        &[0i64, 1, 64, 2, 3].map(i64::to_le_bytes).concat(),
    );
    cpu(&case);
    // Skipped slots and ones past the end are no duplicates.
    let mut harmless = spec;
    harmless.slots = Some(vec![-1, 16, 16, 0, 0]);
    harmless.reserved_slot = Some(0);
    let outcome = harmless
        .build()
        .run_with(&Runner::Cpu, |target| target.refuse_duplicates = true)
        .expect("no duplicate");
    assert!(outcome.check.is_err(), "slot 16 is reported");
    // Many tokens for few slots, over many tasks.
    let mut crowded = PoolSpec::default();
    crowded.job.tokens = 300;
    crowded.slots = Some((0..300).map(|token| token * 7 % 16).collect());
    cpu(&crowded.build());
}

/// Each error of a pool: which tensor, what was found, what was expected; nothing is written.
mod refused {
    use super::*;

    /// T = 2, L = 2, H = 2, D = 16; pools of 3 pages of 4 tokens.
    const SHAPE: [usize; 4] = [3, 4, 2, 16];
    const LEN: usize = 3 * 4 * 2 * 16;

    fn case() -> fused_kv_tests::Case {
        Spec {
            tokens: 2,
            head_dim: 16,
            rotary_dim: 16,
            ..Spec::default()
        }
        .build()
    }

    /// Memory for K and V of two layers, and two slots.
    struct Memory {
        k: [Vec<bf16>; 2],
        v: [Vec<bf16>; 2],
        slots: [i64; 2],
    }

    impl Memory {
        fn new() -> Self {
            let zeros = || [(); 2].map(|()| vec![bf16::ZERO; LEN]);
            Self {
                k: zeros(),
                v: zeros(),
                slots: [3, 7],
            }
        }

        fn target(&mut self) -> PoolTarget<'_> {
            fn half(layers: &mut [Vec<bf16>; 2]) -> Vec<TensorViewMut<'_>> {
                let view = |layer| TensorViewMut::from_slice(layer, &SHAPE).expect("a view");
                layers.iter_mut().map(|layer| view(layer)).collect()
            }
            let slots = TensorView::from_slice(&self.slots, &[2]).expect("slots");
            PoolTarget::paged_nhd(half(&mut self.k), half(&mut self.v), slots)
        }
    }

    fn attempt(target: PoolTarget<'_>) -> Result<(), Error> {
        let case = case();
        Plan::paged(case.config, inputs(&case), target).map(drop)
    }

    /// The error of the good target after a change.
    fn refuse(change: impl for<'a> FnOnce(&mut PoolTarget<'a>)) -> Error {
        let mut memory = Memory::new();
        let mut target = memory.target();
        change(&mut target);
        attempt(target).expect_err("refused")
    }

    fn layers<'t, 'a>(tensors: &'t mut Option<PoolTensors<'a>>) -> &'t mut Vec<TensorViewMut<'a>> {
        match tensors {
            Some(PoolTensors::Layers(layers)) => layers,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nothing() {
        attempt(Memory::new().target()).expect("the target without fault");
    }

    #[test]
    fn half_a_pool() {
        let error = refuse(|target| target.v = None);
        let missing = |missing| Error::PoolHalf { missing };
        assert_eq!(error, missing(Argument::VPool));
        assert_eq!(
            error.to_string(),
            "Invalid pool for fused KV materialization: got no v_pool, expected k_pool and v_pool \
             together."
        );
        assert_eq!(refuse(|target| target.k = None), missing(Argument::KPool));
    }

    #[test]
    fn other_layer_counts() {
        let error = refuse(|target| {
            layers(&mut target.v).pop();
        });
        assert_eq!(
            error,
            Error::PoolLayers {
                argument: Argument::VPool,
                found: 1,
                expected: 2
            }
        );
        assert_eq!(
            error.to_string(),
            "Invalid v_pool layers for fused KV materialization: got 1 layers, expected 2."
        );
        let mut memory = [(); 2].map(|()| vec![bf16::ZERO; 3 * LEN]);
        let [k, v] = memory
            .each_mut()
            .map(|memory| TensorViewMut::from_slice(memory, &[3, 3, 4, 2, 16]).expect("a view"));
        let slots = [0i64; 2];
        let slots = TensorView::from_slice(&slots, &[2]).expect("slots");
        assert_eq!(
            attempt(PoolTarget::paged_nhd(k, v, slots)),
            Err(Error::PoolLayers {
                argument: Argument::KPool,
                found: 3,
                expected: 2
            })
        );
    }

    #[test]
    fn other_ranks() {
        let error = refuse(|target| target.layout = PoolLayout::Nhd);
        assert_eq!(
            error,
            Error::PoolRank {
                argument: Argument::KPoolLayer(0),
                found: SHAPE.into(),
                expected: "[slots, heads, head_dim]"
            }
        );
        assert_eq!(
            error.to_string(),
            "Invalid k_pool[0] rank for fused KV materialization: got 4 dimensions with shape \
             (3, 4, 2, 16), expected 3 dimensions [slots, heads, head_dim]."
        );
        let mut memory = Memory::new();
        let [k, _] = &mut memory.k;
        let k = TensorViewMut::from_slice(k, &SHAPE).expect("a view");
        let mut target = Memory::new();
        let mut target = target.target();
        target.k = Some(k.into());
        assert_eq!(
            attempt(target),
            Err(Error::PoolRank {
                argument: Argument::KPool,
                found: SHAPE.into(),
                expected: "[layers, pages, page_size, heads, head_dim]"
            })
        );

        let mut bytes = [0u8; 16];
        let view = TensorViewMut::from_bytes(&mut bytes, DType::Bf16, &[2, 2, 2]).expect("a view");
        let slots = TensorView::from_slice(&[0i64], &[1]).expect("slots");
        let error = PoolTarget::token_major(view, slots).expect_err("rank 3");
        assert_eq!(
            error,
            Error::PoolRank {
                argument: Argument::KPool,
                found: [2, 2, 2].into(),
                expected: "[slots, layers, 2, heads, head_dim]"
            }
        );
        let shape = [1, 1, 4, 1, 2];
        let view = TensorViewMut::from_bytes(&mut bytes, DType::Bf16, &shape).expect("a view");
        let error = PoolTarget::token_major(view, slots).expect_err("four halves");
        assert_eq!(
            error,
            Error::Shape {
                argument: Argument::KPool,
                found: shape.into(),
                expected: [1, 1, 2, 1, 2].into()
            }
        );
    }

    /// One tensor of other extents, in its place.
    fn other_shape(layout: PoolLayout, half: usize, layer: usize, shape: &[usize]) -> Error {
        let good: Vec<usize> = match layout {
            PoolLayout::Nhd => vec![12, 2, 16],
            PoolLayout::PagedNhd => SHAPE.to_vec(),
            PoolLayout::PagedHnd => vec![3, 2, 4, 16],
        };
        let mut bytes: Vec<Vec<u8>> = (0..4).map(|_| vec![0; 16384]).collect();
        let mut views = bytes.iter_mut().enumerate().map(|(index, bytes)| {
            let shape = if index == 2 * half + layer {
                shape
            } else {
                &good
            };
            let len = shape.iter().product::<usize>() * 2;
            TensorViewMut::from_bytes(&mut bytes[..len], DType::Bf16, shape).expect("a view")
        });
        let k: Vec<_> = views.by_ref().take(2).collect();
        let v: Vec<_> = views.collect();
        let slots = [0i64; 2];
        let slots = TensorView::from_slice(&slots, &[2]).expect("slots");
        attempt(PoolTarget::new(layout, k, v, slots)).expect_err("another shape")
    }

    #[test]
    fn heads_or_head_dims_that_do_not_fit() {
        use PoolLayout::{Nhd, PagedHnd, PagedNhd};
        for (layout, half, layer, found, expected) in [
            (Nhd, 0, 0, vec![12, 3, 16], vec![12, 2, 16]),
            (Nhd, 1, 0, vec![12, 2, 18], vec![12, 2, 16]),
            (Nhd, 0, 1, vec![11, 2, 16], vec![12, 2, 16]),
            (PagedNhd, 0, 0, vec![3, 4, 1, 16], vec![3, 4, 2, 16]),
            (PagedNhd, 1, 1, vec![4, 4, 2, 16], vec![3, 4, 2, 16]),
            (PagedNhd, 1, 0, vec![3, 2, 2, 16], vec![3, 4, 2, 16]),
            (PagedHnd, 0, 0, vec![3, 4, 2, 16], vec![3, 2, 2, 16]),
            (PagedHnd, 1, 1, vec![3, 2, 4, 8], vec![3, 2, 4, 16]),
        ] {
            let argument = match half {
                0 => Argument::KPoolLayer(layer),
                _ => Argument::VPoolLayer(layer),
            };
            assert_eq!(
                other_shape(layout, half, layer, &found),
                Error::Shape {
                    argument,
                    found: found.as_slice().into(),
                    expected: expected.as_slice().into()
                }
            );
        }
        assert_eq!(
            other_shape(Nhd, 1, 1, &[12, 2, 18]).to_string(),
            "Invalid v_pool[1] shape for fused KV materialization: got (12, 2, 18), expected \
             (12, 2, 16)."
        );
    }

    #[test]
    fn more_slots_than_the_pool_holds() {
        let error = refuse(|target| target.num_slots = Some(13));
        assert_eq!(
            error,
            Error::PoolSlots {
                found: 13,
                capacity: 12
            }
        );
    }

    /// A pool of this dtype in bytes.
    fn of_dtype(
        dtype: DType,
        change: impl for<'a> FnOnce(&mut PoolTarget<'a>),
    ) -> Result<(), Error> {
        let mut bytes: Vec<Vec<u8>> = (0..4).map(|_| vec![0; LEN * dtype.size()]).collect();
        let mut views = bytes
            .iter_mut()
            .map(|bytes| TensorViewMut::from_bytes(bytes, dtype, &SHAPE).expect("a view"));
        let k: Vec<_> = views.by_ref().take(2).collect();
        let v: Vec<_> = views.collect();
        let slots = [0i64, 1];
        let slots = TensorView::from_slice(&slots, &[2]).expect("slots");
        let mut target = PoolTarget::paged_nhd(k, v, slots);
        change(&mut target);
        attempt(target)
    }

    #[test]
    fn unsupported_and_mixed_dtypes() {
        for dtype in [DType::I32, DType::I64] {
            let error = of_dtype(dtype, |_| ()).expect_err("integers");
            assert_eq!(
                error.to_string(),
                format!(
                    "Invalid k_pool[0] dtype for fused KV materialization: got {dtype}, expected \
                     bfloat16, float16, float32, float8_e4m3fn or float8_e5m2."
                )
            );
        }
        let mut other = vec![f16::ZERO; LEN];
        let mut memory = Memory::new();
        let mut target = memory.target();
        layers(&mut target.v)[1] = TensorViewMut::from_slice(&mut other, &SHAPE).expect("a view");
        assert_eq!(
            attempt(target).expect_err("float16").to_string(),
            "Invalid v_pool[1] device/dtype for fused KV materialization: got device=cpu, \
             dtype=float16, expected device=cpu, dtype=bfloat16."
        );
    }

    /// A device address, where no driver knows better.
    #[cfg(not(feature = "cuda"))]
    #[test]
    fn another_device() {
        let mut memory = Memory::new();
        let address = memory.k[1].as_mut_ptr() as u64;
        let mut target = memory.target();
        // SAFETY: never run; the memory is the layer's own.
        let view = unsafe {
            TensorViewMut::from_raw_parts(
                address,
                Device::Cuda(0),
                DType::Bf16,
                &SHAPE,
                &[128, 32, 16, 1],
            )
        };
        layers(&mut target.k)[1] = view.expect("a view");
        assert_eq!(
            attempt(target).expect_err("another device").to_string(),
            "Invalid k_pool[1] device/dtype for fused KV materialization: got device=cuda:0, \
             dtype=bfloat16, expected device=cpu, dtype=bfloat16."
        );
    }

    /// 36: missing, zero, negative and not finite descales.
    #[test]
    fn descales() {
        for dtype in [DType::F8E4M3Fn, DType::F8E5M2] {
            let error = of_dtype(dtype, |_| ()).expect_err("no descales");
            assert_eq!(
                error.to_string(),
                format!(
                    "Missing k_descale for fused KV materialization: a pool of {dtype} needs one \
                     descale a layer, expected (2,) values."
                )
            );
            let half = of_dtype(dtype, |target| target.k_descale = Some(vec![1.0; 2]));
            assert_eq!(
                half,
                Err(Error::DescaleMissing {
                    argument: Argument::VDescale,
                    dtype,
                    layers: 2
                })
            );
            for bad in [0.0, -0.0, -1.0, f32::INFINITY, f32::NEG_INFINITY] {
                let found = of_dtype(dtype, |target| {
                    target.k_descale = Some(vec![1.0; 2]);
                    target.v_descale = Some(vec![1.0, bad]);
                });
                assert_eq!(
                    found,
                    Err(Error::Descale {
                        argument: Argument::VDescale,
                        layer: 1,
                        found: bad
                    })
                );
            }
            let nan = of_dtype(dtype, |target| {
                target.k_descale = Some(vec![f32::NAN; 2]);
                target.v_descale = Some(vec![1.0; 2]);
            });
            assert_eq!(
                nan.expect_err("NaN").to_string(),
                "Invalid k_descale for fused KV materialization: k_descale[0] is NaN, expected a \
                 finite value above 0."
            );
            let short = of_dtype(dtype, |target| {
                target.k_descale = Some(vec![1.0; 2]);
                target.v_descale = Some(vec![1.0; 3]);
            });
            assert_eq!(
                short,
                Err(Error::Shape {
                    argument: Argument::VDescale,
                    found: [3].into(),
                    expected: [2].into()
                })
            );
        }
        let error = refuse(|target| target.v_descale = Some(vec![1.0; 2]));
        assert_eq!(
            error,
            Error::DescaleUnexpected {
                argument: Argument::VDescale,
                dtype: DType::Bf16
            }
        );
    }

    #[test]
    fn strides() {
        let mut wide = vec![bf16::ZERO; 2 * LEN];
        let mut memory = Memory::new();
        let mut target = memory.target();
        layers(&mut target.k)[1] =
            TensorViewMut::from_strided(&mut wide, 0, &SHAPE, &[256, 64, 32, 2]).expect("a view");
        assert_eq!(
            attempt(target),
            Err(Error::InnermostStride {
                argument: Argument::KPoolLayer(1),
                found: 2
            })
        );
        let mut target = memory.target();
        layers(&mut target.v)[1] =
            TensorViewMut::from_strided(&mut wide, 0, &SHAPE, &[256, 64, 32, 1]).expect("a view");
        assert_eq!(
            attempt(target),
            Err(Error::PoolStrides {
                argument: Argument::VPoolLayer(1),
                found: vec![256, 64, 32, 1],
                expected: vec![128, 32, 16, 1]
            })
        );
    }

    /// Pools that share memory with themselves, with each other, or with an input.
    #[test]
    fn overlap() {
        let meets = |argument, other| Err(Error::Overlap { argument, other });
        let mut memory = Memory::new();
        let k0 = memory.k[0].as_mut_ptr() as u64;
        let contiguous = [128isize, 32, 16, 1];
        let view = |address: u64, strides: &[isize]| {
            // SAFETY: within the memory of the test; refused, never run.
            unsafe {
                TensorViewMut::from_raw_parts(address, Device::Cpu, DType::Bf16, &SHAPE, strides)
            }
            .expect("a view")
        };
        let mut target = memory.target();
        layers(&mut target.v)[1] = view(k0 + 64, &contiguous);
        let (k, v) = (Argument::KPoolLayer, Argument::VPoolLayer);
        assert_eq!(attempt(target), meets(k(0), v(1)));
        let mut target = memory.target();
        layers(&mut target.k)[1] = view(k0, &contiguous);
        assert_eq!(attempt(target), meets(k(0), k(1)));
        // Pages half over each other, in every layer alike.
        let mut target = memory.target();
        let addresses: Vec<u64> = layers(&mut target.k)
            .iter()
            .map(TensorViewMut::address)
            .collect();
        *layers(&mut target.k) = addresses
            .iter()
            .map(|&address| view(address, &[64, 32, 16, 1]))
            .collect();
        assert_eq!(attempt(target), meets(k(0), k(0)));

        let case = case();
        let mut target = memory.target();
        layers(&mut target.v)[0] = view(inputs(&case).kv.address(), &contiguous);
        assert_eq!(
            Plan::paged(case.config, inputs(&case), target).map(drop),
            meets(v(0), Argument::Kv)
        );
        let mut target = memory.target();
        // SAFETY: as above; two i64 within a layer's memory.
        target.slots =
            unsafe { TensorView::from_raw_parts(k0 + 512, Device::Cpu, DType::I64, &[2], &[1]) }
                .expect("a view");
        assert_eq!(attempt(target), meets(k(0), Argument::Slots));
    }

    #[test]
    fn slots_of_another_dtype() {
        let floats = [0.0f32; 2];
        let mut memory = Memory::new();
        let mut target = memory.target();
        target.slots = TensorView::from_slice(&floats, &[2]).expect("a view");
        assert_eq!(
            attempt(target).expect_err("floats").to_string(),
            "Invalid slots dtype for fused KV materialization: got float32, expected int64 or int32."
        );
    }

    /// Pages whose size is no power of two hold fewer than 2^31 slots.
    #[test]
    fn too_many_slots_in_odd_pages() {
        let case = Spec {
            tokens: 1,
            layers: 1,
            heads: 1,
            head_dim: 2,
            rotary_dim: 2,
            ..Spec::default()
        }
        .build();
        let attempt = |pages: usize, page: usize| {
            let mut maps = [(); 2].map(|()| {
                memmap2::MmapOptions::new()
                    .len(pages * page * 2)
                    .no_reserve_swap()
                    .map_anon()
                    .expect("address space that is not committed")
            });
            let [k, v] = maps.each_mut().map(|map| {
                let shape = [pages, page, 1, 2];
                vec![TensorViewMut::from_bytes(map, DType::F8E5M2, &shape).expect("a view")]
            });
            let slots = [pages as i64 * page as i64 - 1];
            let slots = TensorView::from_slice(&slots, &[1]).expect("slots");
            let pool = PoolTarget::paged_nhd(k, v, slots).with_descales(&[1.0], &[1.0]);
            let mut plan = Plan::paged(case.config, inputs(&case), pool)?;
            plan.run_emulated(fused_kv::Dispatch::default())?;
            plan.check()?;
            drop(plan);
            // The last slot was written, by the division of the kernels.
            assert!(maps.iter().all(|map| map[map.len() - 2..] != [0, 0]));
            Ok(())
        };
        let limit = (1u64 << 31) - 1;
        let pages = (limit / 3) as usize;
        assert_eq!(attempt(pages, 3), Ok(()));
        assert_eq!(
            attempt(pages + 1, 3),
            Err(Error::TooLarge {
                what: "the number of slots in such pages",
                found: 3 * (pages as u64 + 1),
                limit
            })
        );
        assert_eq!(attempt(1 << 30, 4), Ok(()));
    }
}

/// Views of one allocation for K and V of all layers: every way to cut it.
#[test]
fn views_of_one_allocation() {
    let case = Spec {
        tokens: 3,
        head_dim: 16,
        rotary_dim: 16,
        ..Spec::default()
    }
    .build();
    let slots = [5i64, 0, 3];
    let list = TensorView::from_slice(&slots, &[3]).expect("slots");
    let run = |target: PoolTarget<'_>| {
        let mut plan = Plan::paged(case.config, inputs(&case), target).expect("a valid job");
        plan.run().expect("a run");
        plan.check().expect("slots of the pool");
    };
    let results = fused_kv_tests::reference::unrounded(&case, &[true; 3]);
    let len = 2 * 2 * 6 * 2 * 16;
    // Shape, and the index of [half, layer, slot, head] in it.
    type At = fn(usize, usize, usize, usize) -> Vec<usize>;
    let check = |shape: &[usize], memory: &[bf16], at: At| {
        let mut touched = 0;
        for (half, layer, slot) in
            (0..2).flat_map(|h| (0..2).flat_map(move |l| (0..6).map(move |s| (h, l, s))))
        {
            for (head, i) in (0..2).flat_map(|head| (0..16).map(move |i| (head, i))) {
                let mut index = at(half, layer, slot, head);
                index.push(i);
                let offset = index
                    .iter()
                    .zip(shape)
                    .fold(0, |offset, (index, extent)| offset * extent + index);
                let token = slots.iter().position(|&s| s as usize == slot);
                let expected = token.map_or(0, |token| {
                    let from = ((layer * 3 + token) * 2 + head) * 16 + i;
                    touched += 1;
                    match half {
                        0 => encode(DType::Bf16, results.k[from]) as u16,
                        _ => results.v_bits[from] as u16,
                    }
                });
                assert_eq!(memory[offset].to_bits(), expected, "{shape:?} at {index:?}");
            }
        }
        assert_eq!(touched, 2 * 2 * 3 * 2 * 16);
    };
    fn pair(views: Vec<TensorViewMut<'_>>) -> [Vec<TensorViewMut<'_>>; 2] {
        let mut halves = [Vec::new(), Vec::new()];
        for (index, view) in views.into_iter().enumerate() {
            halves[index % 2].push(view);
        }
        halves
    }

    // All layers, token-major.
    let mut memory = vec![bf16::ZERO; len];
    let shape = [6, 2, 2, 2, 16];
    let view = TensorViewMut::from_slice(&mut memory, &shape).expect("a view");
    run(PoolTarget::token_major(view, list).expect("token-major"));
    check(&shape, &memory, |half, layer, slot, head| {
        vec![slot, layer, half, head]
    });

    // Each layer, token-major: [L, slots, 2, H, D].
    let mut memory = vec![bf16::ZERO; len];
    let shape = [2, 6, 2, 2, 16];
    let view = TensorViewMut::from_slice(&mut memory, &shape).expect("a view");
    let layers = view.unbind(0).expect("layers").into_iter();
    let [k, v] = pair(
        layers
            .flat_map(|layer| layer.unbind(1).expect("K and V"))
            .collect(),
    );
    run(PoolTarget::nhd(k, v, list));
    check(&shape, &memory, |half, layer, slot, head| {
        vec![layer, slot, half, head]
    });

    // [L, 2, pages, H, page, D].
    let mut memory = vec![bf16::ZERO; len];
    let shape = [2, 2, 2, 2, 3, 16];
    let view = TensorViewMut::from_slice(&mut memory, &shape).expect("a view");
    let mut halves = view.unbind(1).expect("K and V").into_iter();
    let (k, v) = (halves.next().expect("K"), halves.next().expect("V"));
    run(PoolTarget::paged_hnd(k, v, list));
    check(&shape, &memory, |half, layer, slot, head| {
        vec![layer, half, slot / 3, head, slot % 3]
    });

    // [2, L, pages, page, H, D].
    let mut memory = vec![bf16::ZERO; len];
    let shape = [2, 2, 3, 2, 2, 16];
    let view = TensorViewMut::from_slice(&mut memory, &shape).expect("a view");
    let mut halves = view.unbind(0).expect("K and V").into_iter();
    let (k, v) = (halves.next().expect("K"), halves.next().expect("V"));
    run(PoolTarget::paged_nhd(k, v, list));
    check(&shape, &memory, |half, layer, slot, head| {
        vec![half, layer, slot / 2, slot % 2, head]
    });
}

/// Axes that a view does not have.
#[test]
fn axes_of_views() {
    let values = [0i32; 6];
    let view = TensorView::from_slice(&values, &[2, 3]).expect("a view");
    assert_eq!(
        view.unbind(2).expect_err("two axes").to_string(),
        "Invalid tensor view: a view of 2 dimensions has no axis 2, or it was named twice."
    );
    for order in [&[0, 0][..], &[0], &[0, 2], &[0, 1, 2], &[]] {
        assert!(
            matches!(view.permute(order), Err(Error::View(_))),
            "{order:?}"
        );
    }
    assert_eq!(view.permute(&[1, 0]).expect("both axes").strides(), [1, 3]);
    assert_eq!(view.unbind(1).expect("three columns").len(), 3);
    let empty = TensorView::from_slice::<i32>(&[], &[0, 3]).expect("a view");
    assert!(empty.unbind(0).expect("no rows").is_empty());
    let endless = TensorView::from_slice::<i32>(&[], &[usize::MAX, 0]).expect("a view");
    assert_eq!(
        endless.unbind(0).expect_err("no memory").to_string(),
        format!("Invalid tensor view: no memory for {} views.", usize::MAX)
    );
    assert!(endless.unbind(1).expect("no columns").is_empty());
}

/// Parts that are written have memory of their own, or there are none.
#[test]
fn parts_of_mutable_views_are_apart() {
    let mut values = [0i32; 24];
    for (offset, shape, strides) in [
        // The same row twice; rows that meet in one element, forwards and backwards; equal columns.
        (0, [2, 1, 6], [0, 6, 1]),
        (0, [2, 1, 6], [5, 6, 1]),
        (5, [2, 1, 6], [-5, 6, 1]),
        (0, [2, 3, 2], [3, 1, 0]),
    ] {
        for axis in 0..3 {
            let view = TensorViewMut::from_strided(&mut values, offset, &shape, &strides);
            assert_eq!(
                view.expect("a view").unbind(axis).expect_err("shared"),
                Error::View(ViewError::SharedElements),
                "{strides:?}"
            );
        }
        // Nobody writes what is read.
        let view = TensorView::from_strided(&values, offset, &shape, &strides);
        assert_eq!(view.expect("a view").unbind(0).expect("rows").len(), 2);
    }
    // Rows that alternate, rows from the last to the first, one row, none.
    for (offset, shape, strides, parts) in [
        (0, [2, 3, 2], [2, 4, 1], 2),
        (6, [2, 1, 6], [-6, 0, 1], 2),
        (0, [1, 1, 6], [0, 0, 1], 1),
        (0, [2, 0, 6], [0, 0, 1], 2),
        (0, [0, 2, 6], [0, 0, 1], 0),
    ] {
        let view = TensorViewMut::from_strided(&mut values, offset, &shape, &strides);
        let found = view.expect("a view").unbind(0).expect("rows");
        assert_eq!(found.len(), parts, "{strides:?}");
    }
}

/// Random pools: geometry, types, layouts, slots that are skipped or past the end, positions
/// outside the table.
mod random {
    use super::*;
    use fused_kv_tests::arbitrary::{Alignment, config, spec_with_bad_positions};
    use fused_kv_tests::pool::random_pool;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(config(800))]

        #[test]
        fn on_the_cpu(job in spec_with_bad_positions(Alignment::Byte), seed in any::<u64>()) {
            cpu(&random_pool(job, seed, true).build());
        }
    }

    proptest! {
        #![proptest_config(config(1000))]

        #[test]
        fn on_the_emulated_device(
            mut job in spec_with_bad_positions(Alignment::Element),
            seed in any::<u64>(),
        ) {
            job.tokens = job.tokens.min(3);
            if let Some(positions) = &mut job.positions {
                positions.truncate(3);
            }
            let spec = random_pool(job, seed, false);
            check_dispatches(&spec.build(), &random_dispatches(seed), Runner::Emulated);
        }
    }
}
