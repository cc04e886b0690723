use super::*;
use crate::plan::{NormWeight, Output, Outputs, Plan, RopeStyle};
use crate::tensor::{TensorView, TensorViewMut};
use half::bf16;

const T: usize = 3;
const L: usize = 2;
const H: usize = 2;
const D: usize = 8;
const R: usize = 4;
const P: usize = 10;

const CONFIG: Config = Config {
    num_kv_heads: H,
    head_dim: D,
    rotary_dim: R,
    rope_style: RopeStyle::Neox,
    norm_weight: NormWeight::Plain,
};

fn leak<E: Copy>(value: E, len: usize) -> &'static [E] {
    vec![value; len].leak()
}

fn view<E: crate::Element>(value: E, shape: &[usize]) -> TensorView<'static> {
    TensorView::from_slice(leak(value, shape.iter().product()), shape).unwrap()
}

fn zeros(shape: &[usize]) -> TensorView<'static> {
    view(bf16::ZERO, shape)
}

/// A view of memory that is never touched, in an address space of its own per `address`.
fn fake(
    address: u64,
    device: Device,
    dtype: DType,
    shape: &[usize],
    strides: &[isize],
) -> TensorView<'static> {
    // SAFETY: these tests only validate, and validation touches no memory.
    unsafe { TensorView::from_raw_parts(address, device, dtype, shape, strides) }.unwrap()
}

fn inputs() -> Inputs<'static> {
    Inputs {
        kv: zeros(&[T, L, 2 * H * D]),
        k_norm_weight: view(1f32, &[L, D]),
        eps: view(1e-6f32, &[L]),
        cos_sin_cache: view(1f32, &[P, R]),
        positions: view(0i64, &[T]),
        value_scale: None,
    }
}

fn check(config: &Config, inputs: &Inputs<'_>, outputs: [Option<&TensorView<'_>>; 2]) -> Error {
    let outputs = outputs.map(|view| view.map(|view| &view.raw));
    dense(config, inputs, outputs, &believe).expect_err("must be refused")
}

fn accept(config: &Config, inputs: &Inputs<'_>, outputs: [Option<&TensorView<'_>>; 2]) {
    let outputs = outputs.map(|view| view.map(|view| &view.raw));
    dense(config, inputs, outputs, &believe).expect("must be accepted");
}

