//! What is refused, with which error and message, in which order, and that nothing is written
//! then.

use fused_kv::{
    Argument, Config, DType, Device, Error, Inputs, NormWeight, Output, Outputs, Plan, RopeStyle,
    Shape, TensorView, TensorViewMut, ViewError,
};
use fused_kv_tests::runner::HostMemory;

const T: usize = 17;
const L: usize = 5;
const H: usize = 8;
const D: usize = 128;
const P: usize = 32;

/// A tensor argument as numbers, so that a test can make it say anything.
#[derive(Clone, Debug)]
struct Arg {
    address: u64,
    device: Device,
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<isize>,
}

impl Arg {
    fn reshape(&mut self, shape: &[usize]) {
        self.shape = shape.to_vec();
        let mut step = 1;
        self.strides = vec![1; shape.len()];
        for (stride, extent) in self.strides.iter_mut().zip(shape).rev() {
            *stride = step;
            step *= *extent as isize;
        }
    }

    /// The lifetime is free: the memory belongs to the `Job` that outlives every plan made of it.
    fn view<'a>(&self) -> TensorView<'a> {
        // SAFETY: a plan is only made while the job's memory lives, and is only run where no fault
        // was applied, so that the view describes that memory.
        unsafe {
            TensorView::from_raw_parts(
                self.address,
                self.device,
                self.dtype,
                &self.shape,
                &self.strides,
            )
        }
        .expect("a view")
    }

    fn view_mut<'a>(&self) -> TensorViewMut<'a> {
        // SAFETY: as in `view`; outputs of a job that is run do not overlap anything.
        unsafe {
            TensorViewMut::from_raw_parts(
                self.address,
                self.device,
                self.dtype,
                &self.shape,
                &self.strides,
            )
        }
        .expect("a view")
    }
}

/// A valid job, to which faults are applied.
struct Job {
    memory: Vec<HostMemory>,
    before: Vec<Vec<u8>>,
    config: Config,
    kv: Arg,
    weight: Arg,
    eps: Arg,
    table: Arg,
    positions: Arg,
    value_scale: Option<Arg>,
    k_out: Option<Arg>,
    v_out: Option<Arg>,
}

impl Job {
    fn new() -> Self {
        let mut memory = Vec::new();
        let mut arg = |dtype: DType, shape: &[usize]| {
            // Zeros are valid elements of every argument.
            let bytes = vec![0; shape.iter().product::<usize>() * dtype.size()];
            let mut block = HostMemory::from_bytes(&bytes);
            let mut arg = Arg {
                address: block.address(),
                device: Device::Cpu,
                dtype,
                shape: Vec::new(),
                strides: Vec::new(),
            };
            arg.reshape(shape);
            memory.push(block);
            arg
        };
        let out = [L, T, H, D];
        let mut job = Self {
            config: Config {
                num_kv_heads: H,
                head_dim: D,
                rotary_dim: D,
                rope_style: RopeStyle::Neox,
                norm_weight: NormWeight::Plain,
            },
            kv: arg(DType::Bf16, &[T, L, 2 * H * D]),
            weight: arg(DType::Bf16, &[L, D]),
            eps: arg(DType::F32, &[L]),
            table: arg(DType::F32, &[P, D]),
            positions: arg(DType::I64, &[T]),
            value_scale: Some(arg(DType::F32, &[L])),
            k_out: Some(arg(DType::Bf16, &out)),
            v_out: Some(arg(DType::Bf16, &out)),
            memory: Vec::new(),
            before: Vec::new(),
        };
        job.memory = memory;
        job.before = job.memory.iter().map(HostMemory::to_bytes).collect();
        job
    }

    fn k(&mut self) -> &mut Arg {
        self.k_out.as_mut().expect("a supplied k_out")
    }

    fn v(&mut self) -> &mut Arg {
        self.v_out.as_mut().expect("a supplied v_out")
    }

    fn scale(&mut self) -> &mut Arg {
        self.value_scale.as_mut().expect("value scales")
    }

