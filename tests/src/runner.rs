//! One runner over all backends.

use fastrand::Rng;
use fused_kv::{
    DType, Device, Dispatch, Error, Inputs, Output, Outputs, OwnedTensor, Path, Permissions, Plan,
    TensorView, TensorViewMut,
};

use crate::case::Case;
use crate::compare::assert_same;
use crate::element::{bits_of, canonical_nan, decode};
use crate::tensor::{Fill, Layout, Tensor};

#[derive(Clone, Copy)]
#[repr(C, align(256))]
struct Block([u8; 256]);

/// Host memory that starts at a multiple of 256 bytes, as device allocations do.
pub struct HostMemory {
    blocks: Vec<Block>,
    len: usize,
}

impl HostMemory {
    /// A copy of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let blocks = bytes
            .chunks(256)
            .map(|chunk| {
                let mut block = Block([0; 256]);
                block.0[..chunk.len()].copy_from_slice(chunk);
                block
            })
            .collect();
        Self {
            blocks,
            len: bytes.len(),
        }
    }

    /// Address of the first byte, from which the memory may also be written.
    pub fn address(&mut self) -> u64 {
        self.blocks.as_mut_ptr() as u64
    }

    /// What it holds.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.blocks.iter().flat_map(|block| block.0).collect();
        bytes.truncate(self.len);
        bytes
    }
}

/// Where cases are run.
#[derive(Clone, Debug)]
pub enum Runner {
    /// On the CPU backend.
    Cpu,
    /// The GPU's kernels on the emulated device, dispatched as given. They may touch the elements of
    /// the tensors, and nothing between or around them.
    Emulated(Dispatch),
    /// On a GPU, dispatched as given.
    #[cfg(feature = "cuda")]
    Cuda(fused_kv::cuda::Context, Dispatch),
}

enum Memory {
    Host(HostMemory),
    #[cfg(feature = "cuda")]
    Cuda(fused_kv::cuda::DeviceMemory),
}

impl Memory {
    fn address(&mut self) -> u64 {
        match self {
            Self::Host(memory) => memory.address(),
            #[cfg(feature = "cuda")]
            Self::Cuda(memory) => memory.address(),
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Host(memory) => memory.to_bytes(),
            #[cfg(feature = "cuda")]
            Self::Cuda(memory) => {
                let mut bytes = vec![0; memory.len()];
                memory.copy_to(&mut bytes).expect("a copy from the device");
                bytes
            }
        }
    }
}

/// The paths that serve a job of whole chunks whose rows are all aligned.
pub const ALIGNED: [Path; 3] = [Path::Vector, Path::Pairs, Path::Elements];

/// Numbers of blocks that start early: none, some, all.
pub const EARLY: [u32; 3] = [0, 2, u32::MAX];

/// What [`check_dispatches`] tries on a GPU: every path with several block sizes, numbers of early
/// blocks and orders, and the library's own choice, whole and cut into many launches (a few hundred at
/// most, however large the job).
pub fn all_dispatches(case: &Case) -> Vec<Dispatch> {
    let step = |extent: usize, least: u32| Some(least.max(extent.div_ceil(16) as u32));
    let mut all = vec![
        Dispatch::default(),
        Dispatch {
            tokens_per_launch: step(case.tokens(), 3),
            layers_per_launch: step(case.layers(), 1),
            ..Dispatch::default()
        },
        Dispatch {
            tokens_per_launch: step(case.tokens(), 3),
            layers_per_launch: step(case.layers(), 2),
            layers_first: Some(true),
            ..Dispatch::default()
        },
        Dispatch {
            overlap: Some(false),
            ..Dispatch::default()
        },
    ];
    let [none, some, every] = EARLY.map(Some);
    for path in Path::ALL {
        all.extend(
            [
                (None, None, None),
                (Some(64), some, Some(true)),
                (Some(192), none, Some(false)),
                (Some(512), every, Some(true)),
                (Some(64), every, Some(false)),
            ]
            .map(|(threads, early_blocks, layers_first)| Dispatch {
                path: Some(path),
                threads,
                early_blocks,
                layers_first,
                ..Dispatch::default()
            }),
        );
    }
    all
}