/// Inputs and outputs in which every check fails; each step mends the first fault and meets the
/// next one, which shows the order and that each check can fail.
#[test]
fn one_fault_after_the_other_in_the_order_of_the_contract() {
    let gpu = Device::Cuda(0);
    let mut config = Config {
        rotary_dim: 12,
        ..CONFIG
    };
    let bytes: &'static mut [i32] = vec![0i32; 4096].leak();
    let address = bytes.as_ptr() as u64;
    let i32_view =
        |shape: &[usize], strides: &[isize]| fake(address, Device::Cpu, DType::I32, shape, strides);
    // Wrong in dtype (int32 everywhere), device, strides and overlap as well as in shape.
    let odd = [2isize, 2, 2, 2];
    let mut x = Inputs {
        kv: i32_view(&[T, 8], &[8, 2]),
        k_norm_weight: fake(address, gpu, DType::I32, &[D], &odd[..1]),
        eps: fake(address, gpu, DType::I32, &[], &[]),
        cos_sin_cache: fake(address, gpu, DType::I32, &[P, R + 2], &odd[..2]),
        positions: fake(address, gpu, DType::F32, &[3, T], &odd[..2]),
        value_scale: Some(fake(address, gpu, DType::I32, &[L + 1], &odd[..1])),
    };
    let mut k = fake(address, gpu, DType::F16, &[T, L, H, D], &odd);
    let mut v = fake(address, gpu, DType::F16, &[L, T, H, D, 1], &[2, 2, 2, 2, 1]);
    macro_rules! expect {
        ($expected:expr) => {
            assert_eq!(check(&config, &x, [Some(&k), Some(&v)]), $expected)
        };
    }
    let shape = |argument, found: &[usize], expected: &[usize]| Error::Shape {
        argument,
        found: found.into(),
        expected: expected.into(),
    };
    let device_dtype = |argument| Error::DeviceDtype {
        argument,
        device: gpu,
        dtype: DType::F16,
        expected_device: Device::Cpu,
        expected_dtype: DType::I32,
    };

    expect!(Error::KvRank {
        found: [T, 8].into()
    });
    x.kv = i32_view(&[T, L, 30], &[60 * L as isize, 60, 2]);
    expect!(Error::KvLastDim {
        found: 30,
        expected: 2 * H * D,
        num_kv_heads: H,
        head_dim: D,
    });
    x.kv = i32_view(&[T, L, 32], &[64 * L as isize, 64, 2]);
    expect!(Error::Geometry {
        head_dim: D,
        rotary_dim: 12,
        num_kv_heads: H,
    });
    config.rotary_dim = R;
    expect!(shape(Argument::KNormWeight, &[D], &[L, D]));
    x.k_norm_weight = fake(address, gpu, DType::I32, &[L, D], &odd[..2]);
    expect!(shape(Argument::Eps, &[], &[L]));
    x.eps = fake(address, gpu, DType::I32, &[L], &odd[..1]);
    expect!(shape(Argument::ValueScale, &[L + 1], &[L]));
    x.value_scale = Some(fake(address, gpu, DType::I32, &[L], &odd[..1]));
    expect!(Error::TableShape {
        found: [P, R + 2].into(),
        rotary_dim: R,
    });
    x.cos_sin_cache = fake(address, gpu, DType::I32, &[P, R], &odd[..2]);
    expect!(Error::PositionsRank {
        found: [3, T].into(),
        tokens: T,
    });
    x.positions = fake(address, gpu, DType::F32, &[T + 1], &odd[..1]);
    expect!(shape(Argument::Positions, &[T + 1], &[T]));
    x.positions = fake(address, gpu, DType::F32, &[T], &odd[..1]);
    expect!(shape(Argument::KOut, &[T, L, H, D], &[L, T, H, D]));
    k = fake(address, gpu, DType::F16, &[L, T, H, D], &odd);
    expect!(device_dtype(Argument::KOut));
    k = i32_view(&[L, T, H, D], &odd);
    expect!(shape(Argument::VOut, &[L, T, H, D, 1], &[L, T, H, D]));
    v = fake(address, gpu, DType::F16, &[L, T, H, D], &odd);
    expect!(device_dtype(Argument::VOut));
    v = i32_view(&[L, T, H, D], &odd);

    let innermost = |argument| Error::InnermostStride { argument, found: 2 };
    expect!(innermost(Argument::Kv));
    x.kv = i32_view(&[T, L, 32], &[32 * L as isize, 32, 1]);
    expect!(innermost(Argument::KNormWeight));
    x.k_norm_weight = fake(address + 1, gpu, DType::I32, &[L, D], &[8, 1]);
    expect!(innermost(Argument::Eps));
    x.eps = fake(address, gpu, DType::I32, &[L], &[1]);
    expect!(innermost(Argument::CosSinCache));
    x.cos_sin_cache = fake(address, gpu, DType::I32, &[P, R], &[4, 1]);
    expect!(innermost(Argument::ValueScale));
    x.value_scale = Some(fake(address, gpu, DType::I32, &[L], &[1]));
    expect!(innermost(Argument::KOut));
    k = i32_view(&[L, T, H, D], &[0, 16, 8, 1]);
    expect!(innermost(Argument::VOut));
    v = i32_view(&[L, T, H, D], &[48, 16, 4, 1]);

    let overlap = |argument, other| Error::Overlap { argument, other };
    expect!(overlap(Argument::KOut, Argument::KOut));
    k = i32_view(&[L, T, H, D], &[48, 16, 8, 1]);
    expect!(overlap(Argument::VOut, Argument::VOut));
    v = i32_view(&[L, T, H, D], &[48, 16, 8, 1]);
    expect!(overlap(Argument::KOut, Argument::VOut));
    v = fake(
        address + 4 * 96,
        Device::Cpu,
        DType::I32,
        &[L, T, H, D],
        &[48, 16, 8, 1],
    );
    expect!(overlap(Argument::KOut, Argument::Kv));
    k = fake(
        address + 8 * 96,
        Device::Cpu,
        DType::I32,
        &[L, T, H, D],
        &[48, 16, 8, 1],
    );
    expect!(overlap(Argument::VOut, Argument::Kv));
    v = fake(
        address + 12 * 96,
        Device::Cpu,
        DType::I32,
        &[L, T, H, D],
        &[48, 16, 8, 1],
    );

    expect!(Error::Alignment {
        argument: Argument::KNormWeight,
        address: address + 1,
        expected: 4,
    });
    x.k_norm_weight = fake(address, gpu, DType::I32, &[L, D], &[8, 1]);

    let dtype = |argument, found, expected| Error::Dtype {
        argument,
        found,
        expected,
    };
    expect!(dtype(Argument::Kv, DType::I32, FLOATS));
    let float = |view: TensorView<'_>| {
        let (shape, strides) = (view.shape().to_vec(), view.strides().to_vec());
        fake(view.address(), view.device(), DType::F32, &shape, &strides)
    };
    (x.kv, k, v) = (float(x.kv), float(k), float(v));
    expect!(dtype(Argument::KNormWeight, DType::I32, FLOATS));
    x.k_norm_weight = float(x.k_norm_weight);
    expect!(dtype(Argument::Eps, DType::I32, FLOAT32));
    x.eps = float(x.eps);
    expect!(dtype(Argument::CosSinCache, DType::I32, FLOATS));
    x.cos_sin_cache = float(x.cos_sin_cache);
    expect!(dtype(Argument::Positions, DType::F32, INDICES));
    x.positions = fake(address, gpu, DType::I64, &[T], &[1]);
    expect!(dtype(Argument::ValueScale, DType::I32, FLOAT32));
    x.value_scale = x.value_scale.map(float);

    let device = |argument| Error::InputDevice {
        argument,
        found: gpu,
        expected: Device::Cpu,
    };
    let good = inputs();
    expect!(device(Argument::KNormWeight));
    x.k_norm_weight = good.k_norm_weight;
    expect!(device(Argument::Eps));
    x.eps = good.eps;
    expect!(device(Argument::CosSinCache));
    x.cos_sin_cache = good.cos_sin_cache;
    expect!(device(Argument::Positions));
    x.positions = good.positions;
    expect!(device(Argument::ValueScale));
    x.value_scale = Some(view(1f32, &[L]));
    accept(&config, &x, [Some(&k), Some(&v)]);
}