    fn plan(&self) -> Result<Plan<'_>, Error> {
        let output = |arg: &Option<Arg>| match arg {
            Some(arg) => Output::Into(arg.view_mut()),
            None => Output::Allocate,
        };
        Plan::new(
            self.config,
            Inputs {
                kv: self.kv.view(),
                k_norm_weight: self.weight.view(),
                eps: self.eps.view(),
                cos_sin_cache: self.table.view(),
                positions: self.positions.view(),
                value_scale: self.value_scale.as_ref().map(Arg::view),
            },
            Outputs {
                k: output(&self.k_out),
                v: output(&self.v_out),
            },
        )
    }

    /// The error that planning gives; nothing may have been written.
    fn refused(&self) -> Error {
        let error = match self.plan() {
            Ok(_) => panic!("accepted"),
            Err(error) => error,
        };
        for (memory, before) in self.memory.iter().zip(&self.before) {
            assert!(memory.to_bytes() == *before, "written in spite of {error}");
        }
        error
    }
}

/// A fault: its stage in the order of checks, what it does to a job, and what must come of it.
struct Fault {
    name: &'static str,
    stage: u32,
    apply: fn(&mut Job),
    error: fn() -> Error,
    message: &'static str,
}

fn shape<const N: usize>(argument: Argument, found: [usize; N], expected: &[usize]) -> Error {
    Error::Shape {
        argument,
        found: found.into(),
        expected: Shape::from(expected),
    }
}

fn device_dtype(argument: Argument, device: Device, dtype: DType) -> Error {
    Error::DeviceDtype {
        argument,
        device,
        dtype,
        expected_device: Device::Cpu,
        expected_dtype: DType::Bf16,
    }
}

macro_rules! faults {
    ($($stage:literal $name:ident: |$job:ident| $apply:block => $error:expr, $message:expr;)*) => {
        const FAULTS: &[Fault] = &[$(Fault {
            name: stringify!($name),
            stage: $stage,
            apply: |$job| $apply,
            error: || $error,
            message: $message,
        }),*];

        /// Each fault alone: the exact error with its fields, and its exact message.
        mod alone {
            use super::*;
            $(
                #[test]
                fn $name() {
                    let fault = FAULTS
                        .iter()
                        .find(|fault| fault.name == stringify!($name))
                        .expect("in the list");
                    let mut job = Job::new();
                    (fault.apply)(&mut job);
                    let error = job.refused();
                    assert_eq!(error, (fault.error)());
                    assert_eq!(error.to_string(), fault.message);
                }
            )*
        }
    };
}

