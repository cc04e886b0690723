//! The CUDA side of the program: devices, and jobs uploaded to them.

use std::path::Path;
use std::time::{Duration, Instant};

use cust::device::{Device as CudaDevice, DeviceAttribute};
use cust::{CudaApiVersion, CudaFlags};
use fused_kv::cuda::{Context, DeviceMemory};
use fused_kv::{Device, Output, Outputs, Plan, TensorView, TensorViewMut};

use super::CliError;
use super::info;
use super::run::{Job, Ran, timed};
use crate::io::HostTensor;

/// Whether this device can be used.
pub(crate) fn available(device: u32) -> bool {
    Context::new(device).is_ok()
}

/// A tensor's bytes in device memory. Never empty: a plan asks the driver about every address.
fn upload(context: &Context, tensor: &HostTensor) -> Result<DeviceMemory, CliError> {
    let bytes: &[u8] = match tensor.bytes.as_slice() {
        [] => &[0; 8],
        bytes => bytes,
    };
    Ok(DeviceMemory::from_bytes(context, bytes)?)
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

/// Runs on a CUDA device into `k` and `v`; gives the time of each run, launch to completion.
pub(crate) fn run(
    path: &Path,
    job: &Job,
    k: &mut HostTensor,
    v: &mut HostTensor,
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
        .map(|(name, tensor)| Ok((name, upload(&context, tensor)?)))
        .collect::<Result<Vec<_>, CliError>>()?;
    let (k_memory, v_memory) = (upload(&context, k)?, upload(&context, v)?);
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
    let output = |memory: &DeviceMemory, tensor: &HostTensor| {
        // SAFETY: the allocation holds exactly this tensor, outlives the plan, and is not touched
        // through anything but this view until the plan is gone.
        unsafe {
            TensorViewMut::from_raw_parts(
                memory.address(),
                Device::Cuda(device),
                tensor.dtype,
                &tensor.shape,
                &strides(&tensor.shape),
            )
        }
        .map(Output::Into)
        .map_err(fail)
    };
    let outputs = Outputs {
        k: output(&k_memory, k)?,
        v: output(&v_memory, v)?,
    };
    let mut plan = Plan::new(job.config, inputs, outputs).map_err(fail)?;
    let times = timed(repeat, || {
        let start = Instant::now();
        plan.run().map_err(fail)?;
        plan.check().map_err(fail)?;
        Ok(start.elapsed())
    })?;
    drop(plan);
    for (memory, tensor) in [(&k_memory, k), (&v_memory, v)] {
        if !tensor.bytes.is_empty() {
            memory.copy_to(&mut tensor.bytes)?;
        }
    }
    let device_name = CudaDevice::get_device(device)
        .and_then(|device| device.name())
        .unwrap_or_else(|_| "unknown".to_owned());
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
    let mut fill = || {
        cust::init(CudaFlags::empty())?;
        let version = CudaApiVersion::get()?;
        found.driver = Some(format!("{}.{}", version.major(), version.minor()));
        for (ordinal, device) in (0u32..).zip(CudaDevice::devices()?) {
            let device = device?;
            let capability = [
                DeviceAttribute::ComputeCapabilityMajor,
                DeviceAttribute::ComputeCapabilityMinor,
            ]
            .map(|attribute| device.get_attribute(attribute));
            let [major, minor] = capability;
            found.devices.push(info::Device {
                ordinal,
                name: device.name()?,
                compute_capability: format!("{}.{}", major?, minor?),
                memory_bytes: device.total_memory()? as u64,
            });
        }
        Ok(())
    };
    if let Err(error) = fill() {
        let error: cust::error::CudaError = error;
        found.unavailable = Some(format!("no usable device: {error}"));
    } else if found.devices.is_empty() {
        found.unavailable = Some("no device".to_owned());
    }
    found
}
