//! The CUDA backend: embedded PTX, loaded through the driver, launched on the caller's stream.
//!
//! Contexts, streams and buffers interoperate with `cust`; tensors of any other allocator come in
//! as raw device pointers ([`TensorView::from_raw_parts`](crate::TensorView::from_raw_parts)).

mod context;
mod driver;
mod error;
mod memory;
mod ptx;
mod runner;
mod stream;
mod views;

pub use context::Context;
pub use error::CudaError;
pub use memory::DeviceMemory;
pub use ptx::{PTX_FOLDER_VARIABLE, set_ptx_folder};
pub(crate) use runner::{Runner, state_near};
pub use stream::Stream;

use crate::tensor::Raw;
use crate::{Device, Error};
use driver::{DriverDevice, Pointer};

/// A CUDA device, for information.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its ordinal.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Bytes of device memory.
    pub memory: u64,
    /// The PTX tier that this device gets, 10 * major + minor; `None` where it is too old.
    pub tier: Option<u32>,
}

/// The CUDA devices.
///
/// # Errors
///
/// A failure of the driver; no device at all is one, too.
pub fn devices() -> Result<Vec<DeviceInfo>, CudaError> {
    driver::init()?;
    let tiers = ptx_tiers()?;
    (0..driver::device_count()?)
        .map(|ordinal| {
            let device = DriverDevice::new(ordinal)?;
            let (major, minor) = device.compute_capability()?;
            Ok(DeviceInfo {
                ordinal,
                name: device.name()?,
                compute_capability: (major, minor),
                memory: device.memory()?,
                tier: tiers
                    .iter()
                    .copied()
                    .rfind(|tier| *tier <= 10 * major + minor),
            })
        })
        .collect()
}

/// The newest CUDA version that the driver supports, as 1000 * major + 10 * minor.
///
/// # Errors
///
/// A failure of the driver.
pub fn driver_version() -> Result<i32, CudaError> {
    driver::driver_version()
}

/// The architecture tiers of the PTX in use, each as 10 * major + minor, lowest first.
///
/// # Errors
///
/// [`CudaError::PtxFolder`] when a folder was chosen and cannot be used.
pub fn ptx_tiers() -> Result<Vec<u32>, CudaError> {
    ptx::Source::current()?.tiers()
}

/// Where the memory behind a view really is.
pub(crate) fn resolve_device(raw: &Raw) -> Result<Device, Error> {
    // An empty view has no memory to ask about.
    if raw.layout.shape().contains(&0) {
        return Ok(raw.device);
    }
    Ok(resolve_address(raw.address as u64, raw.device)?)
}

/// The allocation that holds `address`, where the driver knows it.
pub(crate) fn allocation(address: u64) -> Result<Option<std::ops::Range<u64>>, Error> {
    driver::init()?;
    Ok(driver::allocation(address).map(|(start, size)| start..start.saturating_add(size)))
}

/// Copies device memory to the host, behind all work of its context.
///
/// # Safety
///
/// `to.len()` bytes from `address` are live memory of `device`, in one allocation.
pub(crate) unsafe fn copy_to_host(
    device: Device,
    address: usize,
    to: &mut [u8],
) -> Result<(), Error> {
    let state = state_near(device, address)?;
    let _bound = state.bind()?;
    driver::synchronize()?;
    // SAFETY: the caller's promise.
    Ok(unsafe { driver::copy_to_host(to, address as u64) }?)
}

/// Where the memory at `address` is; `claimed` is what its owner says.
fn resolve_address(address: u64, claimed: Device) -> Result<Device, CudaError> {
    match driver::pointer(address) {
        // What is borrowed as the host's is worked on before the borrow ends.
        Ok(Pointer::Device { managed: true, .. }) if claimed == Device::Cpu => Ok(Device::Cpu),
        Ok(Pointer::Device { ordinal, .. }) => Ok(Device::Cuda(ordinal)),
        Ok(Pointer::Host | Pointer::Unknown) => Ok(Device::Cpu),
        // A process that never initialized CUDA, or has no driver, has no device memory.
        Err(CudaError::Driver { code, .. })
            if claimed == Device::Cpu
                && matches!(code, driver::NOT_INITIALIZED | driver::STUB_LIBRARY) =>
        {
            Ok(Device::Cpu)
        }
        Err(error) => Err(error),
    }
}