faults! {
    1 kv_rank: |job| { job.kv.reshape(&[T, L * 2 * H * D]) } =>
        Error::KvRank { found: [17, 10240].into() },
        "Invalid kv rank for fused KV materialization: got 2 dimensions with shape (17, 10240), \
         expected 3 dimensions [tokens, layers, 2 * heads * head_dim].";
    2 kv_last_dim: |job| { job.kv.shape[2] = 1024 } =>
        Error::KvLastDim { found: 1024, expected: 2048, num_kv_heads: 8, head_dim: 128 },
        "Invalid kv shape for fused KV materialization: got last dimension 1024, \
         expected 2048 (2 * 8 heads * head_dim 128).";
    3 rotary_dim_odd: |job| { job.config.rotary_dim = 63 } =>
        Error::Geometry { head_dim: 128, rotary_dim: 63, num_kv_heads: 8 },
        "Invalid geometry for fused KV materialization: got head_dim=128, rotary_dim=63, \
         num_kv_heads=8, expected an even head_dim from 2 to 1024, an even rotary_dim from 2 to \
         head_dim, and at least one head.";
    4 weight_layers: |job| { job.weight.reshape(&[4, D]) } =>
        shape(Argument::KNormWeight, [4, 128], &[5, 128]),
        "Invalid k_norm_weight shape for fused KV materialization: got (4, 128), expected (5, 128).";
    4 weight_rank: |job| { job.weight.reshape(&[D]) } =>
        shape(Argument::KNormWeight, [128], &[5, 128]),
        "Invalid k_norm_weight shape for fused KV materialization: got (128,), expected (5, 128).";
    4 weight_width: |job| { job.weight.shape[1] = 64 } =>
        shape(Argument::KNormWeight, [5, 64], &[5, 128]),
        "Invalid k_norm_weight shape for fused KV materialization: got (5, 64), expected (5, 128).";
    5 eps_length: |job| { job.eps.reshape(&[1]) } =>
        shape(Argument::Eps, [1], &[5]),
        "Invalid eps shape for fused KV materialization: got (1,), expected (5,).";
    5 eps_scalar: |job| { job.eps.reshape(&[]) } =>
        shape(Argument::Eps, [], &[5]),
        "Invalid eps shape for fused KV materialization: got (), expected (5,).";
    6 value_scale_length: |job| { job.scale().reshape(&[4]) } =>
        shape(Argument::ValueScale, [4], &[5]),
        "Invalid value_scale shape for fused KV materialization: got (4,), expected (5,).";
    7 table_width: |job| { job.table.shape[1] = 64 } =>
        Error::TableShape { found: [32, 64].into(), rotary_dim: 128 },
        "Invalid cos_sin_cache shape for fused KV materialization: got (32, 64), \
         expected (positions, 128).";
    7 table_rank: |job| { job.table.reshape(&[P, 2, D / 2]) } =>
        Error::TableShape { found: [32, 2, 64].into(), rotary_dim: 128 },
        "Invalid cos_sin_cache shape for fused KV materialization: got (32, 2, 64), \
         expected (positions, 128).";
    8 positions_rank: |job| { job.positions.reshape(&[3, T]) } =>
        Error::PositionsRank { found: [3, 17].into(), tokens: 17 },
        "Invalid positions rank for fused KV materialization: got 2 dimensions with shape \
         (3, 17), expected 1 dimension (17,).";
    8 positions_scalar: |job| { job.positions.reshape(&[]) } =>
        Error::PositionsRank { found: [].into(), tokens: 17 },
        "Invalid positions rank for fused KV materialization: got 0 dimensions with shape \
         (), expected 1 dimension (17,).";
    9 positions_length: |job| { job.positions.reshape(&[16]) } =>
        shape(Argument::Positions, [16], &[17]),
        "Invalid positions shape for fused KV materialization: got (16,), expected (17,).";
    10 k_out_shape: |job| { job.k().shape[1] = 16 } =>
        shape(Argument::KOut, [5, 16, 8, 128], &[5, 17, 8, 128]),
        "Invalid k_out shape for fused KV materialization: got (5, 16, 8, 128), \
         expected (5, 17, 8, 128).";
    10 k_out_rank: |job| { job.k().reshape(&[L, T, H * D]) } =>
        shape(Argument::KOut, [5, 17, 1024], &[5, 17, 8, 128]),
        "Invalid k_out shape for fused KV materialization: got (5, 17, 1024), \
         expected (5, 17, 8, 128).";
    11 k_out_dtype: |job| { job.k().dtype = DType::F16 } =>
        device_dtype(Argument::KOut, Device::Cpu, DType::F16),
        "Invalid k_out device/dtype for fused KV materialization: got device=cpu, dtype=float16, \
         expected device=cpu, dtype=bfloat16.";
    12 v_out_shape: |job| { job.v().shape[1] = 16 } =>
        shape(Argument::VOut, [5, 16, 8, 128], &[5, 17, 8, 128]),
        "Invalid v_out shape for fused KV materialization: got (5, 16, 8, 128), \
         expected (5, 17, 8, 128).";
    12 v_out_longer: |job| { job.v().shape[1] = 18 } =>
        shape(Argument::VOut, [5, 18, 8, 128], &[5, 17, 8, 128]),
        "Invalid v_out shape for fused KV materialization: got (5, 18, 8, 128), \
         expected (5, 17, 8, 128).";
    13 v_out_dtype: |job| { job.v().dtype = DType::F32 } =>
        device_dtype(Argument::VOut, Device::Cpu, DType::F32),
        "Invalid v_out device/dtype for fused KV materialization: got device=cpu, dtype=float32, \
         expected device=cpu, dtype=bfloat16.";
    14 weight_stride: |job| { job.weight.strides = vec![1, 5] } =>
        Error::InnermostStride { argument: Argument::KNormWeight, found: 5 },
        "Invalid k_norm_weight strides for fused KV materialization: got innermost stride 5, \
         expected 1.";
    14 kv_stride: |job| { job.kv.strides = vec![1, 17, 85] } =>
        Error::InnermostStride { argument: Argument::Kv, found: 85 },
        "Invalid kv strides for fused KV materialization: got innermost stride 85, expected 1.";
    14 k_out_stride: |job| { job.k().strides[3] = -1 } =>
        Error::InnermostStride { argument: Argument::KOut, found: -1 },
        "Invalid k_out strides for fused KV materialization: got innermost stride -1, expected 1.";
    15 k_out_overlaps_v_out: |job| { job.k().address = job.v().address } =>
        Error::Overlap { argument: Argument::KOut, other: Argument::VOut },
        "Overlapping memory for fused KV materialization: k_out overlaps v_out, \
         expected every output element to have memory of its own.";
    16 weight_dtype: |job| { job.weight.dtype = DType::F8E4M3Fn } =>
        Error::Dtype {
            argument: Argument::KNormWeight,
            found: DType::F8E4M3Fn,
            expected: "bfloat16, float16 or float32",
        },
        "Invalid k_norm_weight dtype for fused KV materialization: got float8_e4m3fn, \
         expected bfloat16, float16 or float32.";
    16 table_dtype: |job| { job.table.dtype = DType::I32 } =>
        Error::Dtype {
            argument: Argument::CosSinCache,
            found: DType::I32,
            expected: "bfloat16, float16 or float32",
        },
        "Invalid cos_sin_cache dtype for fused KV materialization: got int32, \
         expected bfloat16, float16 or float32.";
    16 positions_dtype: |job| { job.positions.dtype = DType::F32 } =>
        Error::Dtype {
            argument: Argument::Positions,
            found: DType::F32,
            expected: "int64 or int32",
        },
        "Invalid positions dtype for fused KV materialization: got float32, \
         expected int64 or int32.";
    16 eps_dtype: |job| { job.eps.dtype = DType::Bf16 } =>
        Error::Dtype { argument: Argument::Eps, found: DType::Bf16, expected: "float32" },
        "Invalid eps dtype for fused KV materialization: got bfloat16, expected float32.";
    16 value_scale_dtype: |job| { job.scale().dtype = DType::F16 } =>
        Error::Dtype { argument: Argument::ValueScale, found: DType::F16, expected: "float32" },
        "Invalid value_scale dtype for fused KV materialization: got float16, expected float32.";
}

