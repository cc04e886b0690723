//! What to compute, on what, into what: the description of a job, and its validated form.

use std::marker::PhantomData;

use crate::cpu;
use crate::error::{Argument, Error};
use crate::launches::{Dispatch, launches};
use crate::owned::OwnedTensor;
use crate::pool::PoolTarget;
use crate::problem::{Problem, Target};
use crate::tensor::{Layout, Raw, TensorView, TensorViewMut};
use crate::{Device, validate};
use fused_kv_kernels::abi::Status;
use fused_kv_kernels::emulator::{Emulator, Permissions};

/// Which elements of a head RoPE rotates together. There is no default: the wrong style gives
/// plausible numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Pairs `(i, i + rotary_dim/2)`, as in GPT-NeoX and Llama ("rotate half").
    Neox,
    /// Pairs `(2i, 2i + 1)`, as in GPT-J.
    Interleaved,
}

/// How the RMSNorm weight is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NormWeight {
    /// The weight itself.
    #[default]
    Plain,
    /// The effective weight is `1 + w`, added in f32 (Gemma's convention).
    Offset,
}

/// Geometry and conventions of the attention layers; equal for all layers of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// KV heads a layer (H).
    pub num_kv_heads: usize,
    /// Elements of a head (D): even, 2 to 1024.
    pub head_dim: usize,
    /// Leading elements of a head that are rotated (R): even, 2 to `head_dim`.
    pub rotary_dim: usize,
    /// Which elements are rotated together.
    pub rope_style: RopeStyle,
    /// How the norm weight is stored.
    pub norm_weight: NormWeight,
}

/// The tensors that a job reads. T tokens, L layers, H heads, D `head_dim`, R `rotary_dim`.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[T, L, 2*H*D]`: K heads, then V heads. bf16, f16 or f32; token and layer strides free.
    pub kv: TensorView<'a>,
    /// `[L, D]`, bf16, f16 or f32 (independent of `kv`); row stride free.
    pub k_norm_weight: TensorView<'a>,
    /// `[L]`, f32.
    pub eps: TensorView<'a>,
    /// `[P, R]`, bf16, f16 or f32 (independent of `kv`): R/2 cosines, then R/2 sines, used as
    /// given; row stride free.
    pub cos_sin_cache: TensorView<'a>,
    /// `[T]`, i64 or i32; stride free.
    pub positions: TensorView<'a>,
    /// `[L]`, f32: the model's attention value scale. Absent: V is copied bit for bit.
    pub value_scale: Option<TensorView<'a>>,
}

/// Where one output goes.
#[derive(Debug, Default)]
pub enum Output<'a> {
    /// The plan allocates a contiguous `[L, T, H, D]` tensor on the device of `kv`.
    #[default]
    Allocate,
    /// The caller's tensor `[L, T, H, D]`, dtype and device of `kv`; layer, token and head
    /// strides free.
    Into(TensorViewMut<'a>),
}

/// Where K and V go; each on its own.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// Destination of K.
    pub k: Output<'a>,
    /// Destination of V.
    pub v: Output<'a>,
}

/// A job whose description was checked once and that can be run many times.
#[derive(Debug)]
pub struct Plan<'a> {
    problem: Problem,
    backend: Backend,
    k: Destination<'a>,
    v: Destination<'a>,
    /// The inputs stay borrowed: `problem` holds their addresses.
    inputs: PhantomData<Inputs<'a>>,
}

/// What runs the job, with its state.
#[derive(Debug)]
enum Backend {
    Cpu(cpu::Runner),
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::Runner),
}

impl Backend {
    /// The backend for the device that the problem is on.
    fn new(problem: &Problem) -> Result<Self, Error> {
        match problem.device {
            Device::Cpu => Ok(Self::Cpu(cpu::Runner::new())),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => crate::cuda::Runner::new(problem).map(Self::Cuda),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(Error::cuda_not_compiled()),
        }
    }
}

/// Where the memory behind a view really is: with CUDA compiled in, the driver knows.
#[cfg(feature = "cuda")]
const RESOLVE: validate::Resolve<'static> = &crate::cuda::resolve_device;
#[cfg(not(feature = "cuda"))]
const RESOLVE: validate::Resolve<'static> = &validate::believe;

/// Memory that one output goes to.
#[derive(Debug)]
enum Destination<'a> {
    Caller(TensorViewMut<'a>),
    Owned(OwnedTensor),
}

