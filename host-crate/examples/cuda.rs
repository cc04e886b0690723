//! The job on a GPU, with buffers and a stream of `cust`; the result is compared with the CPU's,
//! which has the same bits.
//!
//! ```sh
//! cargo run --release -p fused-kv --features cuda --example cuda
//! ```

use cust::memory::{CopyDestination, DeviceBuffer};
use cust::stream::{Stream, StreamFlags};
use fused_kv::half::bf16;
use fused_kv::{
    Config, DType, Inputs, NormWeight, Output, Outputs, Plan, RopeStyle, TensorView, TensorViewMut,
};

const TOKENS: usize = 16;
const LAYERS: usize = 5;
const HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const TABLE_ROWS: usize = 512;

const CONFIG: Config = Config {
    num_kv_heads: HEADS,
    head_dim: HEAD_DIM,
    rotary_dim: HEAD_DIM,
    rope_style: RopeStyle::Neox,
    norm_weight: NormWeight::Plain,
};
const KV: [usize; 3] = [TOKENS, LAYERS, 2 * HEADS * HEAD_DIM];
const WEIGHT: [usize; 2] = [LAYERS, HEAD_DIM];
const TABLE: [usize; 2] = [TABLE_ROWS, HEAD_DIM];
const OUT: [usize; 4] = [LAYERS, TOKENS, HEADS, HEAD_DIM];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // cust's buffers hold bf16 as u16.
    let kv: Vec<u16> = (0..KV.iter().product())
        .map(|i: usize| bf16::from_f32((i as f32 * 0.37).sin()).to_bits())
        .collect();
    let weight = vec![bf16::ONE.to_bits(); LAYERS * HEAD_DIM];
    let eps = [1e-6f32; LAYERS];
    let table = rope_table();
    let positions: Vec<i64> = (100..).take(TOKENS).collect();

    let _context = cust::quick_init()?;
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;
    let device_kv = DeviceBuffer::from_slice(&kv)?;
    let device_weight = DeviceBuffer::from_slice(&weight)?;
    let device_eps = DeviceBuffer::from_slice(&eps)?;
    let device_table = DeviceBuffer::from_slice(&table)?;
    let device_positions = DeviceBuffer::from_slice(&positions)?;
    let mut device_k = DeviceBuffer::from_slice(&vec![0u16; OUT.iter().product()])?;

    let inputs = Inputs {
        kv: TensorView::from_device_slice(&device_kv, DType::Bf16, &KV)?,
        k_norm_weight: TensorView::from_device_slice(&device_weight, DType::Bf16, &WEIGHT)?,
        eps: TensorView::from_device_slice(&device_eps, DType::F32, &[LAYERS])?,
        cos_sin_cache: TensorView::from_device_slice(&device_table, DType::F32, &TABLE)?,
        positions: TensorView::from_device_slice(&device_positions, DType::I64, &[TOKENS])?,
        value_scale: None,
    };
    let outputs = Outputs {
        // K into the caller's memory, V into memory of the plan: each as one likes.
        k: Output::Into(TensorViewMut::from_device_slice(
            &mut device_k,
            DType::Bf16,
            &OUT,
        )?),
        v: Output::Allocate,
    };
    let mut plan = Plan::new(CONFIG, inputs, outputs)?;
    plan.run_on((&stream).into())?;
    plan.check()?;
    let (_, v) = plan.into_outputs();

    let mut k_bits = vec![0u16; OUT.iter().product()];
    device_k.copy_to(&mut k_bits)?;
    let v = v.ok_or("the plan allocated V")?;
    let mut v_bytes = vec![0u8; OUT.iter().product::<usize>() * DType::Bf16.size()];
    v.device_memory()
        .ok_or("V is on the device")?
        .copy_to(&mut v_bytes)?;

    // The same on the CPU.
    let kv_bytes: Vec<u8> = kv.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let weight_bytes: Vec<u8> = weight.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let inputs = Inputs {
        kv: TensorView::from_bytes(&kv_bytes, DType::Bf16, &KV)?,
        k_norm_weight: TensorView::from_bytes(&weight_bytes, DType::Bf16, &WEIGHT)?,
        eps: TensorView::from_slice(&eps, &[LAYERS])?,
        cos_sin_cache: TensorView::from_slice(&table, &TABLE)?,
        positions: TensorView::from_slice(&positions, &[TOKENS])?,
        value_scale: None,
    };
    let mut plan = Plan::new(CONFIG, inputs, Outputs::default())?;
    plan.run()?;
    plan.check()?;
    let (cpu_k, cpu_v) = plan.into_outputs();
    let k_bytes: Vec<u8> = k_bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let same = cpu_k.is_some_and(|k| k.as_bytes() == Some(&k_bytes[..]))
        && cpu_v.is_some_and(|v| v.as_bytes() == Some(&v_bytes[..]));
    if !same {
        return Err("the GPU's result differs from the CPU's".into());
    }
    println!(
        "{} elements, the same bits on GPU and CPU",
        2 * k_bits.len()
    );
    Ok(())
}

/// `[P, R]`: cosines, then sines, of base 10000.
fn rope_table() -> Vec<f32> {
    let angle =
        |row: usize, i: usize| row as f64 * 10_000f64.powf(-2.0 * i as f64 / HEAD_DIM as f64);
    let columns =
        |row, of: fn(f64) -> f64| (0..HEAD_DIM / 2).map(move |i| of(angle(row, i)) as f32);
    (0..TABLE_ROWS)
        .flat_map(|row| columns(row, f64::cos).chain(columns(row, f64::sin)))
        .collect()
}
