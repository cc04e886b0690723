//! What is measured.

use fused_kv::cuda::DeviceMemory;
use fused_kv::{Config, DType, Device, Dispatch, Inputs, NormWeight, Output, Outputs, Path, Plan};
use fused_kv::{PoolLayout, PoolTarget, RopeStyle, TensorView, TensorViewMut};
use serde::Serialize;
use serde::ser::SerializeMap;

use crate::gpu::{Gpu, Result};

/// A geometry, a layout and a size.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// Group within the report.
    pub group: &'static str,
    /// What is special about it.
    pub name: String,
    pub tokens: usize,
    pub layers: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub rotary_dim: usize,
    #[serde(serialize_with = "text")]
    pub dtype: DType,
    #[serde(serialize_with = "text")]
    pub table: DType,
    #[serde(serialize_with = "text")]
    pub weight: DType,
    pub interleaved: bool,
    /// Elements between the end of a token's row of kv and the next.
    pub kv_padding: usize,
    /// Tokens of the output workspace beyond those of the job.
    pub spare_capacity: usize,
    /// Elements by which the first element of kv and of both outputs is moved.
    pub shift: usize,
    /// The pool that rows go to, in place of a workspace.
    pub pool: Option<Pool>,
    /// What is forced, in place of the library's choice.
    #[serde(flatten, serialize_with = "forced")]
    pub dispatch: Dispatch,
}

/// A KV pool; tokens go to random slots, each to one of its own.
#[derive(Clone, Debug, Serialize)]
pub struct Pool {
    #[serde(serialize_with = "text")]
    pub dtype: DType,
    /// Pages with their heads before their tokens.
    pub hnd: bool,
    pub page_size: usize,
}

/// Slots of each layer's pool.
pub const SLOTS: usize = 65_536;

fn text<S: serde::Serializer>(
    dtype: &DType,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.name())
}

/// What the program can force; the report looks for these names.
fn forced<S: serde::Serializer>(
    dispatch: &Dispatch,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(None)?;
    map.serialize_entry("path", &dispatch.path.map(Path::name))?;
    map.serialize_entry("threads", &dispatch.threads)?;
    map.serialize_entry("shared_bytes", &dispatch.shared_bytes)?;
    map.serialize_entry("overlap", &dispatch.overlap)?;
    map.serialize_entry("layers_first", &dispatch.layers_first)?;
    map.end()
}

impl Default for Case {
    fn default() -> Self {
        Self {
            group: "headline",
            name: "D = R = 128, bf16".into(),
            tokens: 8192,
            layers: 8,
            heads: 8,
            head_dim: 128,
            rotary_dim: 128,
            dtype: DType::Bf16,
            table: DType::Bf16,
            weight: DType::Bf16,
            interleaved: false,
            kv_padding: 0,
            spare_capacity: 0,
            shift: 0,
            pool: None,
            dispatch: Dispatch::default(),
        }
    }
}

impl Case {
    /// Elements of K (and of V) that the job moves.
    fn elements(&self) -> usize {
        self.tokens * self.layers * self.heads * self.head_dim
    }

    /// Half of the bytes that the job moves: those of kv that it reads, and as many written, or
    /// fewer in a pool of a smaller type. A copy of so many bytes moves as much.
    pub fn kv_bytes(&self) -> usize {
        self.elements() * (self.dtype.size() + self.out_dtype().size())
    }

    /// Type of what is written.
    fn out_dtype(&self) -> DType {
        self.pool.as_ref().map_or(self.dtype, |pool| pool.dtype)
    }

    fn token_stride(&self) -> usize {
        self.layers * 2 * self.heads * self.head_dim + self.kv_padding
    }

    fn capacity(&self) -> usize {
        self.tokens + self.spare_capacity
    }

    fn output_elements(&self) -> usize {
        let tokens = self.pool.as_ref().map_or(self.capacity(), |_| SLOTS);
        self.layers * tokens * self.heads * self.head_dim
    }
}

/// Rows of the RoPE table.
const TABLE_ROWS: usize = 40_960;

/// The inputs that all sets share, and the memory of the sets.
pub struct Memory {
    weight: DeviceMemory,
    eps: DeviceMemory,
    table: DeviceMemory,
    positions: DeviceMemory,
    kv: DeviceMemory,
    /// K and V of each set, one after the other; the K pool and the V pool for all sets.
    out: DeviceMemory,
    /// The slots of each set.
    slots: DeviceMemory,
    kv_step: usize,
    out_step: usize,
    /// Number of sets.
    pub sets: usize,
}

