//! The CPU backend: parallel over tokens and layers, the same bits as the kernels.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod element;
mod rows;
mod slots;

use std::ops::Range;

use fused_kv_kernels::abi::Status;
use rayon::prelude::*;

use crate::problem::{Problem, Target};
use crate::{DType, Error};

#[cfg(target_arch = "x86_64")]
use element::Avx2;
use element::{Bf16, E4M3, E5M2, F16, F32, Kind, Level, Portable};
pub(crate) use slots::read_slot;
use slots::{Place, Places};

/// Tokens that one task takes at most; their cosines and sines are converted once for all layers.
const MAX_TILE: usize = 32;
/// Room for the table rows of a tile, in elements.
const ANGLES: usize = 4096;
/// Below this many bytes of `kv` a job is done before other threads have woken up.
const SERIAL_BYTES: usize = 64 * 1024;

/// Where streaming begins: beyond what the caches of one core hold.
const STREAM_BYTES: usize = 16 << 20;
/// Bytes of a vector.
const VECTOR: usize = 32;

/// Instruction sets that the row loops are compiled for. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// What the build's target guarantees.
    Portable,
    /// AVX2 and F16C. (Never FMA: a fused product has other bits.)
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Isa {
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            return Self::Avx2;
        }
        Self::Portable
    }
}

/// What a plan keeps for the CPU.
#[derive(Debug)]
pub(crate) struct Runner {
    status: Status,
    isa: Isa,
    /// From this many bytes of output on they are written past the caches.
    stream_bytes: usize,
    places: Places,
}

impl Runner {
    pub(crate) fn new() -> Self {
        Self {
            status: Status::CLEAR,
            isa: Isa::detect(),
            stream_bytes: STREAM_BYTES,
            places: Places::default(),
        }
    }

    /// Chooses the code: an instruction set, which must be there, and where streaming begins.
    #[cfg(test)]
    pub(crate) fn force(&mut self, isa: Isa, stream_bytes: usize) {
        (self.isa, self.stream_bytes) = (isa, stream_bytes);
    }

    /// Computes every row.
    pub(crate) fn run(&mut self, problem: &Problem) {
        let (tokens, layers) = (problem.tokens, problem.layers);
        if tokens == 0 || layers == 0 {
            return;
        }
        let places = match &problem.target {
            Target::Dense { .. } => None,
            Target::Pool(pool) => {
                let (places, status) = self.places.find(problem, pool);
                self.status = merge(self.status, status);
                Some(places)
            }
        };
        let isa = self.isa;
        let threads = rayon::current_num_threads();
        let row_bytes =
            problem.config.num_kv_heads * problem.config.head_dim * 2 * problem.kv.dtype.size();
        let bytes = row_bytes.saturating_mul(tokens).saturating_mul(layers);
        let serial = threads == 1 || bytes <= SERIAL_BYTES;

        let most = (ANGLES / problem.config.rotary_dim).clamp(1, MAX_TILE);
        // Several tasks a thread, so that a slow thread does not hold up the others. Few tokens
        // leave too few tasks: then each layer is a task of its own too.
        let wanted = if serial { 1 } else { threads * 4 };
        let tile = tokens.div_ceil(wanted).min(most);
        let tiles = tokens.div_ceil(tile);
        let groups = if tiles < wanted { layers } else { 1 };
        let group = layers.div_ceil(groups);

        let stream = bytes >= self.stream_bytes && aligned(problem);
        let task = |index: usize| {
            let (tile_index, group_index) = (index / groups, index % groups);
            let first = tile_index * tile;
            let first_layer = group_index * group;
            Task {
                problem,
                tokens: first..tokens.min(first + tile),
                layers: first_layer..layers.min(first_layer + group),
                places,
                stream,
            }
            .run(isa)
        };
        let status = if serial {
            (0..tiles * groups).map(task).fold(Status::CLEAR, merge)
        } else {
            (0..tiles * groups)
                .into_par_iter()
                .map(task)
                .reduce(|| Status::CLEAR, merge)
        };
        self.status = merge(self.status, status);
    }

    /// Address of the status record, for kernels that write it themselves.
    pub(crate) fn status_address(&mut self) -> u64 {
        &raw mut self.status as u64
    }

    /// Reports and clears what the rows told.
    pub(crate) fn check(&mut self, problem: &Problem) -> Result<(), Error> {
        problem.report(&std::mem::replace(&mut self.status, Status::CLEAR))
    }
}

/// Whether every head of the target, and each half of its rotated part, starts at a multiple of
/// [`VECTOR`].
fn aligned(problem: &Problem) -> bool {
    let Target::Dense { k, v } = &problem.target else {
        // A pool is read again soon.
        return false;
    };
    let whole = |elements: usize| (elements * k.dtype.size()).is_multiple_of(VECTOR);
    whole(problem.config.head_dim)
        && whole(problem.config.rotary_dim / 2)
        && [k, v].iter().all(|operand| {
            operand.address.is_multiple_of(VECTOR)
                && operand
                    .strides
                    .iter()
                    .all(|stride| stride % VECTOR as i64 == 0)
        })
}

fn merge(a: Status, b: Status) -> Status {
    Status {
        bad_positions: a.bad_positions + b.bad_positions,
        position_high: a.position_high.min(b.position_high),
        position_low: a.position_low.min(b.position_low),
        bad_slots: a.bad_slots + b.bad_slots,
        slot_high: a.slot_high.min(b.slot_high),
        slot_low: a.slot_low.min(b.slot_low),
    }
}

/// A block of tokens and layers.
struct Task<'p> {
    problem: &'p Problem,
    tokens: Range<usize>,
    layers: Range<usize>,
    /// Where each token of the job goes, if that is a pool.
    places: Option<&'p [Place]>,
    /// Write past the caches: the results would push out everything else, and be gone themselves
    /// before anyone reads them. Only where [`aligned`].
    stream: bool,
}

impl Task<'_> {
    fn run(&self, isa: Isa) -> Status {
        // SAFETY: `Isa::Avx2` is only made where AVX2 and F16C were detected, and the portable
        // loops need nothing. The types are those of the problem. A `Problem` names only memory
        // that was checked to exist and that its plan holds borrowed; tasks write disjoint rows.
        unsafe {
            match isa {
                Isa::Portable => self.run_typed::<Portable>(),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => self.run_typed::<Avx2>(),
            }
        }
    }

    /// # Safety
    ///
    /// As [`rows::rows`].
    unsafe fn run_typed<L: Level>(&self) -> Status {
        // SAFETY: passed on.
        unsafe {
            match self.problem.kv.dtype {
                DType::Bf16 => self.run_from::<L, Bf16>(),
                DType::F16 => self.run_from::<L, F16>(),
                _ => self.run_from::<L, F32>(),
            }
        }
    }

    /// # Safety
    ///
    /// As [`rows::rows`].
    unsafe fn run_from<L: Level, In: Kind>(&self) -> Status {
        let Target::Pool(pool) = &self.problem.target else {
            // SAFETY: passed on; dense outputs have the type of `kv`.
            return unsafe { L::rows::<In, In>(self) };
        };
        // SAFETY: passed on.
        unsafe {
            match pool.dtype {
                DType::Bf16 => L::rows::<In, Bf16>(self),
                DType::F16 => L::rows::<In, F16>(self),
                DType::F8E4M3Fn => L::rows::<In, E4M3>(self),
                DType::F8E5M2 => L::rows::<In, E5M2>(self),
                _ => L::rows::<In, F32>(self),
            }
        }
    }
}

#[cfg(test)]
mod tests;