/// Two faults at once, every pair: the earlier check speaks.
#[test]
fn checks_come_in_order() {
    let mut pairs = 0;
    for earlier in FAULTS {
        for later in FAULTS.iter().filter(|later| later.stage > earlier.stage) {
            // Layouts of two dimensions cannot be told by a fault of one of the strides.
            let mut job = Job::new();
            (later.apply)(&mut job);
            (earlier.apply)(&mut job);
            let (found, expected) = (job.refused(), (earlier.error)());
            assert_eq!(
                std::mem::discriminant(&found),
                std::mem::discriminant(&expected),
                "{} with {}: {found}",
                earlier.name,
                later.name
            );
            assert_eq!(
                argument(&found),
                argument(&expected),
                "{} with {}: {found}",
                earlier.name,
                later.name
            );
            pairs += 1;
        }
    }
    assert!(pairs > 300, "only {pairs} pairs");
}

fn argument(error: &Error) -> Option<Argument> {
    match *error {
        Error::Shape { argument, .. }
        | Error::DeviceDtype { argument, .. }
        | Error::InnermostStride { argument, .. }
        | Error::Overlap { argument, .. }
        | Error::Dtype { argument, .. } => Some(argument),
        _ => None,
    }
}

/// The job that the faults are applied to is valid.
#[test]
fn the_job_without_fault_runs() {
    let job = Job::new();
    let mut plan = job.plan().expect("a valid job");
    plan.run().expect("a run");
    plan.check().expect("valid positions");
}

#[test]
fn geometry_outside_of_what_is_supported() {
    let refuse = |heads: usize, head_dim: usize, rotary_dim: usize| {
        let mut job = Job::new();
        job.config.num_kv_heads = heads;
        job.config.head_dim = head_dim;
        job.config.rotary_dim = rotary_dim;
        job.kv.reshape(&[1, 1, 2 * heads * head_dim]);
        let expected = Error::Geometry {
            head_dim,
            rotary_dim,
            num_kv_heads: heads,
        };
        assert_eq!(job.refused(), expected);
    };
    for rotary_dim in [0, 1, 127, 129, 130, usize::MAX] {
        refuse(8, 128, rotary_dim);
    }
    for head_dim in [0, 1, 3, 127, 1026, 2048] {
        refuse(1, head_dim, 2);
    }
    refuse(0, 128, 128);
}

/// `2 * heads * head_dim` beyond 64 bits is an error like any other.
#[test]
fn geometry_that_overflows_is_refused() {
    let mut job = Job::new();
    job.config.num_kv_heads = usize::MAX / 2;
    job.config.head_dim = 1024;
    assert!(matches!(
        job.refused(),
        Error::KvLastDim { found: 2048, .. }
    ));
}

