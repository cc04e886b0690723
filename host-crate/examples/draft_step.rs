//! Draft steps of a DFlash-like block drafter with a paged KV pool, step by step.
//!
//! Before the drafter can propose its next block of tokens, the K and V rows of the tokens that the
//! target model has just accepted must be in the drafter's KV pool, in all of its layers. An engine
//! does this in every step:
//!
//! 1. the tokens that were accepted extend the context: each gets a position, and a slot in a page
//!    of the sequence (a new page whenever the last one is full);
//! 2. one matrix product projects the target's hidden states of these tokens to `kv`, K and V of all
//!    draft layers side by side (random numbers stand in for it here);
//! 3. one call, [`Plan::paged`] and [`Plan::run`], does RMSNorm and RoPE on K and writes K and V of
//!    all layers into their slots;
//! 4. attention reads the pages.
//!
//! The batch has a fixed size, as in a captured graph: rows after the accepted tokens are padding
//! and have slot -1.
//!
//! At the end every row of the context is fetched from the pool, through the sequence's pages, and
//! compared with what the workspace path, [`Plan::new`], gives for the same tokens.
//!
//! ```text
//! cargo run --example draft_step                        # on the CPU
//! cargo run --example draft_step --features cuda        # on the first GPU, where there is one
//! ```

use std::error::Error;

use fused_kv::half::bf16;
use fused_kv::{
    Config, DType, Device, F8E4M3Fn, Inputs, NormWeight, Output, Outputs, Plan, PoolTarget,
    RopeStyle, TensorView, TensorViewMut, dequantize,
};

/// The drafter: layers, KV heads, elements of a head.
const LAYERS: usize = 5;
const HEADS: usize = 8;
const DIM: usize = 128;
/// The pool: pages of tokens.
const PAGES: usize = 32;
const PAGE: usize = 16;
/// Rows of every call.
const BATCH: usize = 24;
/// Tokens accepted in each step: the prompt's tail, then what verification let through.
const ACCEPTED: [usize; 6] = [23, 4, 7, 1, 16, 5];
/// Rows of the RoPE table: the longest context.
const MAX_CONTEXT: usize = 128;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let device = device();
    for dtype in [DType::Bf16, DType::F8E4M3Fn] {
        println!("{LAYERS} layers, {HEADS} heads of {DIM}, pool of {dtype} on {device}");
        draft(device, dtype)?;
    }
    Ok(())
}