#[test]
fn geometry_limits() {
    for (head_dim, rotary_dim, valid) in [
        (2, 2, true),
        (1024, 1024, true),
        (576, 64, true),
        (1026, 2, false),
        (0, 0, false),
        (7, 2, false),
        (8, 0, false),
        (8, 3, false),
        (8, 10, false),
    ] {
        let config = Config {
            head_dim,
            rotary_dim,
            ..CONFIG
        };
        let x = Inputs {
            kv: zeros(&[T, L, 2 * H * head_dim]),
            k_norm_weight: view(1f32, &[L, head_dim]),
            cos_sin_cache: view(1f32, &[P, rotary_dim]),
            ..inputs()
        };
        let result = dense(&config, &x, [None, None], &believe);
        assert_eq!(result.is_ok(), valid, "{head_dim} {rotary_dim}: {result:?}");
        if !valid {
            assert!(matches!(result, Err(Error::Geometry { .. })));
        }
    }
    let config = Config {
        num_kv_heads: 0,
        ..CONFIG
    };
    let x = Inputs {
        kv: zeros(&[T, L, 0]),
        ..inputs()
    };
    assert!(matches!(
        check(&config, &x, [None, None]),
        Error::Geometry { .. }
    ));
}

#[test]
fn numbers_at_the_limits_are_errors_not_overflows() {
    let config = Config {
        num_kv_heads: usize::MAX,
        head_dim: 1024,
        ..CONFIG
    };
    assert!(matches!(
        check(&config, &inputs(), [None, None]),
        Error::KvLastDim {
            expected: usize::MAX,
            ..
        }
    ));

    // 2^32 tokens that all share one row.
    let many = 1usize << 32;
    let strides = [0, 32, 1];
    let one = leak(bf16::ZERO, 64);
    let x = Inputs {
        kv: TensorView::from_strided(one, 0, &[many, L, 32], &strides).unwrap(),
        positions: TensorView::from_strided(leak(0i64, 1), 0, &[many], &[0]).unwrap(),
        ..inputs()
    };
    assert_eq!(
        check(&CONFIG, &x, [None, None]),
        Error::TooLarge {
            what: "the number of tokens",
            found: many as u64,
            limit: u64::from(u32::MAX),
        }
    );

    // Strides of dimensions with one index may be anything.
    let huge = isize::MAX;
    let x = Inputs {
        kv: TensorView::from_strided(one, 0, &[1, 1, 32], &[huge, isize::MIN, 1]).unwrap(),
        k_norm_weight: TensorView::from_strided(leak(1f32, D), 0, &[1, D], &[huge, 1]).unwrap(),
        eps: TensorView::from_strided(leak(1f32, 1), 0, &[1], &[huge]).unwrap(),
        positions: TensorView::from_strided(leak(0i32, 1), 0, &[1], &[huge]).unwrap(),
        ..inputs()
    };
    accept(&CONFIG, &x, [None, None]);

    // Large strides between rows that exist somewhere.
    let kv = fake(
        1 << 20,
        Device::Cuda(1),
        DType::Bf16,
        &[2, 2, 32],
        &[1 << 60, 1 << 58, 1],
    );
    assert!(is_injective(&kv.raw).unwrap());
    let none = zeros(&[0, L, 32]);
    let x = Inputs {
        kv: none,
        positions: view(0i64, &[0]),
        ..inputs()
    };
    accept(&CONFIG, &x, [None, None]);
}