/// Every kind of dtype that `kv` cannot have, with outputs of the same dtype.
#[test]
fn kv_dtype() {
    for dtype in [DType::I32, DType::I64, DType::F8E4M3Fn, DType::F8E5M2] {
        let mut job = Job::new();
        job.kv.dtype = dtype;
        (job.k_out, job.v_out) = (None, None);
        let expected = Error::Dtype {
            argument: Argument::Kv,
            found: dtype,
            expected: "bfloat16, float16 or float32",
        };
        assert_eq!(job.refused(), expected);
    }
}

#[test]
fn innermost_stride_of_every_tensor() {
    type Access = fn(&mut Job) -> &mut Arg;
    let access: [(Argument, Access); 7] = [
        (Argument::Kv, |job| &mut job.kv),
        (Argument::KNormWeight, |job| &mut job.weight),
        (Argument::Eps, |job| &mut job.eps),
        (Argument::CosSinCache, |job| &mut job.table),
        (Argument::ValueScale, |job| job.scale()),
        (Argument::KOut, |job| job.k()),
        (Argument::VOut, |job| job.v()),
    ];
    for (argument, access) in access {
        for found in [0, 2, -1] {
            let mut job = Job::new();
            let arg = access(&mut job);
            *arg.strides.last_mut().expect("a stride") = found;
            let expected = Error::InnermostStride { argument, found };
            assert_eq!(job.refused(), expected, "{argument} with {found}");
        }
    }
}

/// Memory of outputs that is shared with anything, or within one output.
mod overlap {
    use super::*;

    fn meets(job: &Job, argument: Argument, other: Argument) {
        assert_eq!(job.refused(), Error::Overlap { argument, other });
    }

    #[test]
    fn outputs_that_share_one_element() {
        let mut job = Job::new();
        // v_out begins in the last element of k_out.
        job.v().address = job.k().address + 2 * (L * T * H * D - 1) as u64;
        meets(&job, Argument::KOut, Argument::VOut);
    }

    #[test]
    fn either_output_in_any_input() {
        type Access = fn(&Job) -> &Arg;
        let inputs: [(Argument, Access); 6] = [
            (Argument::Kv, |job| &job.kv),
            (Argument::KNormWeight, |job| &job.weight),
            (Argument::Eps, |job| &job.eps),
            (Argument::CosSinCache, |job| &job.table),
            (Argument::Positions, |job| &job.positions),
            (Argument::ValueScale, |job| {
                job.value_scale.as_ref().expect("value scales")
            }),
        ];
        for (other, access) in inputs {
            for argument in [Argument::KOut, Argument::VOut] {
                // First and last byte of the input.
                for last in [false, true] {
                    let mut job = Job::new();
                    let input = access(&job).clone();
                    let bytes = input.shape.iter().product::<usize>() * input.dtype.size();
                    let out = match argument {
                        Argument::KOut => job.k(),
                        _ => job.v(),
                    };
                    // The other arguments have their own allocations; the shift could make the
                    // output meet them, so the input moves to where nothing else is.
                    let address = out.address;
                    out.address = 1 << 45;
                    let start = out.address;
                    let len = (L * T * H * D * 2) as u64;
                    let input = match other {
                        Argument::Kv => &mut job.kv,
                        Argument::KNormWeight => &mut job.weight,
                        Argument::Eps => &mut job.eps,
                        Argument::CosSinCache => &mut job.table,
                        Argument::Positions => &mut job.positions,
                        _ => job.scale(),
                    };
                    assert_ne!(address, 1 << 45);
                    input.address = if last {
                        start + 2 - bytes as u64
                    } else {
                        start + len - 2
                    };
                    meets(&job, argument, other);
                }
            }
        }
    }

    #[test]
    fn zero_strides() {
        for axis in 0..3 {
            let mut job = Job::new();
            job.k().strides[axis] = 0;
            meets(&job, Argument::KOut, Argument::KOut);
            let mut job = Job::new();
            job.v().strides[axis] = 0;
            meets(&job, Argument::VOut, Argument::VOut);
        }
    }

    #[test]
    fn rows_that_reach_into_the_next() {
        let mut job = Job::new();
        job.k().strides[2] = D as isize - 1;
        meets(&job, Argument::KOut, Argument::KOut);
        let mut job = Job::new();
        job.v().strides[1] = (H * D) as isize - 2;
        meets(&job, Argument::VOut, Argument::VOut);
        let mut job = Job::new();
        job.v().strides[0] = (T * H * D) as isize - 2;
        meets(&job, Argument::VOut, Argument::VOut);
    }