impl Destination<'_> {
    fn new(
        argument: Argument,
        supplied: Option<Raw>,
        sources: &validate::Sources,
        shape: &[usize],
    ) -> Result<Self, Error> {
        match supplied {
            Some(raw) => Ok(Self::Caller(TensorViewMut::from_raw(raw))),
            None => {
                let (device, near) = (sources.device(), sources.kv_address());
                OwnedTensor::allocate(argument, device, near, sources.dtype(), shape)
                    .map(Self::Owned)
            }
        }
    }

    fn raw(&self) -> &Raw {
        match self {
            Self::Caller(view) => &view.raw,
            Self::Owned(tensor) => tensor.raw(),
        }
    }

    fn into_owned(self) -> Option<OwnedTensor> {
        match self {
            Self::Caller(_) => None,
            Self::Owned(tensor) => Some(tensor),
        }
    }
}

impl<'a> Plan<'a> {
    /// Checks everything that can be known before a run and allocates what the plan will own.
    ///
    /// # Errors
    ///
    /// The first failing check, in the order of the variants of [`Error`]. Nothing was written.
    pub fn new(config: Config, inputs: Inputs<'a>, outputs: Outputs<'a>) -> Result<Self, Error> {
        fn supplied<'v>(output: &'v Output<'_>) -> Option<&'v Raw> {
            match output {
                Output::Allocate => None,
                Output::Into(view) => Some(&view.raw),
            }
        }
        let supplied = [supplied(&outputs.k), supplied(&outputs.v)];
        let validate::Dense { sources, k, v } =
            validate::dense(&config, &inputs, supplied, RESOLVE)?;
        let shape = sources.output_shape(&config);
        let k = Destination::new(Argument::KOut, k, &sources, &shape)?;
        let v = Destination::new(Argument::VOut, v, &sources, &shape)?;
        let target = Target::Dense {
            k: validate::operand(k.raw(), 3),
            v: validate::operand(v.raw(), 3),
        };
        let problem = sources.problem(config, target);
        Ok(Self {
            backend: Backend::new(&problem)?,
            problem,
            k,
            v,
            inputs: PhantomData,
        })
    }

    /// As [`Plan::new`], with a KV pool as the target: each token's rows go to its slot, in one
    /// launch for all layers.
    ///
    /// # Errors
    ///
    /// As [`Plan::new`]. Nothing was written.
    pub fn paged(config: Config, inputs: Inputs<'a>, pool: PoolTarget<'a>) -> Result<Self, Error> {
        let validate::Paged { sources, pool } = validate::paged(&config, &inputs, &pool, RESOLVE)?;
        // There is no workspace to be looked at.
        let nothing = |base: usize| -> Result<_, Error> {
            let shape = [sources.layers(), 0, config.num_kv_heads, config.head_dim];
            let layout = Layout::contiguous(&shape).map_err(Error::View)?;
            Ok(Destination::Caller(TensorViewMut::from_raw(Raw {
                address: base,
                device: sources.device(),
                dtype: pool.dtype,
                layout,
            })))
        };
        let [k, v] = if sources.layers() > 0 {
            pool.bases(0)
        } else {
            [0; 2]
        };
        let (k, v) = (nothing(k)?, nothing(v)?);
        let problem = sources.problem(config, Target::Pool(pool));
        Ok(Self {
            backend: Backend::new(&problem)?,
            problem,
            k,
            v,
            inputs: PhantomData,
        })
    }

    /// Runs the job: at once on the CPU; on CUDA enqueued to the null stream, without waiting.
    /// Rows of a token whose position is outside the table, or whose slot is past the end of the
    /// pool, are left untouched; [`Plan::check`] tells of them.
    ///
    /// # Errors
    ///
    /// A launch that failed. What only the data can tell comes from [`Plan::check`].
    pub fn run(&mut self) -> Result<(), Error> {
        match &mut self.backend {
            Backend::Cpu(runner) => {
                runner.run(&self.problem);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(runner) => runner.enqueue(crate::cuda::Stream::null()),
        }
    }

    /// Enqueues the job to the caller's stream: allocates nothing, does not wait, and can be
    /// captured into a graph. On the CPU this is [`Plan::run`]; the stream is not looked at.
    ///
    /// Nor does dropping the plan wait. Until the stream has come to this work ([`Plan::check`] waits
    /// for that), work on other streams should leave its tensors alone, and memory of a stream-ordered
    /// allocator should be freed on this stream.
    ///
    /// # Errors
    ///
    /// As [`Plan::run`].
    #[cfg(feature = "cuda")]
    pub fn run_on(&mut self, stream: crate::cuda::Stream<'_>) -> Result<(), Error> {
        match &mut self.backend {
            Backend::Cpu(_) => self.run(),
            Backend::Cuda(runner) => runner.enqueue(stream),
        }
    }

    /// Waits for what was enqueued and reports what the rows told since the last check: positions
    /// outside the table (or slots outside the pool), by the lowest such token and their number.
    /// Clears the record.
    ///
    /// # Errors
    ///
    /// [`Error::PositionOutOfRange`], [`Error::SlotOutOfRange`], or a CUDA failure.
    pub fn check(&mut self) -> Result<(), Error> {
        match &mut self.backend {
            Backend::Cpu(runner) => runner.check(&self.problem),
            #[cfg(feature = "cuda")]
            Backend::Cuda(runner) => runner.check(&self.problem),
        }
    }

    /// K as written, `[L, T, H, D]`; empty, `[L, 0, H, D]`, where it went to a pool.
    pub fn k(&self) -> TensorView<'_> {
        TensorView::from_raw(*self.k.raw())
    }