#[test]
fn layouts_that_nest_are_accepted() {
    const N: usize = L * T * H * D;
    let x = inputs();
    let shape = [L, T, H, D];
    // Rows of a larger workspace, [T, L, H, D] memory, heads outermost, reversed layers.
    let buffer = leak(bf16::ZERO, 4 * N);
    let second = leak(bf16::ZERO, 4 * N);
    for (offset, strides) in [
        (0, [(2 * T * H * D) as isize, 16, 8, 1]),
        (0, [16, 32, 8, 1]),
        (0, [16, 32, 96, 1]),
        (N - T * H * D, [-((T * H * D) as isize), 16, 8, 1]),
        (3, [49, 16, 8, 1]),
    ] {
        let k = TensorView::from_strided(buffer, offset, &shape, &strides).unwrap();
        let v = TensorView::from_strided(second, offset, &shape, &strides).unwrap();
        accept(&CONFIG, &x, [Some(&k), Some(&v)]);
        accept(&CONFIG, &x, [None, Some(&v)]);
    }

    // Halves of the last dimension of one [L, T, H, 2 * D] allocation; of [L, 2, T, H, D]; of
    // [2, L, T, H, D]; K heads and V heads of one [L, T, 2 * H, D].
    let layer = (2 * T * H * D) as isize;
    for (v_offset, strides) in [
        (D, [layer, 32, 16, 1]),
        (T * H * D, [layer, 16, 8, 1]),
        (N, [layer / 2, 16, 8, 1]),
        (H * D, [layer, 32, 8, 1]),
    ] {
        let k = TensorView::from_strided(buffer, 0, &shape, &strides).unwrap();
        let v = TensorView::from_strided(buffer, v_offset, &shape, &strides).unwrap();
        accept(&CONFIG, &x, [Some(&k), Some(&v)]);
        accept(&CONFIG, &x, [Some(&v), Some(&k)]);
        // One element closer and they meet.
        let v = TensorView::from_strided(buffer, v_offset - 1, &shape, &strides).unwrap();
        for pair in [[&k, &v], [&v, &k]] {
            assert_eq!(
                check(&CONFIG, &x, pair.map(Some)),
                Error::Overlap {
                    argument: Argument::KOut,
                    other: Argument::VOut,
                }
            );
        }
    }

    // K and V in the padding of kv's own rows.
    let x = Inputs {
        kv: TensorView::from_strided(buffer, 0, &[T, L, 32], &[128, 64, 1]).unwrap(),
        ..inputs()
    };
    let k = TensorView::from_strided(buffer, 32, &shape, &[64, 128, 8, 1]).unwrap();
    let v = TensorView::from_strided(buffer, 48, &shape, &[64, 128, 8, 1]).unwrap();
    accept(&CONFIG, &x, [Some(&k), Some(&v)]);
    let k = TensorView::from_strided(buffer, 31, &shape, &[64, 128, 8, 1]).unwrap();
    assert_eq!(
        check(&CONFIG, &x, [Some(&k), Some(&v)]),
        Error::Overlap {
            argument: Argument::KOut,
            other: Argument::Kv,
        }
    );
}