    fn runs(job: &Job) {
        let mut plan = job.plan().expect("no overlap");
        plan.run().expect("a run");
        plan.check().expect("valid positions");
    }

    /// Token-major outputs, `[T, L, H, D]` in memory.
    #[test]
    fn permuted_outputs_are_accepted() {
        let mut job = Job::new();
        let strides = [H * D, L * H * D, D, 1].map(|stride| stride as isize);
        job.k().strides = strides.to_vec();
        job.v().strides = strides.to_vec();
        runs(&job);
    }

    /// K and V as the halves of the last dimension of one allocation `[L, T, H, 2*D]`.
    #[test]
    fn interleaved_halves_of_one_allocation_are_accepted() {
        let mut job = Job::new();
        let mut memory = HostMemory::from_bytes(&vec![0; L * T * H * 2 * D * 2]);
        let strides = [T * H * 2 * D, H * 2 * D, 2 * D, 1].map(|stride| stride as isize);
        for (arg, offset) in [(&mut job.k_out, 0), (&mut job.v_out, D * 2)] {
            let arg = arg.as_mut().expect("supplied");
            arg.address = memory.address() + offset as u64;
            arg.strides = strides.to_vec();
        }
        runs(&job);
        // One element nearer, they meet.
        job.v().address -= 2;
        meets(&job, Argument::KOut, Argument::VOut);
    }

    /// Adjacent outputs touch and do not overlap.
    #[test]
    fn adjacent_outputs_are_accepted() {
        let mut job = Job::new();
        let len = L * T * H * D * 2;
        let mut memory = HostMemory::from_bytes(&vec![0; 2 * len]);
        job.k().address = memory.address();
        job.v().address = memory.address() + len as u64;
        runs(&job);
    }
}

/// Inputs may overlap each other: a weight row for all layers, one table for all.
#[test]
fn broadcast_inputs_are_accepted() {
    let mut job = Job::new();
    job.weight.strides[0] = 0;
    job.kv.strides[0] = 0;
    job.table.strides[0] = 0;
    job.positions.strides[0] = 0;
    job.plan().expect("inputs may repeat").run().expect("a run");
}

/// The stride of a dimension of one element is never used.
#[test]
fn strides_of_single_elements_do_not_matter() {
    let mut job = Job::new();
    job.config.num_kv_heads = 1;
    (job.config.head_dim, job.config.rotary_dim) = (2, 2);
    job.kv.reshape(&[1, 1, 4]);
    job.weight.reshape(&[1, 2]);
    job.eps.reshape(&[1]);
    job.scale().reshape(&[1]);
    job.table.reshape(&[1, 2]);
    job.positions.reshape(&[1]);
    job.k().reshape(&[1, 1, 1, 2]);
    job.v().reshape(&[1, 1, 1, 2]);
    for stride in [0, 77, -5, isize::MAX, isize::MIN] {
        job.kv.strides[..2].fill(stride);
        job.weight.strides[0] = stride;
        job.eps.strides[0] = stride;
        job.scale().strides[0] = stride;
        job.table.strides[0] = stride;
        job.positions.strides[0] = stride;
        job.k().strides[..3].fill(stride);
        job.v().strides[..3].fill(stride);
        let mut plan = job.plan().expect("a valid job");
        plan.run().expect("a run");
        plan.check().expect("valid positions");
    }
}

/// T = 0 is checked as usual, launches nothing, and gives two distinct empty outputs.
#[test]
fn no_tokens_are_validated_as_usual() {
    let empty = |allocate: bool| {
        let mut job = Job::new();
        job.kv.shape[0] = 0;
        job.positions.shape[0] = 0;
        job.k().shape[1] = 0;
        job.v().shape[1] = 0;
        if allocate {
            (job.k_out, job.v_out) = (None, None);
        }
        job
    };
    for allocate in [false, true] {
        let job = empty(allocate);
        let mut plan = job.plan().expect("no tokens are valid");
        plan.run().expect("nothing to do");
        plan.check().expect("nothing to report");
        for view in [plan.k(), plan.v()] {
            assert_eq!(view.shape(), [5, 0, 8, 128]);
            assert_eq!(view.dtype(), DType::Bf16);
        }
        let (k, v) = plan.into_outputs();
        assert_eq!((k.is_some(), v.is_some()), (allocate, allocate));
        if let (Some(k), Some(v)) = (k, v) {
            // Two tensors, each its own: shapes and bytes of both.
            for output in [k, v] {
                assert_eq!(output.shape(), [5, 0, 8, 128]);
                assert_eq!(output.as_bytes(), Some(&[][..]));
            }
        }
    }
    let mut job = empty(false);
    job.v().shape[1] = 1;
    assert_eq!(
        job.refused(),
        shape(Argument::VOut, [5, 1, 8, 128], &[5, 0, 8, 128])
    );
    let mut job = empty(false);
    job.v().dtype = DType::F32;
    assert_eq!(
        job.refused(),
        device_dtype(Argument::VOut, Device::Cpu, DType::F32)
    );
    let mut job = empty(true);
    job.table.shape[1] = 64;
    assert!(matches!(job.refused(), Error::TableShape { .. }));
    let mut job = empty(true);
    job.positions.shape[0] = 1;
    assert_eq!(job.refused(), shape(Argument::Positions, [1], &[0]));
    let mut job = empty(true);
    job.weight.dtype = DType::I64;
    assert!(matches!(job.refused(), Error::Dtype { .. }));
}

