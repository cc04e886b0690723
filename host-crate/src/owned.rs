//! Tensors that the library allocated.

use std::alloc;
use std::fmt;

use crate::error::{Argument, Error};
use crate::tensor::{Layout, Raw, TensorView};
use crate::{DType, Device, Element};

/// A contiguous tensor with memory of its own, on the device of the job that it came from.
pub struct OwnedTensor {
    raw: Raw,
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "holds the memory that `raw` points to")
    )]
    memory: Memory,
}

enum Memory {
    /// 8-byte words: aligned for every element type. Never empty, so that each tensor has an
    /// address of its own.
    Host(Vec<u64>),
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::DeviceMemory),
}

impl OwnedTensor {
    /// A contiguous, zeroed tensor; on CUDA in the context of the memory at `near`.
    pub(crate) fn allocate(
        argument: Argument,
        device: Device,
        #[cfg_attr(not(feature = "cuda"), expect(unused_variables))] near: usize,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Self, Error> {
        let limit = isize::MAX as u64;
        let too_large = |found| Error::TooLarge {
            what: "the size of an output in bytes",
            found,
            limit,
        };
        let bytes = shape
            .iter()
            .try_fold(dtype.size() as u64, |all, &extent| {
                all.checked_mul(extent as u64)
            })
            .ok_or(too_large(u64::MAX))?;
        let bytes = usize::try_from(bytes)
            .ok()
            .filter(|&bytes| bytes as u64 <= limit)
            .ok_or(too_large(bytes))?;
        let layout = Layout::contiguous(shape).map_err(Error::View)?;
        let mut memory = match device {
            Device::Cpu => {
                let words = zeroed_words(bytes.div_ceil(8).max(1));
                Memory::Host(words.ok_or(Error::OutOfMemory { argument, bytes })?)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                Memory::Cuda(crate::cuda::DeviceMemory::zeroed_near(device, near, bytes)?)
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => return Err(Error::cuda_not_compiled()),
        };
        let address = match &mut memory {
            Memory::Host(words) => words.as_mut_ptr() as usize,
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.address() as usize,
        };
        let raw = Raw {
            address,
            device,
            dtype,
            layout,
        };
        Ok(Self { raw, memory })
    }

    pub(crate) fn raw(&self) -> &Raw {
        &self.raw
    }

    /// The whole tensor, to be read.
    pub fn view(&self) -> TensorView<'_> {
        TensorView::from_raw(self.raw)
    }

    /// Extent of each dimension.
    pub fn shape(&self) -> &[usize] {
        self.raw.layout.shape()
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.raw.dtype
    }

    /// Where the memory is.
    pub fn device(&self) -> Device {
        self.raw.device
    }

    /// The elements in row-major order; `None` on a CUDA device or when they are of another type.
    pub fn as_slice<T: Element>(&self) -> Option<&[T]> {
        self.view().as_slice()
    }

    /// The bytes in row-major order (of this machine's endianness); `None` on a CUDA device.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        self.view().as_bytes()
    }

    /// The device memory, when that is what it is.
    #[cfg(feature = "cuda")]
    pub fn device_memory(&self) -> Option<&crate::cuda::DeviceMemory> {
        match &self.memory {
            Memory::Host(_) => None,
            Memory::Cuda(memory) => Some(memory),
        }
    }
}

impl fmt::Debug for OwnedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

/// `len` zeros, at least one; untouched pages cost nothing. `None` when there is no memory.
fn zeroed_words(len: usize) -> Option<Vec<u64>> {
    debug_assert!(len > 0);
    let layout = alloc::Layout::array::<u64>(len).ok()?;
    // SAFETY: the size is not zero, since `len` is not.
    let words = unsafe { alloc::alloc_zeroed(layout) }.cast::<u64>();
    if words.is_null() {
        return None;
    }
    // SAFETY: allocated by the global allocator with the layout of `len` u64, all initialized.
    Some(unsafe { Vec::from_raw_parts(words, len, len) })
}
