//! Tensors that the library allocated.

use std::alloc;
use std::fmt;
use std::ptr::NonNull;

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
    Host(HostMemory),
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
        let memory = match device {
            Device::Cpu => {
                let memory = HostMemory::zeroed(bytes);
                Memory::Host(memory.ok_or(Error::OutOfMemory { argument, bytes })?)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                Memory::Cuda(crate::cuda::DeviceMemory::zeroed_near(device, near, bytes)?)
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => return Err(Error::cuda_not_compiled()),
        };
        let address = match &memory {
            Memory::Host(memory) => memory.data.as_ptr() as usize,
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

/// Host memory that starts at a multiple of a cache line, which suits every element type and lets
/// whole lines be written.
struct HostMemory {
    data: NonNull<u8>,
    allocation: NonNull<u8>,
    layout: alloc::Layout,
}

// SAFETY: the memory belongs to this value alone; what is in it are plain numbers.
unsafe impl Send for HostMemory {}
// SAFETY: as above; nothing is written through a shared reference.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    const LINE: usize = 64;

    /// `bytes` zeros (at least one, so that every tensor has an address of its own). `None` when
    /// there is no memory.
    fn zeroed(bytes: usize) -> Option<Self> {
        // Not by the layout's alignment: beyond that of malloc the zeros would be written at once,
        // where calloc leaves untouched pages to the system.
        let size = bytes.max(1).checked_add(Self::LINE - 1)?;
        let layout = alloc::Layout::from_size_align(size, align_of::<u64>()).ok()?;
        // SAFETY: the size is not zero.
        let allocation = NonNull::new(unsafe { alloc::alloc_zeroed(layout) })?;
        let skip = allocation.align_offset(Self::LINE);
        // SAFETY: at most LINE - 1 bytes in, which the allocation has room for.
        let data = unsafe { allocation.add(skip) };
        Some(Self {
            data,
            allocation,
            layout,
        })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `zeroed`, and freed only here.
        unsafe { alloc::dealloc(self.allocation.as_ptr(), self.layout) };
    }
}
