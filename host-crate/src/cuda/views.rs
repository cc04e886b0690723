//! Views of `cust`'s device buffers.

use cust::memory::{DeviceCopy, DeviceSlice};

use crate::Device;
use crate::dtype::DType;
use crate::error::{Error, ViewError};
use crate::tensor::{Layout, TensorView, TensorViewMut};

/// The ordinal of the device that an address belongs to.
fn device_of(address: u64) -> Result<Device, Error> {
    super::resolve_address(address, Device::Cuda(0)).map_err(Error::Cuda)
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
    ($view:ident, $slice:ty) => {
        impl<'a> $view<'a> {
            /// A contiguous view of a `cust` device buffer or slice. `half`'s types cannot be
            /// elements of those, so the dtype is given: `u16` storage for bf16 and f16.
            ///
            /// # Errors
            ///
            /// [`Error::View`] when `shape` of `dtype` does not need exactly the slice's bytes; a
            /// failure of the driver.
            pub fn from_device_slice<T: DeviceCopy>(
                slice: $slice,
                dtype: DType,
                shape: &[usize],
            ) -> Result<Self, Error> {
                let strides = check_size(slice.len() * size_of::<T>(), dtype, shape)?;
                let address = slice.as_device_ptr().as_raw();
                let device = device_of(address)?;
                // SAFETY: the slice is borrowed for the view's lifetime, and the view covers it.
                unsafe { Self::from_raw_parts(address, device, dtype, shape, &strides) }
            }
        }
    };
}

views!(TensorView, &'a DeviceSlice<T>);
views!(TensorViewMut, &'a mut DeviceSlice<T>);
