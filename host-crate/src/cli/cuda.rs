//! The CUDA side of the program: devices, and jobs uploaded to them.

use std::path::Path;
use std::time::{Duration, Instant};

use fused_kv::cuda::{self, Context, CudaError, DeviceMemory};
use fused_kv::{DType, Device, Output, Outputs, Plan, TensorView, TensorViewMut};

use super::CliError;
use super::info;
use super::run::{Job, Ran, Target, timed};

/// Whether this device can be used.
pub(crate) fn available(device: u32) -> bool {
    Context::new(device).is_ok()
}

/// Row-major strides of a shape whose size was checked.
fn strides(shape: &[usize]) -> Vec<isize> {
    let mut step = 1usize;
    let mut strides: Vec<isize> = shape
        .iter()
        .rev()
        .map(|&extent| {
            let stride = step as isize;
            step = step.saturating_mul(extent.max(1));
            stride
        })
        .collect();
    strides.reverse();
    strides
}

/// A tensor that is written: name, dtype, shape, memory.
type Written = (&'static str, DType, Vec<usize>, DeviceMemory);

/// Runs on a CUDA device; gives the time of each run, launch to completion.
pub(crate) fn run(
    path: &Path,
    job: &Job,
    target: &mut Target,
    device: u32,
    repeat: u32,
) -> Result<(Ran, Vec<Duration>), CliError> {
    let fail = |source| CliError::Job {
        path: path.to_owned(),
        source,
    };
    let context = Context::new(device)?;
    let memory = job
        .tensors()
        .into_iter()
        .map(|(name, tensor)| Ok((name, DeviceMemory::from_bytes(&context, &tensor.bytes)?)))
        .collect::<Result<Vec<_>, CliError>>()?;
    let outputs = target
        .outputs()
        .map(|(name, tensor)| {
            let memory = DeviceMemory::from_bytes(&context, &tensor.bytes)?;
            Ok((name, tensor.dtype, tensor.shape.clone(), memory))
        })
        .collect::<Result<Vec<Written>, CliError>>()?;
    let slots = match &*target {
        Target::Dense { .. } => None,
        Target::Pool(pool) => Some(DeviceMemory::from_bytes(&context, &pool.slots.bytes)?),
    };
    let inputs = job.inputs(|name, tensor| {
        let address = memory
            .iter()
            .find(|(found, _)| *found == name)
            .map_or(0, |(_, memory)| memory.address());
        // SAFETY: the allocation holds exactly this tensor, outlives the plan (declared before
        // it), and nothing writes it while the plan exists.
        unsafe {
            TensorView::from_raw_parts(
                address,
                Device::Cuda(device),
                tensor.dtype,
                &tensor.shape,
                &strides(&tensor.shape),
            )
        }
        .map_err(|source| CliError::Tensor {
            path: path.to_owned(),
            tensor: name,
            source,
        })
    })?;
    let output = |(_, dtype, shape, memory): &Written| {
        // SAFETY: the allocation holds exactly this tensor, outlives the plan, and is not touched
        // through anything but this view until the plan is gone.
        unsafe {
            TensorViewMut::from_raw_parts(
                memory.address(),
                Device::Cuda(device),
                *dtype,
                shape,
                &strides(shape),
            )
        }
        .map_err(fail)
    };
    let named = |wanted: &str| {
        outputs
            .iter()
            .find(|(name, ..)| *name == wanted)
            .map(output)
            .transpose()
    };
    let mut plan = match (&*target, &slots) {
        (Target::Pool(pool), Some(memory)) => {
            let shape = &pool.slots.shape;
            // SAFETY: as for the inputs.
            let slots = unsafe {
                TensorView::from_raw_parts(
                    memory.address(),
                    Device::Cuda(device),
                    pool.slots.dtype,
                    shape,
                    &strides(shape),
                )
            }
            .map_err(fail)?;
            let pool = pool.target(named("k_pool")?, named("v_pool")?, slots);
            Plan::paged(job.config, inputs, pool)
        }
        _ => {
            let into =
                |name| Ok::<_, CliError>(named(name)?.map_or(Output::Allocate, Output::Into));
            let outputs = Outputs {
                k: into("k_out")?,
                v: into("v_out")?,
            };
            Plan::new(job.config, inputs, outputs)
        }
    }
    .map_err(fail)?;
    let times = timed(repeat, || {
        let start = Instant::now();
        plan.run().map_err(fail)?;
        plan.check().map_err(fail)?;
        Ok(start.elapsed())
    })?;
    drop(plan);
    let results = match target {
        Target::Dense { k, v } => vec![("k_out", k), ("v_out", v)],
        Target::Pool(pool) => [("k_pool", &mut pool.k), ("v_pool", &mut pool.v)]
            .into_iter()
            .filter_map(|(name, tensor)| Some((name, tensor.as_mut()?)))
            .collect(),
    };
    for (name, tensor) in results {
        if let Some((.., memory)) = outputs.iter().find(|(found, ..)| *found == name) {
            memory.copy_to(&mut tensor.bytes)?;
        }
    }
    let device_name = cuda::devices()
        .map_err(fused_kv::Error::from)?
        .into_iter()
        .find(|found| found.ordinal == device)
        .map_or_else(String::new, |found| found.name);
    let ran = Ran::Cuda {
        device,
        device_name,
    };
    Ok((ran, times))
}

/// Driver and devices.
pub(crate) fn info() -> info::Cuda {
    let mut found = info::Cuda {
        compiled_in: true,
        ..info::Cuda::default()
    };
    let mut fill = || -> Result<(), CudaError> {
        let tiers = cuda::ptx_tiers()?;
        found.ptx_tiers = tiers.iter().map(|tier| format!("sm_{tier}")).collect();
        let version = cuda::driver_version()?;
        found.driver = Some(format!("{}.{}", version / 1000, version % 1000 / 10));
        for device in cuda::devices()? {
            let (major, minor) = device.compute_capability;
            found.devices.push(info::Device {
                ordinal: device.ordinal,
                name: device.name,
                compute_capability: format!("{major}.{minor}"),
                memory_bytes: device.memory,
                ptx_tier: device.tier.map(|tier| format!("sm_{tier}")),
            });
        }
        Ok(())
    };
    if let Err(error) = fill() {
        found.unavailable = Some(error.to_string());
    }
    found
}