fn draft(device: Device, dtype: DType) -> Result<()> {
    let mut random = Random(7);
    let config = Config {
        num_kv_heads: HEADS,
        head_dim: DIM,
        rotary_dim: DIM,
        rope_style: RopeStyle::Neox,
        norm_weight: NormWeight::Plain,
    };

    // What the drafter keeps: weights, table, pool. K of all layers is one tensor, and so is V:
    // [layers, pages, tokens of a page, heads, elements].
    let weights = Memory::new(device, &random.bf16s(LAYERS * DIM, 1.0, 0.1))?;
    let eps = Memory::new(device, &[1e-6f32; LAYERS].map(f32::to_le_bytes).concat())?;
    let table = Memory::new(device, &rope_table())?;
    let pool_shape = [LAYERS, PAGES, PAGE, HEADS, DIM];
    let pool_bytes = pool_shape.iter().product::<usize>() * dtype.size();
    let mut k_pool = Memory::new(device, &vec![0; pool_bytes])?;
    let mut v_pool = Memory::new(device, &vec![0; pool_bytes])?;
    // FP8 rows are divided by these when they are stored, and attention multiplies with them.
    let descales = [[0.02f32; LAYERS], [0.03f32; LAYERS]];

    // What the engine knows of the sequence: its pages, in the order of its tokens.
    let mut free_pages: Vec<usize> = (0..PAGES).rev().step_by(3).collect();
    let mut pages: Vec<usize> = Vec::new();
    let mut context = 0;
    // For the comparison at the end: every token's row of kv.
    let mut history: Vec<u8> = Vec::new();

    for accepted in ACCEPTED {
        // 1. Positions and slots. Padding rows have slot -1: their position is not looked at.
        let mut positions = [i64::MAX; BATCH];
        let mut slots = [-1i64; BATCH];
        for row in 0..accepted {
            let position = context + row;
            if position.is_multiple_of(PAGE) {
                pages.push(free_pages.pop().ok_or("the pool is full")?);
            }
            positions[row] = position as i64;
            slots[row] = (pages[position / PAGE] * PAGE + position % PAGE) as i64;
        }
        let positions = Memory::new(device, &positions.map(i64::to_le_bytes).concat())?;
        let slots = Memory::new(device, &slots.map(i64::to_le_bytes).concat())?;

        // 2. The projection; rows of padding hold anything, here NaN.
        let row = LAYERS * 2 * HEADS * DIM;
        let mut projected = random.bf16s(accepted * row, 0.0, 1.0);
        history.extend_from_slice(&projected);
        projected.resize(BATCH * row * 2, 0xff);
        let kv = Memory::new(device, &projected)?;

        // 3. Norm, RoPE and the write into the pages, one launch for all layers.
        let inputs = Inputs {
            kv: kv.view(DType::Bf16, &[BATCH, LAYERS, 2 * HEADS * DIM])?,
            k_norm_weight: weights.view(DType::Bf16, &[LAYERS, DIM])?,
            eps: eps.view(DType::F32, &[LAYERS])?,
            cos_sin_cache: table.view(DType::Bf16, &[MAX_CONTEXT, DIM])?,
            positions: positions.view(DType::I64, &[BATCH])?,
            value_scale: None,
        };
        let mut pool = PoolTarget::paged_nhd(
            k_pool.view_mut(dtype, &pool_shape)?,
            v_pool.view_mut(dtype, &pool_shape)?,
            slots.view(DType::I64, &[BATCH])?,
        );
        if dtype.is_fp8() {
            pool = pool.with_descales(&descales[0], &descales[1]);
        }
        let mut plan = Plan::paged(config, inputs, pool)?;
        plan.run()?;
        // An engine would not wait here: attention follows on the same stream. A bad slot or
        // position is told by `check`.
        plan.check()?;

        // 4. The context has grown; attention would read it now.
        context += accepted;
        println!("  {accepted:2} accepted, context {context:3}, pages {pages:?}");
    }

    // The workspace path for the whole context, for comparison.
    let positions: Vec<u8> = (0..context as i64).flat_map(i64::to_le_bytes).collect();
    let (kv, positions) = (
        Memory::new(device, &history)?,
        Memory::new(device, &positions)?,
    );
    let shape = [LAYERS, context, HEADS, DIM];
    let bytes = shape.iter().product::<usize>() * 2;
    let mut k_out = Memory::new(device, &vec![0; bytes])?;
    let mut v_out = Memory::new(device, &vec![0; bytes])?;
    let mut plan = Plan::new(
        config,
        Inputs {
            kv: kv.view(DType::Bf16, &[context, LAYERS, 2 * HEADS * DIM])?,
            k_norm_weight: weights.view(DType::Bf16, &[LAYERS, DIM])?,
            eps: eps.view(DType::F32, &[LAYERS])?,
            cos_sin_cache: table.view(DType::Bf16, &[MAX_CONTEXT, DIM])?,
            positions: positions.view(DType::I64, &[context])?,
            value_scale: None,
        },
        Outputs {
            k: Output::Into(k_out.view_mut(DType::Bf16, &shape)?),
            v: Output::Into(v_out.view_mut(DType::Bf16, &shape)?),
        },
    )?;
    plan.run()?;
    plan.check()?;
    drop(plan);

    for (name, pool, workspace, descales) in [
        ("K", &k_pool, &k_out.bytes()?, descales[0]),
        ("V", &v_pool, &v_out.bytes()?, descales[1]),
    ] {
        let pool = pool.bytes()?;
        let row = HEADS * DIM;
        let mut worst = 0f32;
        for layer in 0..LAYERS {
            for token in 0..context {
                let slot = pages[token / PAGE] * PAGE + token % PAGE;
                let at = (layer * PAGES * PAGE + slot) * row * dtype.size();
                let stored = &pool[at..at + row * dtype.size()];
                let expected = &workspace[(layer * context + token) * row * 2..][..row * 2];
                if dtype == DType::Bf16 {
                    if stored != expected {
                        return Err(
                            format!("{name} of token {token}, layer {layer} differs").into()
                        );
                    }
                    continue;
                }
                // FP8 has three bits of mantissa: half a unit is a sixteenth.
                let view = TensorView::from_bytes(stored, dtype, &[row])?;
                let values = dequantize(view, descales[layer])?;
                let expected = TensorView::from_bytes(expected, DType::Bf16, &[row])?;
                for (found, expected) in values.into_iter().zip(dequantize(expected, 1.0)?) {
                    let smallest = F8E4M3Fn(1).to_f32() * descales[layer];
                    let error = (found - expected).abs() / expected.abs().max(smallest * 16.0);
                    worst = worst.max(error);
                }
            }
        }
        if worst > 1.0 / 15.0 {
            return Err(format!("{name}: relative error {worst}").into());
        }
        match dtype {
            DType::Bf16 => println!("  {name}: {context} tokens as in the workspace, bit for bit"),
            _ => println!("  {name}: {context} tokens, largest relative error {worst:.4}"),
        }
    }
    Ok(())
}

