//! GPU results against the CPU backend, bit for bit, on every dispatch path; streams, graphs and
//! devices. Without a CUDA device each test says aloud that it skips; `FUSED_KV_REQUIRE_GPU=1`
//! makes that a failure.
//!
//! Every case runs with canaries around and between the rows of its outputs and with the bytes of
//! its inputs compared afterwards: that is part of the runner.

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

#[cfg(feature = "cuda")]
mod gpu {
    use fused_kv::cuda::DeviceMemory;
    use fused_kv::{
        Argument, Config, DType, Device, Dispatch, Error, Inputs, NormWeight, Output, Outputs,
        Path, Plan, RopeStyle, TensorView, TensorViewMut,
    };
    use fused_kv_tests::arbitrary::{Alignment, config, spec_with_bad_positions};
    use fused_kv_tests::case::{SHAPES, Values, every_value};
    use fused_kv_tests::cases::{self, FLOATS, STYLES};
    use fused_kv_tests::gpu::{Gpu, Part, Pinned, TestStream, devices, read, repeat, say, write};
    use fused_kv_tests::runner::{ALIGNED, HostMemory, all_dispatches, check_dispatches};
    use fused_kv_tests::{Case, Outcome, Runner, Spec, Tensor, golden};
    use proptest::strategy::{Strategy, ValueTree};
    use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

    /// Every dispatch, on the device.
    fn check(gpu: &Gpu, case: &Case) -> Vec<Path> {
        check_dispatches(case, &all_dispatches(case), |dispatch| {
            Runner::Cuda(gpu.context.clone(), dispatch)
        })
    }

    /// Every path with its own block size: for sweeps of many cases.
    fn check_paths(gpu: &Gpu, case: &Case) -> Vec<Path> {
        let dispatches = Path::ALL.map(|path| Dispatch {
            path: Some(path),
            ..Dispatch::default()
        });
        check_dispatches(case, &dispatches, |dispatch| {
            Runner::Cuda(gpu.context.clone(), dispatch)
        })
    }

    #[test]
    fn golden_files() {
        let Some(gpu) = Gpu::get() else { return };
        for name in golden::NAMES {
            let golden = golden::load(name);
            check(&gpu, &golden.case);
            // And V equals the file's.
            let outcome = Runner::Cuda(gpu.context.clone(), Dispatch::default())
                .run(&golden.case)
                .expect("a valid case");
            assert!(outcome.v.bits() == golden.v.bits(), "{name}");
        }
    }

    #[test]
    fn every_shape_type_and_style() {
        let Some(gpu) = Gpu::get() else { return };
        let mut served = Vec::new();
        let mut part = Part::from_env();
        for (index, &shape) in SHAPES.iter().enumerate() {
            for dtype in FLOATS {
                for style in STYLES {
                    if !part.takes() {
                        continue;
                    }
                    for values in [Values::Normal, Values::Wild] {
                        let spec = Spec {
                            style,
                            values,
                            seed: index as u64,
                            ..Spec::shape(shape).dtype(dtype)
                        };
                        served.extend(check(&gpu, &spec.build()));
                        served.extend(check(&gpu, &spec.shifted(1).build()));
                    }
                    let spec = Spec {
                        style,
                        norm_weight: NormWeight::Offset,
                        value_scale: true,
                        seed: 100 + index as u64,
                        ..Spec::shape(shape).dtype(dtype).allocated()
                    };
                    served.extend(check(&gpu, &spec.build()));
                }
            }
        }
        for path in Path::ALL {
            assert!(
                served.contains(&path) || !part.is_whole(),
                "{path:?} served no case"
            );
        }
    }

    /// Every even head_dim, rotated in full and by half.
    #[test]
    fn every_head_dim() {
        let Some(gpu) = Gpu::get() else { return };
        let mut part = Part::from_env();
        for head_dim in (2..=576).step_by(2) {
            if !part.takes() {
                continue;
            }
            for rotary_dim in [head_dim, (head_dim / 2) & !1] {
                for style in STYLES {
                    for dtype in [DType::Bf16, DType::F32] {
                        if rotary_dim == 0 {
                            continue;
                        }
                        let spec = Spec {
                            style,
                            table_rows: 8,
                            seed: head_dim as u64,
                            ..Spec::shape((3, 2, 2, head_dim, rotary_dim)).dtype(dtype)
                        };
                        check_paths(&gpu, &spec.build());
                        check_paths(&gpu, &spec.shifted(1).build());
                    }
                }
            }
        }
    }

    #[test]
    fn every_value_of_the_16_bit_types() {
        let Some(gpu) = Gpu::get() else { return };
        let mut part = Part::from_env();
        for dtype in [DType::Bf16, DType::F16] {
            for value_scale in [false, true] {
                if part.takes() {
                    check(&gpu, &every_value(dtype, value_scale));
                }
            }
        }
        // Heads long enough for the vector path, in which each value meets its neighbours.
        for dtype in [DType::Bf16, DType::F16] {
            for value_scale in [false, true] {
                if !part.takes() {
                    continue;
                }
                let mut case = Spec {
                    tokens: 64,
                    layers: 2,
                    heads: 8,
                    head_dim: 64,
                    rotary_dim: 32,
                    value_scale,
                    ..Spec::default().dtype(dtype)
                }
                .build();
                let values: Vec<u8> = (0..2u32 << 16)
                    .flat_map(|i| (i as u16).to_le_bytes())
                    .collect();
                case.kv.scatter(&values);
                let served = check(&gpu, &case);
                assert_eq!(served, ALIGNED);
            }
        }
    }