    /// V as written, `[L, T, H, D]`; empty, `[L, 0, H, D]`, where it went to a pool.
    pub fn v(&self) -> TensorView<'_> {
        TensorView::from_raw(*self.v.raw())
    }

    /// K and V, each where the plan allocated it (`None` where the caller supplied it, or a pool).
    pub fn into_outputs(self) -> (Option<OwnedTensor>, Option<OwnedTensor>) {
        (self.k.into_owned(), self.v.into_owned())
    }

    /// Chooses how the job is dispatched on a GPU, for tests and measurements; without effect on
    /// the CPU.
    ///
    /// # Errors
    ///
    /// [`Error::Path`] when the path cannot serve this job.
    pub fn dispatch(&mut self, dispatch: Dispatch) -> Result<(), Error> {
        match &mut self.backend {
            Backend::Cpu(_) => launches(&self.problem, dispatch, 0, 0).map(drop),
            #[cfg(feature = "cuda")]
            Backend::Cuda(runner) => runner.dispatch(&self.problem, dispatch),
        }
    }

    /// Runs the GPU's kernels on an emulated device, in host memory: far too slow for work, but
    /// everything between a plan and the bytes that a GPU writes can be tested without a GPU.
    /// [`Plan::check`] afterwards tells of bad positions as usual.
    ///
    /// # Errors
    ///
    /// [`Error::Path`] when the path asked for cannot serve this job, or the plan is not on the
    /// CPU; [`Error::DuplicateSlot`] where two tokens would be written to one slot at a time;
    /// [`Error::EmulatedFault`] for what no kernel may do, after which the outputs are incomplete.
    pub fn run_emulated(&mut self, dispatch: Dispatch) -> Result<(), Error> {
        self.emulate(dispatch, None)
    }

    /// As [`Plan::run_emulated`], where kernels may touch only the memory that `permissions` name,
    /// byte by byte, and what the plan itself holds.
    ///
    /// # Errors
    ///
    /// As [`Plan::run_emulated`]; an access of other memory is an [`Error::EmulatedFault`].
    pub fn run_emulated_within(
        &mut self,
        dispatch: Dispatch,
        permissions: Permissions,
    ) -> Result<(), Error> {
        self.emulate(dispatch, Some(permissions))
    }

    fn emulate(
        &mut self,
        dispatch: Dispatch,
        mut permissions: Option<Permissions>,
    ) -> Result<(), Error> {
        #[allow(irrefutable_let_patterns, reason = "more backends with more features")]
        let Backend::Cpu(runner) = &mut self.backend else {
            return Err(Error::Path {
                path: "emulated",
                reason: "its tensors are not in host memory",
            });
        };
        let status = runner.status_address();
        let mut table = 0;
        if let Target::Pool(pool) = &self.problem.target {
            validate::unique_slots(pool, self.problem.tokens)?;
            table = pool.table().as_ptr() as u64;
        }
        if let Some(permissions) = &mut permissions {
            permissions.allow_reports(status, size_of::<Status>());
            if let Target::Pool(pool) = &self.problem.target {
                permissions.allow_reads(table, size_of_val(pool.table()));
            }
            for destination in [&self.k, &self.v] {
                if let Destination::Owned(tensor) = destination {
                    let bytes = tensor.as_bytes().unwrap_or_default().len();
                    permissions.allow_writes(tensor.raw().address as u64, bytes);
                }
            }
        }
        let mut emulator = Emulator::new(permissions);
        for call in launches(&self.problem, dispatch, status, table)? {
            // SAFETY: validation covers what the parameters name, and no two tokens have the same
            // destination; the record lives in the runner, the table in the problem.
            unsafe { emulator.launch(call.entry, call.grid, call.threads, &call.params) }.map_err(
                |fault| Error::EmulatedFault {
                    message: fault.to_string(),
                },
            )?;
        }
        Ok(())
    }

    /// Chooses the code that the CPU backend runs.
    #[cfg(test)]
    pub(crate) fn force_cpu(&mut self, isa: cpu::Isa, stream_bytes: usize) {
        #[allow(irrefutable_let_patterns, reason = "more backends with more features")]
        if let Backend::Cpu(runner) = &mut self.backend {
            runner.force(isa, stream_bytes);
        }
    }
}