/// The two tests are right against brute force whenever they let something pass.
#[test]
fn accepted_footprints_share_no_element() {
    let mut seed = 1u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % below
    };
    let touched = |raw: &Raw| {
        let mut all = Vec::new();
        let (shape, strides) = (raw.layout.shape(), raw.layout.strides());
        for a in 0..shape[0] as isize {
            for b in 0..shape[1] as isize {
                for c in 0..shape[2] as isize {
                    let at = a * strides[0] + b * strides[1] + c * strides[2];
                    all.push(raw.address as isize + at * 2);
                }
            }
        }
        all.sort_unstable();
        all
    };
    let (mut separate_and_interleaved, mut injective) = (0, 0);
    for _ in 0..20_000 {
        let mut tensor = || {
            let shape = [(); 3].map(|()| 1 + random(3) as usize);
            let strides = [(); 3].map(|()| random(25) as isize - 8);
            let address = 4096 + 2 * random(24);
            fake(address, Device::Cpu, DType::Bf16, &shape, &strides).raw
        };
        let (a, b) = (tensor(), tensor());
        let (all_a, all_b) = (touched(&a), touched(&b));
        if is_injective(&a).unwrap() {
            assert!(all_a.windows(2).all(|pair| pair[0] != pair[1]), "{a:?}");
            injective += 1;
        }
        if are_separate(&a, &b).unwrap() {
            assert!(
                all_a.iter().all(|at| all_b.binary_search(at).is_err()),
                "{a:?} {b:?}"
            );
            let apart = all_a.last() < all_b.first() || all_b.last() < all_a.first();
            separate_and_interleaved += usize::from(!apart);
        }
    }
    assert!(injective > 1000, "{injective}");
    assert!(separate_and_interleaved > 100, "{separate_and_interleaved}");
}

#[test]
fn overlap_only_counts_on_one_device() {
    let x = inputs();
    let address = x.kv.address();
    let k = fake(address, Device::Cuda(0), DType::Bf16, &[2, 8], &[8, 1]);
    assert!(are_separate(&k.raw, &x.kv.raw).unwrap());
    let k = fake(address, Device::Cpu, DType::Bf16, &[2, 8], &[8, 1]);
    assert!(!are_separate(&k.raw, &x.kv.raw).unwrap());
}

#[test]
fn host_memory_may_have_any_alignment() {
    let bytes = leak(0u8, T * L * 32 * 2 + 1);
    let x = Inputs {
        kv: TensorView::from_bytes(&bytes[1..], DType::Bf16, &[T, L, 32]).unwrap(),
        ..inputs()
    };
    accept(&CONFIG, &x, [None, None]);
}