/// The same for the emulated device, which is slow: every path with the smallest block.
pub fn few_dispatches() -> Vec<Dispatch> {
    let small = |path| {
        EARLY.map(|early| Dispatch {
            path: Some(path),
            threads: Some(64),
            early_blocks: Some(early),
            layers_first: Some(early != EARLY[1]),
            ..Dispatch::default()
        })
    };
    Path::ALL.into_iter().flat_map(small).collect()
}

/// For random cases on the emulated device: every path, and the library's own choice, each in its
/// own way.
pub fn random_dispatches(seed: u64) -> Vec<Dispatch> {
    let mut rng = Rng::with_seed(seed);
    let paths = [None].into_iter().chain(Path::ALL.map(Some));
    paths
        .map(|path| Dispatch {
            path,
            threads: rng.bool().then(|| 64 * rng.u32(1..=8)),
            tokens_per_launch: (rng.u8(..3) == 0).then(|| rng.u32(1..4)),
            layers_per_launch: (rng.u8(..3) == 0).then(|| rng.u32(1..3)),
            early_blocks: match rng.u8(..3) {
                0 => None,
                1 => Some(rng.u32(..9)),
                _ => Some(u32::MAX),
            },
            layers_first: [None, Some(false), Some(true)][rng.usize(..3)],
            ..Dispatch::default()
        })
        .collect()
}

/// A tensor's memory on a backend, with the address of its first element.
pub(crate) struct Placed {
    memory: Memory,
    pub(crate) address: u64,
}

impl Placed {
    /// What the memory holds.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.memory.to_bytes()
    }
}

/// What a case gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// `k_out` with its memory after the run (contiguous and without guards where the plan
    /// allocated it).
    pub k: Tensor,
    /// `v_out`, likewise.
    pub v: Tensor,
    /// What `check` returned.
    pub check: Result<(), Error>,
}

/// Copies a tensor that a plan allocated.
fn fetch(owned: &OwnedTensor) -> Tensor {
    let mut tensor = Tensor::filled(
        owned.dtype(),
        owned.shape(),
        &Layout::default(),
        Fill::Canary,
    );
    let strides = owned.view().strides().to_vec();
    assert_eq!(tensor.strides, strides, "allocated outputs are contiguous");
    #[cfg(feature = "cuda")]
    if let Some(memory) = owned.device_memory() {
        let mut bytes = vec![0; memory.len()];
        memory.copy_to(&mut bytes).expect("a copy from the device");
        tensor.scatter(&bytes);
        return tensor;
    }
    tensor.scatter(owned.as_bytes().expect("host memory"));
    tensor
}

/// Gives computed f32 NaNs the payload that they have on a GPU. The kernels leave that to the
/// arithmetic: a GPU's has the canonical NaN for its only result, a host's keeps payloads.
/// (Narrower types get theirs from the conversion, on the emulated device too.)
fn canonicalize(output: &mut Tensor, written: &[bool]) {
    let [_, tokens, heads, dim] = output.shape[..] else {
        panic!("rank of {:?}", output.shape);
    };
    let canonical = canonical_nan(DType::F32).to_le_bytes();
    for (index, offset) in output.offsets().into_iter().enumerate() {
        let element = &mut output.memory[offset..offset + 4];
        if written[index / (heads * dim) % tokens] && decode(DType::F32, bits_of(element)).is_nan()
        {
            element.copy_from_slice(&canonical);
        }
    }
}