    #[test]
    fn known_faults() {
        let Some(gpu) = Gpu::get() else { return };
        let mut part = Part::from_env();
        for spec in cases::all().into_iter().filter(|_| part.takes()) {
            check(&gpu, &spec.build());
        }
    }

    /// Random geometry, types, layouts and positions. `FUSED_KV_GPU_CASES` sets how many.
    #[test]
    fn random_cases() {
        let Some(gpu) = Gpu::get() else { return };
        let count = number("FUSED_KV_GPU_CASES", 300);
        TestRunner::new(config(count))
            .run(&spec_with_bad_positions(Alignment::Element), |spec| {
                check(&gpu, &spec.build());
                Ok(())
            })
            .unwrap_or_else(|failure| panic!("{failure}"));
    }

    fn number(variable: &str, default: u32) -> u32 {
        match std::env::var(variable) {
            Ok(value) => value.parse().expect("a number"),
            Err(_) => default,
        }
    }

    /// Many calls with up to 64 tokens, each with its own geometry and layouts.
    /// `FUSED_KV_SOAK` sets how many, `FUSED_KV_SEED` which.
    #[test]
    fn soak() {
        let Some(gpu) = Gpu::get() else { return };
        let calls = number("FUSED_KV_SOAK", 1000);
        let seed = number("FUSED_KV_SEED", 0) as u8;
        let random = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
        let mut random = TestRunner::new_with_rng(config(0), random);
        let strategy = (spec_with_bad_positions(Alignment::Element), 0usize..=64);
        for call in 0..calls {
            let (mut spec, tokens) = strategy.new_tree(&mut random).expect("a case").current();
            let rows = spec.table_rows as i64;
            spec.tokens = tokens;
            spec.positions = spec.positions.map(|positions| {
                let mut rest = (0..).map(|i| i % rows);
                (0..tokens)
                    .map(|token| positions.get(token).copied().or_else(|| rest.next()))
                    .map(|position| position.expect("endless"))
                    .collect()
            });
            let case = spec.build();
            let runner = Runner::Cuda(gpu.context.clone(), Dispatch::default());
            let outcome = runner.run(&case).expect("a valid case");
            let expected = Runner::Cpu.run(&case).expect("a valid case");
            assert_eq!(outcome.check, expected.check, "call {call}");
            assert!(
                same(&outcome, &expected),
                "call {call} differs: {}",
                case.name
            );
        }
    }

    /// Whole memories, canaries included. Rows of unwritten tokens are compared where the caller
    /// supplied the output (they keep what they held) and are zero where the plan allocated it.
    fn same(outcome: &Outcome, expected: &Outcome) -> bool {
        outcome.k.memory == expected.k.memory && outcome.v.memory == expected.v.memory
    }

    /// Three tokens, or layers, so far apart that offsets pass 2^31 elements, and strides that do.
    #[test]
    fn far_strides() {
        let Some(gpu) = Gpu::get() else { return };
        for stride in [1usize << 30, (1 << 31) + 64, (1 << 32) + 64] {
            for axis in [0, 1] {
                if !far(&gpu, stride, axis) {
                    return;
                }
            }
        }
    }

    fn far(gpu: &Gpu, stride: usize, axis: usize) -> bool {
        let (tokens, layers) = if axis == 0 { (3, 2) } else { (2, 3) };
        let case = Spec {
            tokens,
            layers,
            heads: 2,
            head_dim: 16,
            rotary_dim: 16,
            ..Spec::default()
        }
        .build();
        let expected = Runner::Cpu.run(&case).expect("a valid case");
        let row = 2 * 2 * 16;
        let by_axis = |near: usize| match axis {
            0 => (stride, near),
            _ => (near, stride),
        };
        let (kv_token, kv_layer) = by_axis(row);
        let (out_token, out_layer) = by_axis(row / 2);
        let len = 2 * (2 * stride + 4096);
        let (Some(mut kv), Some(mut k), Some(mut v)) =
            (gpu.large(len), gpu.large(len), gpu.large(len))
        else {
            return false;
        };
        let bytes = case.kv.gather();
        for token in 0..tokens {
            for layer in 0..layers {
                let from = (token * layers + layer) * row * 2;
                let to = 2 * (token * kv_token + layer * kv_layer);
                write(&mut kv, to, &bytes[from..from + row * 2]);
            }
        }
        let small = Small::new(gpu, &case);
        let strides = [out_layer as isize, out_token as isize, 16, 1];
        for path in ALIGNED {
            for index in 0..layers * tokens {
                let at = 2 * (index / tokens * out_layer + index % tokens * out_token);
                write(&mut k, at, &[0; 64]);
                write(&mut v, at, &[0; 64]);
            }
            let out = |memory: &DeviceMemory| {
                Output::Into(view_mut(
                    memory,
                    0,
                    DType::Bf16,
                    &case.out_shape(),
                    &strides,
                ))
            };
            let kv_strides = [kv_token as isize, kv_layer as isize, 1];
            let kv_view = view(&kv, 0, DType::Bf16, &case.kv.shape, &kv_strides);
            let mut plan = Plan::new(
                case.config,
                small.inputs(&case, kv_view),
                Outputs {
                    k: out(&k),
                    v: out(&v),
                },
            )
            .expect("a valid job");
            let dispatch = Dispatch {
                path: Some(path),
                ..Dispatch::default()
            };
            plan.dispatch(dispatch).expect("every path serves");
            plan.run().expect("a launch");
            plan.check().expect("positions of the table");
            for (memory, expected) in [(&k, expected.k.gather()), (&v, expected.v.gather())] {
                // The memory around each row, in which only rows are not zero.
                for layer in 0..layers {
                    for token in 0..tokens {
                        let at = 2 * (layer * out_layer + token * out_token);
                        let from = (layer * tokens + token) * row;
                        let found = read(memory, at, row);
                        assert!(
                            found == expected[from..from + row],
                            "{path:?}, stride {stride}"
                        );
                    }
                }
                let rows_end = 3 * row;
                assert!(read(memory, rows_end, 4096).iter().all(|&byte| byte == 0));
            }
        }
        true
    }

