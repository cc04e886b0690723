//! Views of `cust`'s device buffers.

use bytemuck::AnyBitPattern;
use cust::memory::{DeviceCopy, DeviceSlice};

use crate::Device;
use crate::dtype::DType;
use crate::error::{Error, ViewError};
use crate::tensor::{Layout, TensorView, TensorViewMut};

use super::driver;

/// The device of a slice of `bytes` bytes at `address`: an empty one has no memory, and is where
/// the calling thread works.
fn device_of(address: u64, bytes: usize) -> Result<Device, Error> {
    if bytes > 0 {
        return Ok(super::resolve_address(address, Device::Cuda(0))?);
    }
    driver::init()?;
    Ok(Device::Cuda(match driver::current_context()?.is_null() {
        true => 0,
        false => driver::current_device()?,
    }))
}

/// Checks that a contiguous tensor of this shape has exactly `bytes` bytes; its strides.
fn check_size(bytes: usize, dtype: DType, shape: &[usize]) -> Result<Vec<isize>, Error> {
    let needed = shape
        .iter()
        .try_fold(1usize, |all, &extent| all.checked_mul(extent))
        .ok_or(Error::View(ViewError::TooLarge))?;
    if needed.checked_mul(dtype.size()) != Some(bytes) {
        let found = bytes / dtype.size();
        return Err(Error::View(ViewError::Length { needed, found }));
    }
    let layout = Layout::contiguous(shape).map_err(Error::View)?;
    Ok(layout.strides().to_vec())
}

macro_rules! views {
    ($view:ident, $slice:ty, $($element:tt)+) => {
        impl<'a> $view<'a> {
            /// A contiguous view of a `cust` device buffer or slice. `half`'s types cannot be
            /// elements of those, so the dtype is given: `u16` storage for bf16 and f16.
            ///
            /// # Errors
            ///
            /// [`Error::View`] when `shape` of `dtype` does not need exactly the slice's bytes; a
            /// failure of the driver.
            pub fn from_device_slice<T: $($element)+>(
                slice: $slice,
                dtype: DType,
                shape: &[usize],
            ) -> Result<Self, Error> {
                let bytes = slice.len() * size_of::<T>();
                let strides = check_size(bytes, dtype, shape)?;
                let address = slice.as_device_ptr().as_raw();
                let device = device_of(address, bytes)?;
                // SAFETY: the slice is borrowed for the view's lifetime, and the view covers it.
                // What a dropped plan left enqueued works on memory of the device alone, that
                // `cuMemFree` waits for before it is another's, and leaves bits that are values.
                unsafe { Self::from_raw_parts(address, device, dtype, shape, &strides) }
            }
        }
    };
}

views!(TensorView, &'a DeviceSlice<T>, DeviceCopy);
// A kernel writes any bits, which are no value of `bool` or `char`, say.
views!(
    TensorViewMut,
    &'a mut DeviceSlice<T>,
    DeviceCopy + AnyBitPattern
);