/// Random floats of moderate size: zeros would be faster than data.
fn floats(dtype: DType, bytes: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(7);
    let mut data = Vec::with_capacity(bytes);
    while data.len() < bytes {
        let value = random.f32() * 4.0 - 2.0;
        match dtype {
            DType::Bf16 => data.extend(half::bf16::from_f32(value).to_le_bytes()),
            DType::F16 => data.extend(half::f16::from_f32(value).to_le_bytes()),
            _ => data.extend(value.to_le_bytes()),
        }
    }
    data.truncate(bytes);
    data
}

impl Memory {
    /// Allocates sets of buffers that together exceed `rotate` bytes.
    pub fn new(gpu: &Gpu, case: &Case, rotate: usize, max_sets: usize) -> Result<Self> {
        let size = case.dtype.size();
        // Sets start 256 bytes apart; the shift moves them all.
        let slack = case.shift * size;
        let kv_step = (case.tokens * case.token_stride() * size + slack).next_multiple_of(256);
        let out_bytes = case.output_elements() * case.out_dtype().size();
        let out_step = (out_bytes + slack).next_multiple_of(256);
        // All sets share a pool, which is larger than any cache.
        let (out_sets, set_bytes) = match case.pool {
            None => (usize::MAX, kv_step + 2 * out_step),
            Some(_) => (1, kv_step),
        };
        let sets = rotate.div_ceil(set_bytes).clamp(1, max_sets);
        let mut slots = Vec::new();
        if case.pool.is_some() {
            let mut all: Vec<i64> = (0..SLOTS as i64).collect();
            let mut rng = fastrand::Rng::with_seed(5);
            for _ in 0..sets {
                rng.shuffle(&mut all);
                slots.extend(
                    all[..case.tokens]
                        .iter()
                        .flat_map(|slot| slot.to_le_bytes()),
                );
            }
        }
        let random = floats(case.dtype, 1 << 22);
        let mut positions = Vec::with_capacity(case.tokens * 8);
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..case.tokens {
            positions.extend(rng.i64(0..TABLE_ROWS as i64).to_le_bytes());
        }
        let elements = |count: usize, dtype: DType| floats(dtype, count * dtype.size());
        let eps: Vec<u8> = (0..case.layers)
            .flat_map(|_| 1e-6f32.to_le_bytes())
            .collect();
        Ok(Self {
            weight: DeviceMemory::from_bytes(
                &gpu.context,
                &elements(case.layers * case.head_dim, case.weight),
            )?,
            eps: DeviceMemory::from_bytes(&gpu.context, &eps)?,
            table: DeviceMemory::from_bytes(
                &gpu.context,
                &elements(TABLE_ROWS * case.rotary_dim, case.table),
            )?,
            positions: DeviceMemory::from_bytes(&gpu.context, &positions)?,
            kv: gpu.filled(kv_step * sets, &random)?,
            out: gpu.filled(2 * out_step * sets.min(out_sets), &[0xff; 256])?,
            slots: DeviceMemory::from_bytes(&gpu.context, &slots)?,
            kv_step,
            out_step,
            sets,
        })
    }