impl Runner {
    /// Where its tensors are.
    pub fn device(&self) -> Device {
        match self {
            Self::Cpu | Self::Emulated(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(context, _) => Device::Cuda(context.ordinal()),
        }
    }

    pub(crate) fn place(&self, tensor: &Tensor) -> Placed {
        let mut memory = match self {
            Self::Cpu | Self::Emulated(_) => Memory::Host(HostMemory::from_bytes(&tensor.memory)),
            #[cfg(feature = "cuda")]
            Self::Cuda(context, _) => Memory::Cuda(
                fused_kv::cuda::DeviceMemory::from_bytes(context, &tensor.memory)
                    .expect("device memory"),
            ),
        };
        let address = memory.address() + tensor.first as u64;
        Placed { memory, address }
    }

    pub(crate) fn view<'a>(&self, tensor: &Tensor, placed: &'a Placed) -> TensorView<'a> {
        // SAFETY: the tensor's layout lies within its memory (`Tensor::filled`), of which `placed`
        // is a copy that lives for `'a` and that only mutable views of other memory write.
        unsafe {
            TensorView::from_raw_parts(
                placed.address,
                self.device(),
                tensor.dtype,
                &tensor.shape,
                &tensor.strides,
            )
        }
        .expect("a view of a built tensor")
    }

    fn output<'a>(&self, tensor: Option<&Tensor>, placed: Option<&'a mut Placed>) -> Output<'a> {
        match (tensor, placed) {
            // SAFETY: as in `view`; `placed` is borrowed mutably for `'a`, so this is the only
            // view of its memory.
            (Some(tensor), Some(placed)) => Output::Into(
                unsafe {
                    TensorViewMut::from_raw_parts(
                        placed.address,
                        self.device(),
                        tensor.dtype,
                        &tensor.shape,
                        &tensor.strides,
                    )
                }
                .expect("a view of a built tensor"),
            ),
            _ => Output::Allocate,
        }
    }

    /// What a job may read and write: the elements of tensors, given with the memory that they are
    /// in. Nothing where nobody looks at it.
    pub(crate) fn permissions<'a>(
        &self,
        read: impl IntoIterator<Item = (&'a Tensor, &'a Placed)>,
        written: impl IntoIterator<Item = (&'a Tensor, u64)>,
    ) -> Permissions {
        let mut permissions = Permissions::default();
        if matches!(self, Self::Emulated(_)) {
            for (tensor, placed) in read {
                for (start, bytes) in tensor.ranges(placed.address) {
                    permissions.allow_reads(start, bytes);
                }
            }
            for (tensor, address) in written {
                for (start, bytes) in tensor.ranges(address) {
                    permissions.allow_writes(start, bytes);
                }
            }
        }
        permissions
    }

    /// Enqueues the plan as this runner dispatches.
    pub(crate) fn launch(
        &self,
        plan: &mut Plan<'_>,
        permissions: &Permissions,
    ) -> Result<(), Error> {
        match self {
            Self::Cpu => plan.run(),
            Self::Emulated(dispatch) => plan.run_emulated_within(*dispatch, permissions.clone()),
            #[cfg(feature = "cuda")]
            Self::Cuda(_, dispatch) => {
                plan.dispatch(*dispatch)?;
                plan.run()
            }
        }
    }

    /// Runs a case once.
    ///
    /// # Errors
    ///
    /// What validation or the launch returned.
    ///
    /// # Panics
    ///
    /// When the memory of an input changed, or, where validation failed, that of an output.
    pub fn run(&self, case: &Case) -> Result<Outcome, Error> {
        self.run_times(case, 1)
    }

    /// Runs the plan of a case several times over.
    ///
    /// # Errors
    ///
    /// As [`Runner::run`].
    pub fn run_times(&self, case: &Case, times: usize) -> Result<Outcome, Error> {
        let sources: Vec<&Tensor> = [
            Some(&case.kv),
            Some(&case.k_norm_weight),
            Some(&case.eps),
            Some(&case.cos_sin_cache),
            Some(&case.positions),
            case.value_scale.as_ref(),
        ]
        .into_iter()
        .flatten()
        .collect();
        let placed: Vec<Placed> = sources.iter().map(|tensor| self.place(tensor)).collect();
        let view = |index: usize| self.view(sources[index], &placed[index]);
        let inputs = Inputs {
            kv: view(0),
            k_norm_weight: view(1),
            eps: view(2),
            cos_sin_cache: view(3),
            positions: view(4),
            value_scale: (sources.len() > 5).then(|| view(5)),
        };
        let mut k = case.k_out.as_ref().map(|tensor| self.place(tensor));
        let mut v = case.v_out.as_ref().map(|tensor| self.place(tensor));
        let written = [(&case.k_out, &k), (&case.v_out, &v)];
        let permissions = self.permissions(
            sources.iter().copied().zip(&placed),
            written
                .into_iter()
                .filter_map(|(tensor, placed)| Some((tensor.as_ref()?, placed.as_ref()?.address))),
        );
        let outputs = Outputs {
            k: self.output(case.k_out.as_ref(), k.as_mut()),
            v: self.output(case.v_out.as_ref(), v.as_mut()),
        };
        let result = Plan::new(case.config, inputs, outputs).and_then(|mut plan| {
            for _ in 0..times {
                self.launch(&mut plan, &permissions)?;
            }
            let check = plan.check();
            assert_eq!(plan.check(), Ok(()), "check() clears the record");
            let (k, v) = plan.into_outputs();
            Ok((check, (k.as_ref().map(fetch), v.as_ref().map(fetch))))
        });
        for (tensor, placed) in sources.iter().zip(&placed) {
            assert!(
                tensor.memory == placed.memory.to_bytes(),
                "an input of shape {:?} changed in {}",
                tensor.shape,
                case.name
            );
        }
        let after = |tensor: &Option<Tensor>, placed: &Option<Placed>| {
            let (tensor, placed) = (tensor.as_ref()?, placed.as_ref()?);
            Some(Tensor {
                memory: placed.memory.to_bytes(),
                ..tensor.clone()
            })
        };
        let (k, v) = (after(&case.k_out, &k), after(&case.v_out, &v));
        match result {
            Ok((check, (allocated_k, allocated_v))) => {
                let mut outcome = Outcome {
                    k: k.or(allocated_k).expect("K is supplied or allocated"),
                    v: v.or(allocated_v).expect("V is supplied or allocated"),
                    check,
                };
                if matches!(self, Self::Emulated(_)) && case.kv.dtype == DType::F32 {
                    canonicalize(&mut outcome.k, &case.written());
                    if case.value_scale.is_some() {
                        canonicalize(&mut outcome.v, &case.written());
                    }
                }
                Ok(outcome)
            }
            Err(error) => {
                assert!(
                    matches!(error, Error::EmulatedFault { .. })
                        || k == case.k_out && v == case.v_out,
                    "refused with {error:?}, yet an output was written in {}",
                    case.name
                );
                Err(error)
            }
        }
    }
}

/// Runs a case on every one of `dispatches` that can serve it, made into a runner by `runner`, and
/// compares each with the CPU backend bit for bit. Returns the paths that were forced.
///
/// # Panics
///
/// On any difference; when a dispatch is refused for another reason than its path, or the path
/// that serves everything is.
pub fn check_dispatches(
    case: &Case,
    dispatches: &[Dispatch],
    runner: impl Fn(Dispatch) -> Runner,
) -> Vec<Path> {
    let expected = Runner::Cpu.run(case).expect("a valid case");
    let mut served = Vec::new();
    for &dispatch in dispatches {
        match runner(dispatch).run(case) {
            Ok(outcome) => {
                let mut named = case.clone();
                named.name = format!("{} by {dispatch:?}", case.name);
                assert_same(&named, &outcome, &expected);
                served.extend(dispatch.path);
            }
            Err(Error::Path { .. }) if dispatch.path.is_some_and(|path| path != Path::Elements) => {
            }
            Err(error) => panic!("{error} by {dispatch:?} in {}", case.name),
        }
    }
    served.dedup();
    served
}
