//! Device memory and a stream that belong to another library, as an inference engine has them:
//! nothing but addresses and a `CUstream`. One plan is made, and run for every step.
//!
//! Where the numbers come from: candle and cudarc, `slice.device_ptr(&stream).0` and
//! `stream.cu_stream()`; PyTorch, `tensor.data_ptr()` and
//! `torch.cuda.current_stream().cuda_stream`; CUDA itself, `cuMemAlloc` and `cuStreamCreate`. Here
//! `cust` stands in for the engine.
//!
//! ```sh
//! cargo run --release -p fused-kv --features cuda --example foreign_memory
//! ```

use std::ffi::c_void;

use cust::memory::{CopyDestination, DeviceBuffer};
use cust::stream::{Stream, StreamFlags};
use fused_kv::{
    Config, DType, Device, Error, Inputs, NormWeight, Output, Outputs, Plan, RopeStyle, TensorView,
    TensorViewMut, cuda,
};

const LAYERS: usize = 2;
const HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const TABLE_ROWS: usize = 16;
const STEPS: i32 = 3;

/// A tensor of the engine: device address of the first element, shape, strides in elements.
struct Tensor<'s> {
    address: u64,
    dtype: DType,
    shape: &'s [usize],
    strides: &'s [isize],
}

impl Tensor<'_> {
    /// # Safety
    ///
    /// For `'a`, the memory is live and no one writes it while enqueued work may read it.
    unsafe fn view<'a>(&self) -> Result<TensorView<'a>, Error> {
        // The device is the engine's claim: a plan asks the driver where the memory really is.
        // SAFETY: the caller's promise.
        unsafe {
            TensorView::from_raw_parts(
                self.address,
                Device::Cuda(0),
                self.dtype,
                self.shape,
                self.strides,
            )
        }
    }

    /// # Safety
    ///
    /// For `'a`, the memory is live and no one else uses it while enqueued work may write it.
    unsafe fn view_mut<'a>(&self) -> Result<TensorViewMut<'a>, Error> {
        // SAFETY: the caller's promise.
        unsafe {
            TensorViewMut::from_raw_parts(
                self.address,
                Device::Cuda(0),
                self.dtype,
                self.shape,
                self.strides,
            )
        }
    }
}

/// What an engine's adapter comes to: `[kv, weight, eps, table, positions]` and `[k_out, v_out]`.
///
/// # Safety
///
/// The memory of all tensors is live until the plan is dropped and its work has completed; in
/// between no one but the plan's runs uses the outputs, and no one writes inputs that a run may
/// still read.
unsafe fn plan<'a>(inputs: [Tensor<'_>; 5], outputs: [Tensor<'_>; 2]) -> Result<Plan<'a>, Error> {
    let [kv, weight, eps, table, positions] = inputs;
    let [k, v] = outputs;
    let config = Config {
        num_kv_heads: HEADS,
        head_dim: HEAD_DIM,
        rotary_dim: HEAD_DIM,
        rope_style: RopeStyle::Neox,
        norm_weight: NormWeight::Plain,
    };
    // SAFETY: the caller's promise.
    let (inputs, outputs) = unsafe {
        let inputs = Inputs {
            kv: kv.view()?,
            k_norm_weight: weight.view()?,
            eps: eps.view()?,
            cos_sin_cache: table.view()?,
            positions: positions.view()?,
            value_scale: None,
        };
        let outputs = Outputs {
            k: Output::Into(k.view_mut()?),
            v: Output::Into(v.view_mut()?),
        };
        (inputs, outputs)
    };
    Plan::new(config, inputs, outputs)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let row = 2 * HEADS * HEAD_DIM;
    let _context = cust::quick_init()?;
    let engine_stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;
    let kv = DeviceBuffer::from_slice(&vec![1.0f32; LAYERS * row])?;
    let weight = DeviceBuffer::from_slice(&[1.0f32; LAYERS * HEAD_DIM])?;
    let eps = DeviceBuffer::from_slice(&[1e-6f32; LAYERS])?;
    // Row p turns by p: the first element of K is cos p - sin p.
    let rows = (0..TABLE_ROWS).flat_map(|p| {
        let half = |value: f32| std::iter::repeat_n(value, HEAD_DIM / 2);
        half((p as f32).cos()).chain(half((p as f32).sin()))
    });
    let table = DeviceBuffer::from_slice(&rows.collect::<Vec<_>>())?;
    let mut positions = DeviceBuffer::from_slice(&[0i32])?;
    let k = DeviceBuffer::from_slice(&vec![0.0f32; LAYERS * HEADS * HEAD_DIM])?;
    let v = DeviceBuffer::from_slice(&vec![0.0f32; LAYERS * HEADS * HEAD_DIM])?;

    let tensor = |address, dtype, shape, strides| Tensor {
        address,
        dtype,
        shape,
        strides,
    };
    let (rows, heads) = (row as isize, (HEADS * HEAD_DIM) as isize);
    let dim = HEAD_DIM as isize;
    let kv_strides = [LAYERS as isize * rows, rows, 1];
    let out_shape = [LAYERS, 1, HEADS, HEAD_DIM];
    let out_strides = [heads, heads, dim, 1];
    let address = |buffer: &DeviceBuffer<f32>| buffer.as_device_ptr().as_raw();
    let f32 = DType::F32;
    // SAFETY: the buffers outlive the plan; the engine writes positions only when the stream is
    // idle, and reads the outputs only then.
    let mut plan = unsafe {
        plan(
            [
                tensor(address(&kv), f32, &[1, LAYERS, row], &kv_strides),
                tensor(address(&weight), f32, &[LAYERS, HEAD_DIM], &[dim, 1]),
                tensor(address(&eps), f32, &[LAYERS], &[1]),
                tensor(address(&table), f32, &[TABLE_ROWS, HEAD_DIM], &[dim, 1]),
                tensor(positions.as_device_ptr().as_raw(), DType::I32, &[1], &[1]),
            ],
            [
                tensor(address(&k), f32, &out_shape, &out_strides),
                tensor(address(&v), f32, &out_shape, &out_strides),
            ],
        )
    }?;

    let raw: *mut c_void = engine_stream.as_inner().cast();
    for step in 0..STEPS {
        positions.copy_from(&[step])?;
        // SAFETY: the stream is live, and of the context that the buffers belong to.
        let stream = unsafe { cuda::Stream::from_raw(raw) };
        // Enqueues and returns: nothing is allocated, nothing waits.
        plan.run_on(stream)?;
        // Once in a while is enough: it waits, and tells of positions outside the table.
        plan.check()?;
        let mut result = vec![0.0f32; LAYERS * HEADS * HEAD_DIM];
        k.copy_to(&mut result)?;
        let expected = (step as f32).cos() - (step as f32).sin();
        println!(
            "step {step}: K[0] = {:.4}, expected {expected:.4}",
            result[0]
        );
        if (result[0] - expected).abs() > 1e-5 {
            return Err("wrong result".into());
        }
    }
    Ok(())
}