/// `[P, R]`: cosines, then sines, of `position * 10000^(-2i/R)`.
fn rope_table() -> Vec<u8> {
    let mut table = Vec::new();
    for position in 0..MAX_CONTEXT {
        let angle = |i: usize| position as f64 * 10_000f64.powf(-2.0 * i as f64 / DIM as f64);
        let cosines = (0..DIM / 2).map(|i| angle(i).cos());
        let sines = (0..DIM / 2).map(|i| angle(i).sin());
        for value in cosines.chain(sines) {
            table.extend(bf16::from_f64(value).to_le_bytes());
        }
    }
    table
}

/// Numbers for the example.
struct Random(u64);

impl Random {
    /// Numbers around `middle`, as bf16.
    fn bf16s(&mut self, count: usize, middle: f32, spread: f32) -> Vec<u8> {
        let mut next = || {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..count)
            .flat_map(|_| bf16::from_f32(middle + spread * 1.7 * next()).to_le_bytes())
            .collect()
    }
}

/// The first GPU where this build can use one, else the CPU.
fn device() -> Device {
    #[cfg(feature = "cuda")]
    match fused_kv::cuda::Context::new(0) {
        Ok(_) => return Device::Cuda(0),
        Err(error) => println!("no GPU ({error})"),
    }
    Device::Cpu
}

/// Memory of the device, as an engine's own allocator would give it.
enum Memory {
    Host(Vec<u8>),
    #[cfg(feature = "cuda")]
    Cuda(fused_kv::cuda::DeviceMemory),
}

impl Memory {
    fn new(device: Device, bytes: &[u8]) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Self::Host(bytes.to_vec())),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                let context = fused_kv::cuda::Context::new(ordinal)?;
                let memory = fused_kv::cuda::DeviceMemory::from_bytes(&context, bytes)?;
                Ok(Self::Cuda(memory))
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err("built without the feature cuda".into()),
        }
    }

    fn view(&self, dtype: DType, shape: &[usize]) -> Result<TensorView<'_>> {
        match self {
            Self::Host(bytes) => Ok(TensorView::from_bytes(bytes, dtype, shape)?),
            #[cfg(feature = "cuda")]
            Self::Cuda(memory) => {
                assert_eq!(shape.iter().product::<usize>() * dtype.size(), memory.len());
                let (device, strides) = (Device::Cuda(0), strides(shape));
                // SAFETY: the view covers the memory exactly and borrows it; every plan is checked,
                // which waits for its work, before its memory goes.
                let view = unsafe {
                    TensorView::from_raw_parts(memory.address(), device, dtype, shape, &strides)
                };
                Ok(view?)
            }
        }
    }

    fn view_mut(&mut self, dtype: DType, shape: &[usize]) -> Result<TensorViewMut<'_>> {
        match self {
            Self::Host(bytes) => Ok(TensorViewMut::from_bytes(bytes, dtype, shape)?),
            #[cfg(feature = "cuda")]
            Self::Cuda(memory) => {
                assert_eq!(shape.iter().product::<usize>() * dtype.size(), memory.len());
                let (device, strides) = (Device::Cuda(0), strides(shape));
                // SAFETY: as in `view`; the memory is borrowed mutably.
                let view = unsafe {
                    TensorViewMut::from_raw_parts(memory.address(), device, dtype, shape, &strides)
                };
                Ok(view?)
            }
        }
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        match self {
            Self::Host(bytes) => Ok(bytes.clone()),
            #[cfg(feature = "cuda")]
            Self::Cuda(memory) => {
                let mut bytes = vec![0; memory.len()];
                memory.copy_to(&mut bytes)?;
                Ok(bytes)
            }
        }
    }
}

#[cfg(feature = "cuda")]
fn strides(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1isize; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis] as isize;
    }
    strides
}