    /// The inputs of a case besides kv, in device memory.
    struct Small {
        placed: Vec<DeviceMemory>,
    }

    impl Small {
        fn new(gpu: &Gpu, case: &Case) -> Self {
            let place = |tensor: &Tensor| {
                DeviceMemory::from_bytes(&gpu.context, &tensor.memory).expect("device memory")
            };
            Self {
                placed: [
                    &case.k_norm_weight,
                    &case.eps,
                    &case.cos_sin_cache,
                    &case.positions,
                ]
                .map(place)
                .into(),
            }
        }

        fn inputs<'a>(&'a self, case: &Case, kv: TensorView<'a>) -> Inputs<'a> {
            let of = |index: usize, tensor: &Tensor| {
                let memory: &'a DeviceMemory = &self.placed[index];
                view(
                    memory,
                    tensor.first,
                    tensor.dtype,
                    &tensor.shape,
                    &tensor.strides,
                )
            };
            Inputs {
                kv,
                k_norm_weight: of(0, &case.k_norm_weight),
                eps: of(1, &case.eps),
                cos_sin_cache: of(2, &case.cos_sin_cache),
                positions: of(3, &case.positions),
                value_scale: None,
            }
        }
    }

    fn view<'a>(
        memory: &'a DeviceMemory,
        first: usize,
        dtype: DType,
        shape: &[usize],
        strides: &[isize],
    ) -> TensorView<'a> {
        // SAFETY: the callers' layouts lie within the memory, which outlives the view; work that
        // reads it is waited for before it is dropped or written.
        unsafe {
            TensorView::from_raw_parts(
                memory.address() + first as u64,
                Device::Cuda(0),
                dtype,
                shape,
                strides,
            )
        }
        .expect("a view")
    }

    /// The lifetime is free, for plans that are made again on the same memory.
    fn view_mut<'a>(
        memory: &DeviceMemory,
        first: usize,
        dtype: DType,
        shape: &[usize],
        strides: &[isize],
    ) -> TensorViewMut<'a> {
        // SAFETY: as in `view`; the callers make one mutable view of a memory at a time.
        unsafe {
            TensorViewMut::from_raw_parts(
                memory.address() + first as u64,
                Device::Cuda(0),
                dtype,
                shape,
                strides,
            )
        }
        .expect("a view")
    }

    /// 300,000 tokens of 8 layers: source offsets up to 4.9 * 10^9 elements. The rows repeat every
    /// 1000 tokens, so that the CPU needs to compute them once only.
    #[test]
    fn three_hundred_thousand_tokens() {
        let Some(gpu) = Gpu::get() else { return };
        let (tokens, period, layers, heads, dim) = (300_000, 1000, 8, 8, 128);
        let case = Spec {
            tokens: period,
            layers,
            heads,
            ..Spec::default()
        }
        .build();
        let expected = Runner::Cpu.run(&case).expect("a valid case");
        let out_row = heads * dim * 2;
        let kv_token = layers * 2 * out_row;
        let out_len = layers * tokens * out_row;
        let (Some(mut kv), Some(mut positions)) =
            (gpu.large(tokens * kv_token), gpu.large(tokens * 8))
        else {
            return;
        };
        let (Some(k), Some(v)) = (gpu.large(out_len), gpu.large(out_len)) else {
            return;
        };
        write(&mut kv, 0, &case.kv.gather());
        repeat(&mut kv, period * kv_token);
        write(&mut positions, 0, &case.positions.gather());
        repeat(&mut positions, period * 8);
        // One bad position, at the very end.
        write(&mut positions, (tokens - 1) * 8, &(-5i64).to_le_bytes());

        let small = Small::new(&gpu, &case);
        let kv_shape = [tokens, layers, 2 * heads * dim];
        let kv_strides = [
            (layers * 2 * heads * dim) as isize,
            (2 * heads * dim) as isize,
            1,
        ];
        let mut inputs = small.inputs(&case, view(&kv, 0, DType::Bf16, &kv_shape, &kv_strides));
        inputs.positions = view(&positions, 0, DType::I64, &[tokens], &[1]);
        let shape = [layers, tokens, heads, dim];
        let strides = [
            (tokens * heads * dim) as isize,
            (heads * dim) as isize,
            dim as isize,
            1,
        ];
        let out = |memory| Output::Into(view_mut(memory, 0, DType::Bf16, &shape, &strides));
        let outputs = Outputs {
            k: out(&k),
            v: out(&v),
        };
        let mut plan = Plan::new(case.config, inputs, outputs).expect("a valid job");
        plan.run().expect("a launch");
        assert_eq!(
            plan.check(),
            Err(Error::PositionOutOfRange {
                token: tokens as u64 - 1,
                position: -5,
                table_rows: 64,
                count: 1
            })
        );
        for (memory, expected) in [(&k, expected.k.gather()), (&v, expected.v.gather())] {
            for layer in 0..layers {
                let expected = &expected[layer * period * out_row..][..period * out_row];
                // Every seventh repetition, and the last.
                for repetition in (0..tokens / period).filter(|i| i % 7 == 0 || *i == 299) {
                    let at = (layer * tokens + repetition * period) * out_row;
                    let mut expected = expected.to_vec();
                    if repetition == tokens / period - 1 {
                        let last = expected.len() - out_row;
                        expected[last..].fill(0);
                    }
                    assert!(
                        read(memory, at, period * out_row) == expected,
                        "layer {layer}, tokens from {}",
                        repetition * period
                    );
                }
            }
        }
    }

    /// A dense case with everything in device memory, for tests of streams and graphs.
    struct Resident {
        case: Case,
        expected: Outcome,
        kv: DeviceMemory,
        k: DeviceMemory,
        v: DeviceMemory,
        small: Small,
    }

    impl Resident {
        fn new(gpu: &Gpu, seed: u64) -> Self {
            let case = Spec {
                tokens: 33,
                layers: 3,
                heads: 4,
                seed,
                ..Spec::default()
            }
            .build();
            let place = |tensor: &Tensor| {
                DeviceMemory::from_bytes(&gpu.context, &tensor.memory).expect("device memory")
            };
            let out = |tensor: &Option<Tensor>| place(tensor.as_ref().expect("supplied"));
            Self {
                expected: Runner::Cpu.run(&case).expect("a valid case"),
                kv: place(&case.kv),
                k: out(&case.k_out),
                v: out(&case.v_out),
                small: Small::new(gpu, &case),
                case,
            }
        }

        fn plan(&self) -> Plan<'_> {
            let of = |tensor: &Tensor| {
                (
                    tensor.first,
                    tensor.dtype,
                    tensor.shape.clone(),
                    tensor.strides.clone(),
                )
            };
            let (first, dtype, shape, strides) = of(&self.case.kv);
            let kv = view(&self.kv, first, dtype, &shape, &strides);
            let out = |tensor: &Option<Tensor>, memory: &DeviceMemory| {
                let (first, dtype, shape, strides) = of(tensor.as_ref().expect("supplied"));
                Output::Into(view_mut(memory, first, dtype, &shape, &strides))
            };
            let outputs = Outputs {
                k: out(&self.case.k_out, &self.k),
                v: out(&self.case.v_out, &self.v),
            };
            Plan::new(self.case.config, self.small.inputs(&self.case, kv), outputs)
                .expect("a valid job")
        }

        /// Outputs as before any run.
        fn reset(&mut self) {
            let canaries = self.case.k_out.as_ref().expect("supplied").memory.clone();
            write(&mut self.k, 0, &canaries);
            write(&mut self.v, 0, &canaries);
        }

        fn assert_done(&self, what: &str) {
            assert!(
                read(&self.k, 0, self.k.len()) == self.expected.k.memory,
                "K, {what}"
            );
            assert!(
                read(&self.v, 0, self.v.len()) == self.expected.v.memory,
                "V, {what}"
            );
        }
    }

    /// On each kind of stream, behind a slow producer of kv: the result is that of the produced
    /// kv, so the call waited for its stream.
    #[test]
    fn streams_of_every_kind() {
        let Some(gpu) = Gpu::get() else { return };
        let mut resident = Resident::new(&gpu, 1);
        let produced = DeviceMemory::from_bytes(&gpu.context, &resident.case.kv.memory)
            .expect("device memory");
        let zeros = vec![0; resident.kv.len()];
        let slow = [
            DeviceMemory::zeroed(&gpu.context, 1 << 28).expect("device memory"),
            DeviceMemory::zeroed(&gpu.context, 1 << 28).expect("device memory"),
        ];
        for (name, stream) in [
            ("null", TestStream::null()),
            ("per thread", TestStream::per_thread()),
            ("blocking", TestStream::blocking()),
            ("non-blocking", TestStream::non_blocking()),
        ] {
            write(&mut resident.kv, 0, &zeros);
            resident.reset();
            gpu.context.synchronize().expect("nothing failed");
            let mut plan = resident.plan();
            for _ in 0..100 {
                stream.copy(&slow[0], &slow[1]);
            }
            stream.copy(&resident.kv, &produced);
            plan.run_on(stream.stream()).expect("a launch");
            stream.wait();
            drop(plan);
            resident.assert_done(name);
        }
    }

    /// A stream of `cust`.
    #[test]
    fn a_stream_of_cust() {
        let Some(gpu) = Gpu::get() else { return };
        let resident = Resident::new(&gpu, 2);
        let stream = cust::stream::Stream::new(cust::stream::StreamFlags::NON_BLOCKING, None)
            .expect("a stream");
        resident.plan().run_on((&stream).into()).expect("a launch");
        stream.synchronize().expect("nothing failed");
        resident.assert_done("cust");
    }

    /// Device buffers of `cust`, as views.
    #[test]
    fn buffers_of_cust() {
        let Some(_gpu) = Gpu::get() else { return };
        run_on_buffers_of_cust();
    }

    /// Contexts of the caller's own, one after the other. The driver may give a second one the
    /// address of the first, whose kernels are gone.
    #[test]
    fn contexts_that_come_and_go() {
        use cust::sys;
        let Some(_gpu) = Gpu::get() else { return };
        let done = sys::cudaError_enum::CUDA_SUCCESS;
        for _ in 0..3 {
            let mut own = std::ptr::null_mut();
            // SAFETY: creates a context, current on this thread until it is destroyed below.
            assert_eq!(unsafe { sys::cuCtxCreate_v2(&mut own, 0, 0) }, done);
            run_on_buffers_of_cust();
            // SAFETY: nothing of this context is used any more.
            assert_eq!(unsafe { sys::cuCtxDestroy_v2(own) }, done);
        }
    }

    fn run_on_buffers_of_cust() {
        use cust::memory::{CopyDestination, DeviceBuffer, UnifiedBuffer};
        let golden = golden::load("square");
        let case = &golden.case;
        let words = |tensor: &Tensor| -> DeviceBuffer<u16> {
            let bits: Vec<u16> = tensor.bits().into_iter().map(|bits| bits as u16).collect();
            DeviceBuffer::from_slice(&bits).expect("device memory")
        };
        let (kv, weight, table) = (
            words(&case.kv),
            words(&case.k_norm_weight),
            words(&case.cos_sin_cache),
        );
        let eps = DeviceBuffer::from_slice(&case.eps.values()).expect("device memory");
        let positions = DeviceBuffer::from_slice(&case.positions.indices()).expect("device memory");
        let shape = case.out_shape();
        let count = shape.iter().product();
        let mut k = DeviceBuffer::from_slice(&vec![0u16; count]).expect("device memory");
        let view = |slice, tensor: &Tensor| {
            TensorView::from_device_slice::<u16>(slice, tensor.dtype, &tensor.shape)
                .expect("a view")
        };
        let inputs = Inputs {
            kv: view(&kv, &case.kv),
            k_norm_weight: view(&weight, &case.k_norm_weight),
            eps: TensorView::from_device_slice(&eps, DType::F32, &case.eps.shape).expect("a view"),
            cos_sin_cache: view(&table, &case.cos_sin_cache),
            positions: TensorView::from_device_slice(&positions, DType::I64, &case.positions.shape)
                .expect("a view"),
            value_scale: None,
        };
        let outputs = Outputs {
            k: Output::Into(
                TensorViewMut::from_device_slice(&mut k, DType::Bf16, &shape).expect("a view"),
            ),
            v: Output::Allocate,
        };
        let mut plan = Plan::new(case.config, inputs, outputs).expect("a valid job");
        plan.run().expect("a launch");
        plan.check().expect("positions of the table");
        let (none, v) = plan.into_outputs();
        assert!(none.is_none());
        let v = v.expect("allocated");
        assert_eq!(v.device(), Device::Cuda(0));
        let memory = v.device_memory().expect("device memory");
        let mut bytes = vec![0; memory.len()];
        memory.copy_to(&mut bytes).expect("a copy");
        assert!(bytes == golden.v.gather());
        let mut found = vec![0u16; count];
        k.copy_to(&mut found).expect("a copy");
        let expected = Runner::Cpu.run(case).expect("a valid case").k.bits();
        assert!(found.iter().map(|&bits| u32::from(bits)).eq(expected));

        // No tokens: the buffers have no address.
        let (no_kv, no_positions) = (
            DeviceBuffer::<u16>::from_slice(&[]).expect("no memory"),
            DeviceBuffer::<i64>::from_slice(&[]).expect("no memory"),
        );
        let kv_shape = [0, case.kv.shape[1], case.kv.shape[2]];
        let empty = Inputs {
            kv: TensorView::from_device_slice(&no_kv, DType::Bf16, &kv_shape).expect("a view"),
            positions: TensorView::from_device_slice(&no_positions, DType::I64, &[0])
                .expect("a view"),
            ..inputs
        };
        let mut plan = Plan::new(case.config, empty, Outputs::default()).expect("a valid job");
        plan.run().expect("nothing to launch");
        plan.check().expect("no positions");
        let (k, _) = plan.into_outputs();
        assert_eq!(k.expect("allocated").shape()[1], 0);

        // Managed memory that is borrowed as the host's: a launch would write it after the borrow.
        let mut managed = UnifiedBuffer::new(&0u8, 2 * count).expect("managed memory");
        let k = TensorViewMut::from_bytes(&mut managed, DType::Bf16, &shape).expect("a view");
        let outputs = Outputs {
            k: Output::Into(k),
            v: Output::Allocate,
        };
        let refused = Plan::new(case.config, inputs, outputs).map(drop);
        let expected = Error::DeviceDtype {
            argument: Argument::KOut,
            device: Device::Cpu,
            dtype: DType::Bf16,
            expected_device: Device::Cuda(0),
            expected_dtype: DType::Bf16,
        };
        assert_eq!(refused.expect_err("memory of the host"), expected);
    }

    /// CASES 35 and 40: one call captured, every temporary dropped, replayed over new contents,
    /// the buffers dropped, another call made.
    #[test]
    fn capture_and_replay() {
        let Some(gpu) = Gpu::get() else { return };
        let mut resident = Resident::new(&gpu, 3);
        let stream = TestStream::non_blocking();
        let graph = {
            let mut plan = resident.plan();
            stream.capture(|| plan.run_on(stream.stream()).expect("a captured launch"))
        };
        assert_eq!(graph.nodes, 1, "one launch for all layers");
        // Capturing runs nothing.
        let canaries = resident
            .case
            .k_out
            .as_ref()
            .expect("supplied")
            .memory
            .clone();
        assert!(read(&resident.k, 0, resident.k.len()) == canaries);
        stream.replay(&graph);
        stream.wait();
        resident.assert_done("the first replay");
        // Another kv in the same memory.
        let other = Resident::new(&gpu, 4);
        resident.reset();
        write(&mut resident.kv, 0, &other.case.kv.memory);
        write(
            &mut resident.small.placed[0],
            0,
            &other.case.k_norm_weight.memory,
        );
        write(
            &mut resident.small.placed[3],
            0,
            &other.case.positions.memory,
        );
        stream.replay(&graph);
        stream.wait();
        resident.expected = other.expected.clone();
        resident.assert_done("the second replay");
        drop(graph);
        drop(resident);
        other.plan().run_on(stream.stream()).expect("a launch");
        stream.wait();
        other.assert_done("a call after all was dropped");
    }

    /// Calls in a row on one stream, of which each reads what the one before wrote and writes over
    /// what the one before read: launched one by one, and replayed from a graph.
    #[test]
    fn calls_that_depend_on_each_other() {
        let Some(gpu) = Gpu::get() else { return };
        // The first call's K of 16 heads is the second call's kv of 8.
        let spec = |heads, seed| Spec {
            tokens: 1024,
            layers: 1,
            heads,
            seed,
            ..Spec::default()
        };
        let first = [1, 2].map(|seed| spec(16, seed).build());
        let expected = first.clone().map(|case| {
            let between = Runner::Cpu.run(&case).expect("a valid case").k;
            let mut second = spec(8, 3).build();
            second.kv.scatter(&between.gather());
            let outcome = Runner::Cpu.run(&second).expect("a valid case");
            (second, outcome.k.gather())
        });
        let second = &expected[0].0;
        let place = |bytes: &[u8]| DeviceMemory::from_bytes(&gpu.context, bytes).expect("memory");
        let sources = first.clone().map(|case| place(&case.kv.gather()));
        let row = 16 * 128isize;
        let between = place(&vec![0; 1024 * 16 * 128 * 2]);
        let unused = [
            place(&vec![0; between.len()]),
            place(&vec![0; between.len() / 2]),
        ];
        let mut results = [(); 2].map(|()| place(&vec![0; between.len() / 2]));
        let (small, others) = (
            first.clone().map(|case| Small::new(&gpu, &case)),
            Small::new(&gpu, second),
        );
        let into = |memory: &DeviceMemory, heads: isize| {
            let shape = [1, 1024, heads as usize, 128];
            let strides = [1024 * heads * 128, heads * 128, 128, 1];
            Output::Into(view_mut(memory, 0, DType::Bf16, &shape, &strides))
        };
        let mut plans = Vec::new();
        for side in 0..2 {
            let kv = view(
                &sources[side],
                0,
                DType::Bf16,
                &first[side].kv.shape,
                &[2 * row, 2 * row, 1],
            );
            let outputs = Outputs {
                k: into(&between, 16),
                v: into(&unused[0], 16),
            };
            let inputs = small[side].inputs(&first[side], kv);
            plans.push(Plan::new(first[side].config, inputs, outputs).expect("a valid job"));
            let kv = view(&between, 0, DType::Bf16, &second.kv.shape, &[row, row, 1]);
            let outputs = Outputs {
                k: into(&results[side], 8),
                v: into(&unused[1], 8),
            };
            let inputs = others.inputs(second, kv);
            plans.push(Plan::new(second.config, inputs, outputs).expect("a valid job"));
        }
        let stream = TestStream::non_blocking();
        let graph = stream.capture(|| {
            for plan in &mut plans {
                plan.run_on(stream.stream()).expect("a captured launch");
            }
        });
        for round in 0..40 {
            for result in &mut results {
                write(result, 0, &vec![0; 1024 * 8 * 128 * 2]);
            }
            gpu.context.synchronize().expect("nothing failed");
            if round % 2 == 0 {
                for plan in &mut plans {
                    plan.run_on(stream.stream()).expect("a launch");
                }
            } else {
                stream.replay(&graph);
            }
            stream.wait();
            for side in 0..2 {
                assert!(
                    read(&results[side], 0, results[side].len()) == expected[side].1,
                    "round {round}, side {side}"
                );
            }
        }
    }

    /// What a replay finds out is reported by the plan that was captured.
    #[test]
    fn a_bad_position_in_a_replay() {
        let Some(gpu) = Gpu::get() else { return };
        let mut resident = Resident::new(&gpu, 5);
        let stream = TestStream::non_blocking();
        let first = resident.case.positions.first;
        let address = resident.small.placed[3].address();
        let mut plan = resident.plan();
        let graph = stream.capture(|| plan.run_on(stream.stream()).expect("a captured launch"));
        assert_eq!(plan.check(), Ok(()));
        let bad = DeviceMemory::from_bytes(&gpu.context, &64i64.to_le_bytes()).expect("memory");
        // SAFETY: 8 bytes within the memory of the positions; the copy waits.
        unsafe {
            cust::sys::cuMemcpyDtoD_v2(address + first as u64 + 7 * 8, bad.address(), 8);
        }
        gpu.context.synchronize().expect("nothing failed");
        stream.replay(&graph);
        stream.wait();
        assert_eq!(
            plan.check(),
            Err(Error::PositionOutOfRange {
                token: 7,
                position: 64,
                table_rows: 64,
                count: 1
            })
        );
        assert_eq!(plan.check(), Ok(()));
        drop(plan);
        resident.reset();
    }

    /// Plans on several threads, each with a stream of its own.
    #[test]
    fn many_threads() {
        let Some(gpu) = Gpu::get() else { return };
        std::thread::scope(|scope| {
            for seed in 0..8 {
                let gpu = &gpu;
                scope.spawn(move || {
                    // Makes the context current on this thread.
                    let _context = fused_kv::cuda::Context::new(0).expect("the device");
                    let mut resident = Resident::new(gpu, seed);
                    let stream = TestStream::non_blocking();
                    for _ in 0..50 {
                        resident.reset();
                        gpu.context.synchronize().expect("nothing failed");
                        let mut plan = resident.plan();
                        plan.run_on(stream.stream()).expect("a launch");
                        stream.wait();
                        plan.check().expect("positions of the table");
                        drop(plan);
                        resident.assert_done("a thread");
                    }
                });
            }
        });
    }

    /// A job in device memory whose arguments can be moved.
    struct Job {
        config: Config,
        memory: Vec<DeviceMemory>,
        addresses: [u64; 8],
        dtypes: [DType; 8],
        claimed: [Device; 8],
    }

    /// Arguments in the order of [`Job::addresses`].
    const ARGUMENTS: [Argument; 8] = [
        Argument::Kv,
        Argument::KNormWeight,
        Argument::Eps,
        Argument::CosSinCache,
        Argument::Positions,
        Argument::ValueScale,
        Argument::KOut,
        Argument::VOut,
    ];
    const JOB_SHAPES: [&[usize]; 8] = [
        &[3, 2, 64],
        &[2, 16],
        &[2],
        &[4, 16],
        &[3],
        &[2],
        &[2, 3, 2, 16],
        &[2, 3, 2, 16],
    ];

    impl Job {
        fn new(gpu: &Gpu) -> Self {
            let memory: Vec<DeviceMemory> = JOB_SHAPES
                .iter()
                .map(|shape| {
                    let bytes = shape.iter().product::<usize>() * 8;
                    DeviceMemory::zeroed(&gpu.context, bytes + 16).expect("device memory")
                })
                .collect();
            let addresses: Vec<u64> = memory.iter().map(DeviceMemory::address).collect();
            Self {
                config: Config {
                    num_kv_heads: 2,
                    head_dim: 16,
                    rotary_dim: 16,
                    rope_style: RopeStyle::Neox,
                    norm_weight: NormWeight::Plain,
                },
                addresses: addresses.try_into().expect("eight"),
                memory,
                dtypes: [
                    DType::Bf16,
                    DType::Bf16,
                    DType::F32,
                    DType::F32,
                    DType::I64,
                    DType::F32,
                    DType::Bf16,
                    DType::Bf16,
                ],
                claimed: [Device::Cuda(0); 8],
            }
        }

        fn run(&self) -> Result<(), Error> {
            let strides = |shape: &[usize]| {
                let mut strides = vec![1isize; shape.len()];
                for axis in (1..shape.len()).rev() {
                    strides[axis - 1] = strides[axis] * shape[axis] as isize;
                }
                strides
            };
            let read = |index: usize| {
                let shape = JOB_SHAPES[index];
                // SAFETY: live memory of that size: of the job, or of the test that put it there.
                unsafe {
                    TensorView::from_raw_parts(
                        self.addresses[index],
                        self.claimed[index],
                        self.dtypes[index],
                        shape,
                        &strides(shape),
                    )
                }
                .expect("a view")
            };
            let written = |index: usize| {
                let shape = JOB_SHAPES[index];
                // SAFETY: as above, and the only view of that memory.
                let view = unsafe {
                    TensorViewMut::from_raw_parts(
                        self.addresses[index],
                        self.claimed[index],
                        self.dtypes[index],
                        shape,
                        &strides(shape),
                    )
                };
                Output::Into(view.expect("a view"))
            };
            let inputs = Inputs {
                kv: read(0),
                k_norm_weight: read(1),
                eps: read(2),
                cos_sin_cache: read(3),
                positions: read(4),
                value_scale: Some(read(5)),
            };
            let outputs = Outputs {
                k: written(6),
                v: written(7),
            };
            let mut plan = Plan::new(self.config, inputs, outputs)?;
            plan.run()?;
            plan.check()
        }
    }

    /// The error that started this project: the wording that people search their logs for, with
    /// the device that the memory is really on.
    #[test]
    fn v_out_on_the_host_as_float32() {
        let Some(gpu) = Gpu::get() else { return };
        let mut host = HostMemory::from_bytes(&[7; 4096]);
        for claimed in [Device::Cpu, Device::Cuda(0)] {
            let mut job = Job::new(&gpu);
            job.run().expect("the job without fault");
            (job.addresses[7], job.claimed[7]) = (host.address(), claimed);
            job.dtypes[7] = DType::F32;
            assert_eq!(
                job.run().expect_err("host memory").to_string(),
                "Invalid v_out device/dtype for fused KV materialization: got device=cpu, \
                 dtype=float32, expected device=cuda:0, dtype=bfloat16."
            );
        }
        assert!(host.to_bytes() == [7; 4096]);
    }

    /// CASES 41: a host pointer passed as a device pointer is an error, not a fault in the kernel,
    /// whatever it is claimed to be; pinned memory too.
    #[test]
    fn host_pointers() {
        let Some(gpu) = Gpu::get() else { return };
        let mut host = HostMemory::from_bytes(&[0; 4096]);
        let pinned = Pinned::new(4096);
        for (index, argument) in ARGUMENTS.into_iter().enumerate().skip(1) {
            for address in [host.address(), pinned.address()] {
                for claimed in [Device::Cpu, Device::Cuda(0)] {
                    let mut job = Job::new(&gpu);
                    (job.addresses[index], job.claimed[index]) = (address, claimed);
                    let expected = match argument {
                        Argument::KOut | Argument::VOut => Error::DeviceDtype {
                            argument,
                            device: Device::Cpu,
                            dtype: DType::Bf16,
                            expected_device: Device::Cuda(0),
                            expected_dtype: DType::Bf16,
                        },
                        _ => Error::InputDevice {
                            argument,
                            found: Device::Cpu,
                            expected: Device::Cuda(0),
                        },
                    };
                    assert_eq!(job.run(), Err(expected));
                }
            }
        }
        // kv on the host, the rest on the device: the outputs are the first to differ from it.
        let mut job = Job::new(&gpu);
        job.addresses[0] = host.address();
        assert_eq!(
            job.run(),
            Err(Error::DeviceDtype {
                argument: Argument::KOut,
                device: Device::Cuda(0),
                dtype: DType::Bf16,
                expected_device: Device::Cpu,
                expected_dtype: DType::Bf16,
            })
        );
    }

    /// Device memory that a view claims to be on the host is where the driver says.
    #[test]
    fn the_driver_knows_better() {
        let Some(gpu) = Gpu::get() else { return };
        let mut job = Job::new(&gpu);
        job.claimed = [Device::Cpu; 8];
        job.run().expect("a job on the device");
    }

    /// Freed and never allocated addresses.
    #[test]
    fn addresses_of_nothing() {
        let Some(gpu) = Gpu::get() else { return };
        for address in [256, 1 << 40, 0xdead_0000_0000] {
            let mut job = Job::new(&gpu);
            job.addresses[7] = address;
            let error = job.run().expect_err("no memory");
            assert!(
                matches!(
                    error,
                    Error::DeviceDtype {
                        argument: Argument::VOut,
                        device: Device::Cpu,
                        ..
                    }
                ),
                "{error}"
            );
        }
    }

    #[test]
    fn addresses_between_elements() {
        let Some(gpu) = Gpu::get() else { return };
        for (index, argument) in ARGUMENTS.into_iter().enumerate() {
            let mut job = Job::new(&gpu);
            job.addresses[index] += 1;
            let expected = Error::Alignment {
                argument,
                address: job.memory[index].address() + 1,
                expected: job.dtypes[index].size(),
            };
            assert_eq!(job.run(), Err(expected));
        }
    }

    #[test]
    fn a_second_device() {
        let Some(gpu) = Gpu::get() else { return };
        if devices() < 2 {
            say("skipped: needs two CUDA devices");
            return;
        }
        let other = fused_kv::cuda::Context::new(1).expect("the second device");
        let memory = DeviceMemory::zeroed(&other, 4096).expect("device memory");
        let mut job = Job::new(&gpu);
        job.addresses[3] = memory.address();
        assert_eq!(
            job.run(),
            Err(Error::InputDevice {
                argument: Argument::CosSinCache,
                found: Device::Cuda(1),
                expected: Device::Cuda(0)
            })
        );
        // A whole job there runs there, whatever context is current.
        let other = Runner::Cuda(other, Dispatch::default());
        let case = Spec::default().build();
        let outcome = other.run(&case).expect("a valid case");
        let expected = Runner::Cpu.run(&case).expect("a valid case");
        assert!(same(&outcome, &expected));
        drop(gpu.context.synchronize());
    }

    /// A context that does not exist.
    #[test]
    fn a_device_that_is_not_there() {
        let Some(_gpu) = Gpu::get() else { return };
        let error = fused_kv::cuda::Context::new(4096).expect_err("no such device");
        assert!(error.to_string().contains("4096"), "{error}");
    }

    /// A job on the host, in a build with CUDA, on a machine with a GPU.
    #[test]
    fn host_memory_stays_on_the_cpu() {
        let case = Spec::default().build();
        let outcome = Runner::Cpu.run(&case).expect("a valid case");
        fused_kv_tests::compare::assert_bits(
            &case,
            &outcome,
            &fused_kv_tests::reference::compute(&case),
        );
    }
}
