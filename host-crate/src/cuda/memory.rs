//! Owned device memory, for callers that have no allocator of their own and for outputs that a
//! plan allocates.

use std::sync::Arc;

use super::context::{Context, State};
use super::{CudaError, driver};
use crate::{Device, Error};

/// Device memory that is freed when dropped, in the context it came from.
#[derive(Debug)]
pub struct DeviceMemory {
    state: Arc<State>,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Zeroed memory in the context of the memory at `address` on `device`.
    pub(crate) fn zeroed_near(device: Device, address: usize, bytes: usize) -> Result<Self, Error> {
        let state = super::state_near(device, address)?;
        Self::zeroed(&Context { state }, bytes)
    }

    /// Memory with unspecified contents.
    fn uninitialized(state: &Arc<State>, bytes: usize) -> Result<Self, CudaError> {
        let _bound = state.bind()?;
        // The driver refuses to allocate nothing; every tensor has an address of its own.
        let address = driver::allocate(bytes.max(1))?;
        Ok(Self {
            state: state.clone(),
            address,
            bytes,
        })
    }

    /// `bytes` zero bytes.
    ///
    /// # Errors
    ///
    /// A failure of the driver, out of memory first of all.
    pub fn zeroed(context: &Context, bytes: usize) -> Result<Self, Error> {
        let memory = Self::uninitialized(&context.state, bytes)?;
        let _bound = context.state.bind()?;
        // SAFETY: the memory was just allocated with this size.
        unsafe { driver::fill(memory.address, 0, bytes.max(1)) }?;
        Ok(memory)
    }

    /// A copy of `data`.
    ///
    /// # Errors
    ///
    /// A failure of the driver, out of memory first of all.
    pub fn from_bytes(context: &Context, data: &[u8]) -> Result<Self, Error> {
        let mut memory = Self::uninitialized(&context.state, data.len())?;
        memory.copy_from(data)?;
        Ok(memory)
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    fn fits(&self, bytes: usize) -> Result<(), CudaError> {
        if bytes == self.bytes {
            Ok(())
        } else {
            Err(CudaError::CopySize {
                found: bytes,
                expected: self.bytes,
            })
        }
    }

    /// Copies `data` to the device and waits for it.
    ///
    /// # Errors
    ///
    /// [`CudaError::CopySize`] when `data` has another size than the memory; a driver failure.
    pub fn copy_from(&mut self, data: &[u8]) -> Result<(), Error> {
        self.fits(data.len())?;
        let _bound = self.state.bind()?;
        // SAFETY: the memory has this size.
        Ok(unsafe { driver::copy_to_device(self.address, data) }?)
    }

    /// Copies from the device, behind all work of the context, and waits for it.
    ///
    /// # Errors
    ///
    /// [`CudaError::CopySize`] when `data` has another size than the memory; a driver failure.
    pub fn copy_to(&self, data: &mut [u8]) -> Result<(), Error> {
        self.fits(data.len())?;
        let _bound = self.state.bind()?;
        driver::synchronize()?;
        // SAFETY: the memory has this size.
        Ok(unsafe { driver::copy_to_host(data, self.address) }?)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(_bound) = self.state.bind() {
            // SAFETY: allocated in this context, not used again. Freeing waits for running work.
            unsafe { driver::free(self.address) };
        }
    }
}