/// More tokens than 32 bits count, seen through a stride of zero.
#[test]
fn too_many_tokens() {
    let mut job = Job::new();
    let tokens = 1usize << 32;
    job.kv.shape[0] = tokens;
    job.kv.strides[0] = 0;
    job.positions.shape[0] = tokens;
    job.positions.strides[0] = 0;
    (job.k_out, job.v_out) = (None, None);
    match job.refused() {
        Error::TooLarge { found, limit, .. } => {
            assert_eq!(found, tokens as u64);
            assert!(limit < found);
        }
        other => panic!("{other}"),
    }
}

/// What the view itself says about the memory that it is given.
mod views {
    use super::*;

    #[test]
    fn lengths_and_strides() {
        let data = [0.0f32; 12];
        let view = TensorView::from_slice(&data, &[3, 4]).expect("twelve elements");
        assert_eq!((view.shape(), view.strides()), (&[3, 4][..], &[4, 1][..]));
        assert_eq!(view.dtype(), DType::F32);
        assert_eq!(view.device(), Device::Cpu);

        let error = TensorView::from_slice(&data, &[3, 5]).expect_err("15 of 12");
        assert_eq!(
            error,
            Error::View(ViewError::Length {
                needed: 15,
                found: 12
            })
        );
        assert_eq!(
            error.to_string(),
            "Invalid tensor view: the shape needs 15 elements, the slice has 12."
        );
        let error = TensorView::from_strided(&data, 0, &[3, 4], &[5, 1]).expect_err("13 of 12");
        assert_eq!(
            error,
            Error::View(ViewError::OutOfBounds {
                low: 0,
                high: 13,
                len: 12
            })
        );
        let error = TensorView::from_strided(&data, 1, &[3], &[-1]).expect_err("before the start");
        assert_eq!(
            error,
            Error::View(ViewError::OutOfBounds {
                low: -1,
                high: 1,
                len: 12
            })
        );
        let error = TensorView::from_strided(&data, 0, &[3, 4], &[1]).expect_err("one stride");
        assert_eq!(
            error,
            Error::View(ViewError::StrideCount {
                shape: 2,
                strides: 1
            })
        );
        let error = TensorView::from_slice(&data, &[1; 6]).expect_err("six dimensions");
        assert!(matches!(error, Error::View(_)), "{error}");
        let error = TensorView::from_slice(&data, &[usize::MAX, 2]).expect_err("overflow");
        assert_eq!(error, Error::View(ViewError::TooLarge));
        let error =
            TensorView::from_strided(&data, 0, &[3, 3], &[isize::MAX, 1]).expect_err("overflow");
        assert_eq!(error, Error::View(ViewError::TooLarge));
    }

    #[test]
    fn bytes() {
        let data = [0u8; 13];
        let error = TensorView::from_bytes(&data, DType::F32, &[3]).expect_err("13 bytes");
        assert_eq!(
            error,
            Error::View(ViewError::PartialElement {
                bytes: 13,
                dtype: DType::F32
            })
        );
        TensorView::from_bytes(&data[1..], DType::F32, &[3]).expect("any alignment");
    }
}

/// Devices that are claimed, in a build that can't ask a driver.
#[cfg(not(feature = "cuda"))]
mod devices {
    use super::*;