    /// The plan of set `set`.
    pub fn plan<'a>(&'a self, case: &Case, set: usize) -> Result<Plan<'a>> {
        let (l, h, d) = (case.layers, case.heads, case.head_dim);
        let device = Device::Cuda(0);
        let shift = (case.shift * case.dtype.size()) as u64;
        let view =
            |memory: &DeviceMemory, offset: u64, dtype, shape: &[usize], strides: &[isize]| {
                // SAFETY: the memory covers the view and lives for `'a`.
                unsafe {
                    TensorView::<'a>::from_raw_parts(
                        memory.address() + offset,
                        device,
                        dtype,
                        shape,
                        strides,
                    )
                }
            };
        let inputs = Inputs {
            kv: view(
                &self.kv,
                (set * self.kv_step) as u64 + shift,
                case.dtype,
                &[case.tokens, l, 2 * h * d],
                &[case.token_stride() as isize, (2 * h * d) as isize, 1],
            )?,
            k_norm_weight: view(&self.weight, 0, case.weight, &[l, d], &[d as isize, 1])?,
            eps: view(&self.eps, 0, DType::F32, &[l], &[1])?,
            cos_sin_cache: view(
                &self.table,
                0,
                case.table,
                &[TABLE_ROWS, case.rotary_dim],
                &[case.rotary_dim as isize, 1],
            )?,
            positions: view(&self.positions, 0, DType::I64, &[case.tokens], &[1])?,
            value_scale: None,
        };
        let config = Config {
            num_kv_heads: h,
            head_dim: d,
            rotary_dim: case.rotary_dim,
            rope_style: if case.interleaved {
                RopeStyle::Interleaved
            } else {
                RopeStyle::Neox
            },
            norm_weight: NormWeight::Plain,
        };
        let mut plan = match &case.pool {
            None => Plan::new(config, inputs, self.workspace(case, set)?)?,
            Some(pool) => Plan::paged(config, inputs, self.pool(case, pool, set)?)?,
        };
        if case.dispatch != Dispatch::default() {
            plan.dispatch(case.dispatch)?;
        }
        Ok(plan)
    }

    /// The workspace of set `set`.
    fn workspace<'a>(&'a self, case: &Case, set: usize) -> Result<Outputs<'a>> {
        let (l, h, d) = (case.layers, case.heads, case.head_dim);
        let shift = (case.shift * case.dtype.size()) as u64;
        let shape = [l, case.tokens, h, d];
        let strides = [
            (case.capacity() * h * d) as isize,
            (h * d) as isize,
            d as isize,
            1,
        ];
        let output = |half: usize| {
            let address = self.out.address() + ((2 * set + half) * self.out_step) as u64 + shift;
            // SAFETY: the memory covers the view and lives for `'a`, and each set is written
            // through its own view only.
            unsafe {
                TensorViewMut::<'a>::from_raw_parts(
                    address,
                    Device::Cuda(0),
                    case.dtype,
                    &shape,
                    &strides,
                )
            }
        };
        Ok(Outputs {
            k: Output::Into(output(0)?),
            v: Output::Into(output(1)?),
        })
    }

    /// The pool, with the slots of set `set`.
    fn pool<'a>(&'a self, case: &Case, pool: &Pool, set: usize) -> Result<PoolTarget<'a>> {
        let (l, h, d, page) = (case.layers, case.heads, case.head_dim, pool.page_size);
        let (layout, shape) = match pool.hnd {
            false => (PoolLayout::PagedNhd, [l, SLOTS / page, page, h, d]),
            true => (PoolLayout::PagedHnd, [l, SLOTS / page, h, page, d]),
        };
        let mut strides = [1isize; 5];
        for axis in (1..5).rev() {
            strides[axis - 1] = strides[axis] * shape[axis] as isize;
        }
        let half = |half: usize| {
            let address = self.out.address() + (half * self.out_step) as u64;
            // SAFETY: the memory covers the view and lives for `'a`. The plans of all sets write
            // it, in the order of one stream.
            unsafe {
                TensorViewMut::<'a>::from_raw_parts(
                    address,
                    Device::Cuda(0),
                    pool.dtype,
                    &shape,
                    &strides,
                )
            }
        };
        let address = self.slots.address() + (set * case.tokens * size_of::<i64>()) as u64;
        // SAFETY: as above; nobody writes the slots.
        let slots = unsafe {
            TensorView::<'a>::from_raw_parts(
                address,
                Device::Cuda(0),
                DType::I64,
                &[case.tokens],
                &[1],
            )
        };
        let target = PoolTarget::new(layout, half(0)?, half(1)?, slots?);
        Ok(match pool.dtype.is_fp8() {
            false => target,
            true => target.with_descales(&vec![0.05; l], &vec![0.05; l]),
        })
    }

    /// Where a copy of the same bytes writes and reads, for set `set`.
    pub fn copy_of(&self, case: &Case, set: usize) -> (u64, u64) {
        let to = match case.pool {
            None => 2 * set * self.out_step,
            // Along the pool, over and over.
            Some(_) => {
                let bytes = case.kv_bytes().next_multiple_of(256);
                set % (2 * self.out_step / bytes) * bytes
            }
        };
        (
            self.out.address() + to as u64,
            self.kv.address() + (set * self.kv_step) as u64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Under the names that the report looks for, beside the case's own.
    #[test]
    fn figures_tell_what_was_forced() {
        let json = |case: Case| serde_json::to_value(case).expect("JSON");
        let free = json(Case::default());
        let forced = json(Case {
            dispatch: Dispatch {
                path: Some(Path::Pairs),
                threads: Some(64),
                shared_bytes: Some(1024),
                overlap: Some(false),
                layers_first: Some(true),
                ..Dispatch::default()
            },
            ..Case::default()
        });
        for (name, value) in [
            ("path", serde_json::json!("pairs")),
            ("threads", 64.into()),
            ("shared_bytes", 1024.into()),
            ("overlap", false.into()),
            ("layers_first", true.into()),
        ] {
            assert_eq!(forced[name], value, "{name}");
            assert!(free[name].is_null() && free.get(name).is_some(), "{name}");
        }
        assert_eq!(forced["tokens"], 8192);
    }
}