#[test]
fn the_resolver_overrules_the_view() {
    let x = inputs();
    let k = zeros(&[L, T, H, D]);
    let somewhere = |raw: &Raw| {
        Ok(if raw.address == k.raw.address {
            Device::Cuda(3)
        } else {
            raw.device
        })
    };
    assert_eq!(
        dense(&CONFIG, &x, [Some(&k.raw), None], &somewhere).unwrap_err(),
        Error::DeviceDtype {
            argument: Argument::KOut,
            device: Device::Cuda(3),
            dtype: DType::Bf16,
            expected_device: Device::Cpu,
            expected_dtype: DType::Bf16,
        }
    );
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_valid_cuda_problem_needs_the_backend() {
    let device = Device::Cuda(0);
    let x = Inputs {
        kv: fake(4096, device, DType::Bf16, &[T, L, 32], &[64, 32, 1]),
        k_norm_weight: fake(1 << 20, device, DType::F16, &[L, D], &[8, 1]),
        eps: fake(2 << 20, device, DType::F32, &[L], &[1]),
        cos_sin_cache: fake(3 << 20, device, DType::F32, &[P, R], &[4, 1]),
        positions: fake(4 << 20, device, DType::I32, &[T], &[1]),
        value_scale: None,
    };
    let error = Plan::new(CONFIG, x, Outputs::default()).unwrap_err();
    assert!(matches!(error, Error::BackendNotCompiled { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "The CUDA backend is not compiled in: build fused-kv with the feature `cuda`."
    );
}

#[test]
fn messages_of_the_contract() {
    let config = Config {
        num_kv_heads: 8,
        head_dim: 128,
        rotary_dim: 128,
        ..CONFIG
    };
    let device = Device::Cuda(0);
    let kv = [17, 5, 2 * 8 * 128];
    let x = Inputs {
        kv: fake(4096, device, DType::Bf16, &kv, &[10240, 2048, 1]),
        k_norm_weight: view(1f32, &[5, 128]),
        eps: view(1f32, &[5]),
        cos_sin_cache: view(1f32, &[P, 128]),
        positions: view(0i64, &[17]),
        value_scale: None,
    };
    let v = view(0f32, &[5, 17, 8, 128]);
    assert_eq!(
        check(&config, &x, [None, Some(&v)]).to_string(),
        "Invalid v_out device/dtype for fused KV materialization: got device=cpu, dtype=float32, \
         expected device=cuda:0, dtype=bfloat16."
    );
    let v = view(0f32, &[5, 16, 8, 128]);
    assert_eq!(
        check(&config, &x, [None, Some(&v)]).to_string(),
        "Invalid v_out shape for fused KV materialization: got (5, 16, 8, 128), \
         expected (5, 17, 8, 128)."
    );
}

#[test]
fn no_tokens_give_two_distinct_empty_outputs() {
    let x = Inputs {
        kv: zeros(&[0, L, 32]),
        positions: view(0i64, &[0]),
        ..inputs()
    };
    let mut plan = Plan::new(CONFIG, x, Outputs::default()).unwrap();
    plan.run().unwrap();
    plan.check().unwrap();
    assert_eq!(plan.k().shape(), [L, 0, H, D]);
    assert_ne!(plan.k().address(), plan.v().address());
    let (k, v) = plan.into_outputs();
    assert_eq!(k.unwrap().as_slice::<bf16>(), Some(&[][..]));
    assert_eq!(v.unwrap().as_bytes(), Some(&[][..]));

    // The checks are the usual ones.
    let wrong = Inputs {
        eps: view(1f32, &[L + 1]),
        ..x
    };
    assert!(Plan::new(CONFIG, wrong, Outputs::default()).is_err());
}

#[test]
fn an_output_that_no_memory_holds_is_an_error() {
    let tokens = u32::MAX as usize;
    let one = leak(bf16::ZERO, 2 * 1024 * 4);
    let config = Config {
        head_dim: 1024,
        rotary_dim: 2,
        num_kv_heads: 4,
        ..CONFIG
    };
    let refused = |layers: usize| {
        let weight = leak(1f32, 1024);
        let x = Inputs {
            kv: TensorView::from_strided(one, 0, &[tokens, layers, 8192], &[0, 0, 1]).unwrap(),
            k_norm_weight: TensorView::from_strided(weight, 0, &[layers, 1024], &[0, 1]).unwrap(),
            eps: view(1f32, &[layers]),
            cos_sin_cache: view(1f32, &[P, 2]),
            positions: TensorView::from_strided(leak(0i64, 1), 0, &[tokens], &[0]).unwrap(),
            value_scale: None,
        };
        Plan::new(config, x, Outputs::default()).unwrap_err()
    };
    // 2^53 bytes are more than an address space, 2^65 more than a number.
    assert!(matches!(
        refused(1 << 8),
        Error::OutOfMemory {
            argument: Argument::KOut,
            ..
        }
    ));
    assert!(matches!(
        refused(1 << 20),
        Error::TooLarge {
            what: "the size of an output in bytes",
            found: u64::MAX,
            ..
        }
    ));
}

#[test]
fn a_supplied_output_stays_with_the_caller() {
    let mut out = vec![bf16::ONE; L * T * H * D];
    let outputs = Outputs {
        k: Output::Into(TensorViewMut::from_slice(&mut out, &[L, T, H, D]).unwrap()),
        v: Output::Allocate,
    };
    let mut plan = Plan::new(CONFIG, inputs(), outputs).unwrap();
    plan.run().unwrap();
    plan.check().unwrap();
    let (k, v) = plan.into_outputs();
    assert!(k.is_none());
    assert!(v.is_some());
    assert!(out.iter().all(|&x| x == bf16::ZERO));
}