    fn on_cuda() -> Job {
        let mut job = Job::new();
        for arg in [
            &mut job.kv,
            &mut job.weight,
            &mut job.eps,
            &mut job.table,
            &mut job.positions,
        ] {
            arg.device = Device::Cuda(0);
        }
        for arg in [&mut job.value_scale, &mut job.k_out, &mut job.v_out] {
            arg.as_mut().expect("supplied").device = Device::Cuda(0);
        }
        job
    }

    /// The error that started this project, with the words that people search their logs for.
    #[test]
    fn v_out_on_the_host_as_float32() {
        let mut job = on_cuda();
        job.v().device = Device::Cpu;
        job.v().dtype = DType::F32;
        let error = job.refused();
        assert_eq!(
            error,
            Error::DeviceDtype {
                argument: Argument::VOut,
                device: Device::Cpu,
                dtype: DType::F32,
                expected_device: Device::Cuda(0),
                expected_dtype: DType::Bf16,
            }
        );
        assert_eq!(
            error.to_string(),
            "Invalid v_out device/dtype for fused KV materialization: got device=cpu, \
             dtype=float32, expected device=cuda:0, dtype=bfloat16."
        );
    }

    #[test]
    fn k_out_on_another_device() {
        let mut job = on_cuda();
        job.k().device = Device::Cuda(1);
        assert_eq!(
            job.refused().to_string(),
            "Invalid k_out device/dtype for fused KV materialization: got device=cuda:1, \
             dtype=bfloat16, expected device=cuda:0, dtype=bfloat16."
        );
    }

    /// CASES 41 (FlashInfer 349): each input on another device than the rest.
    #[test]
    fn inputs_on_another_device() {
        type Access = fn(&mut Job) -> &mut Arg;
        let access: [(Argument, Access); 5] = [
            (Argument::KNormWeight, |job| &mut job.weight),
            (Argument::Eps, |job| &mut job.eps),
            (Argument::CosSinCache, |job| &mut job.table),
            (Argument::Positions, |job| &mut job.positions),
            (Argument::ValueScale, |job| job.scale()),
        ];
        for (argument, access) in access {
            for found in [Device::Cpu, Device::Cuda(1)] {
                let mut job = on_cuda();
                access(&mut job).device = found;
                let error = job.refused();
                assert_eq!(
                    error,
                    Error::InputDevice {
                        argument,
                        found,
                        expected: Device::Cuda(0)
                    }
                );
                assert_eq!(
                    error.to_string(),
                    format!(
                        "Invalid {argument} device for fused KV materialization: got \
                         device={found}, expected device=cuda:0."
                    )
                );
                // An earlier fault speaks first.
                job.weight.dtype = DType::I32;
                assert!(matches!(job.refused(), Error::Dtype { .. }));
            }
        }
    }

    /// Device memory is accessed in whole elements.
    #[test]
    fn addresses_between_elements() {
        let mut job = on_cuda();
        job.table.address += 2;
        let error = job.refused();
        assert_eq!(
            error,
            Error::Alignment {
                argument: Argument::CosSinCache,
                address: job.table.address,
                expected: 4
            }
        );
    }

    #[test]
    fn a_job_on_cuda_names_what_is_missing() {
        let error = on_cuda().refused();
        assert!(
            matches!(
                error,
                Error::BackendNotCompiled {
                    backend: "CUDA",
                    ..
                }
            ),
            "{error:?}"
        );
    }
}

/// What only the data can tell: rows stay untouched, the record names the lowest token and the
/// count, and reading it clears it.
mod check {
    use super::*;

    #[test]
    fn positions_out_of_range() {
        let mut job = Job::new();
        let mut positions = [0i64; T];
        (positions[4], positions[9], positions[16]) = (32, -1, i64::MAX);
        let mut memory = HostMemory::from_bytes(&positions.map(i64::to_le_bytes).concat());
        job.positions.address = memory.address();
        let mut plan = job.plan().expect("positions are not looked at");
        let expected = |count| Error::PositionOutOfRange {
            token: 4,
            position: 32,
            table_rows: 32,
            count,
        };
        plan.run().expect("the run itself succeeds");
        let error = plan.check().expect_err("three bad positions");
        assert_eq!(error, expected(3));
        assert_eq!(
            error.to_string(),
            "Position out of range in fused KV materialization: positions[4] is 32, expected \
             0 <= position < 32 (3 such tokens; their rows were not written)."
        );
        assert_eq!(plan.check(), Ok(()), "the record is cleared");
        // Runs accumulate until the record is read.
        plan.run().expect("a run");
        plan.run().expect("a run");
        assert_eq!(plan.check(), Err(expected(6)));
    }
}
