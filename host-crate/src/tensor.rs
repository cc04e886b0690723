//! Borrowed, typed, strided views of tensors in host or device memory.

use std::fmt;
use std::marker::PhantomData;

use crate::dtype::{DType, Element};
use crate::error::{Argument, ViewError};
use crate::footprint::is_injective;
use crate::{Device, Error};

/// The largest number of dimensions a view can have.
pub const MAX_RANK: usize = 6;

/// Shape and strides of a view, without allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [isize; MAX_RANK],
}

impl Layout {
    /// Row-major (contiguous) layout of `shape`.
    pub(crate) fn contiguous(shape: &[usize]) -> Result<Self, ViewError> {
        let mut strides = [0isize; MAX_RANK];
        if shape.len() > MAX_RANK {
            return Err(ViewError::Rank { found: shape.len() });
        }
        let mut step = 1usize;
        for (axis, &extent) in shape.iter().enumerate().rev() {
            strides[axis] = isize::try_from(step).map_err(|_| ViewError::TooLarge)?;
            step = step.checked_mul(extent.max(1)).ok_or(ViewError::TooLarge)?;
        }
        Self::strided(shape, &strides[..shape.len()])
    }

    fn strided(shape: &[usize], strides: &[isize]) -> Result<Self, ViewError> {
        if shape.len() > MAX_RANK {
            return Err(ViewError::Rank { found: shape.len() });
        }
        if shape.len() != strides.len() {
            return Err(ViewError::StrideCount {
                shape: shape.len(),
                strides: strides.len(),
            });
        }
        let mut layout = Self {
            rank: shape.len(),
            shape: [1; MAX_RANK],
            strides: [0; MAX_RANK],
        };
        layout.shape[..shape.len()].copy_from_slice(shape);
        layout.strides[..shape.len()].copy_from_slice(strides);
        Ok(layout)
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    pub(crate) fn strides(&self) -> &[isize] {
        &self.strides[..self.rank]
    }

    /// The axes in another order, which must name each axis once.
    fn permuted(&self, order: &[usize]) -> Result<Self, ViewError> {
        let mut permuted = *self;
        for (to, &from) in order.iter().enumerate() {
            if from >= self.rank || order.len() != self.rank || order[..to].contains(&from) {
                return Err(ViewError::Axis {
                    axis: from,
                    rank: self.rank,
                });
            }
            permuted.shape[to] = self.shape[from];
            permuted.strides[to] = self.strides[from];
        }
        if order.len() == self.rank {
            Ok(permuted)
        } else {
            Err(ViewError::Axis {
                axis: order.len(),
                rank: self.rank,
            })
        }
    }

    /// Without one axis, which must be there.
    pub(crate) fn without(&self, axis: usize) -> Self {
        let mut layout = *self;
        layout.rank -= 1;
        layout.shape[axis..].rotate_left(1);
        layout.strides[axis..].rotate_left(1);
        layout.shape[layout.rank..].fill(1);
        layout.strides[layout.rank..].fill(0);
        layout
    }

    /// Number of elements when they follow each other in row-major order, else `None`.
    pub(crate) fn contiguous_len(&self) -> Option<usize> {
        if self.shape().contains(&0) {
            return Some(0);
        }
        let mut len = 1usize;
        for (&extent, &stride) in self.shape().iter().zip(self.strides()).rev() {
            if extent > 1 && usize::try_from(stride) != Ok(len) {
                return None;
            }
            len = len.checked_mul(extent)?;
        }
        Some(len)
    }

    /// Lowest and highest element offset that the view touches, both inclusive; `None` when it
    /// touches nothing. An error when an offset does not fit 64 bits.
    pub(crate) fn span(&self) -> Result<Option<(isize, isize)>, ViewError> {
        if self.shape().contains(&0) {
            return Ok(None);
        }
        let (mut low, mut high) = (0isize, 0isize);
        for (&extent, &stride) in self.shape().iter().zip(self.strides()) {
            let last = isize::try_from(extent - 1)
                .ok()
                .and_then(|last| last.checked_mul(stride))
                .ok_or(ViewError::TooLarge)?;
            let side = if last < 0 { &mut low } else { &mut high };
            *side = side.checked_add(last).ok_or(ViewError::TooLarge)?;
        }
        Ok(Some((low, high)))
    }
}

/// Everything about a view except who may write it.
#[derive(Clone, Copy)]
pub(crate) struct Raw {
    /// Address of element `[0, 0, ...]`: a host address, or a CUDA device address.
    pub(crate) address: usize,
    pub(crate) device: Device,
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
}

impl Raw {
    /// First and one-past-last byte that the view touches; `None` when it touches nothing.
    pub(crate) fn byte_range(&self) -> Result<Option<(usize, usize)>, ViewError> {
        let Some((low, high)) = self.layout.span()? else {
            return Ok(None);
        };
        let size = self.dtype.size() as isize;
        let start = low
            .checked_mul(size)
            .and_then(|low| self.address.checked_add_signed(low));
        let end = high
            .checked_add(1)
            .and_then(|high| high.checked_mul(size))
            .and_then(|high| self.address.checked_add_signed(high));
        start.zip(end).map(Some).ok_or(ViewError::TooLarge)
    }

    /// The part at `index` of `axis`, without that axis; both must be there.
    pub(crate) fn select(&self, axis: usize, index: usize) -> Self {
        // Where other axes are empty this may be any number, and no memory is behind it.
        let step = self.layout.strides[axis].wrapping_mul(self.dtype.size() as isize);
        let offset = step.wrapping_mul(index as isize);
        Self {
            address: self.address.wrapping_add_signed(offset),
            layout: self.layout.without(axis),
            ..*self
        }
    }

    /// A view of `len` elements at `address`, `offset` elements in, checked against `len`.
    fn within(
        address: usize,
        len: usize,
        dtype: DType,
        layout: Layout,
        offset: usize,
    ) -> Result<Self, ViewError> {
        if let Some((low, high)) = layout.span()? {
            let offset = isize::try_from(offset).map_err(|_| ViewError::TooLarge)?;
            let low = offset.checked_add(low).ok_or(ViewError::TooLarge)?;
            let high = offset.checked_add(high).ok_or(ViewError::TooLarge)?;
            if low < 0 || high as usize >= len {
                return Err(ViewError::OutOfBounds {
                    low: low as i64,
                    high: high as i64,
                    len,
                });
            }
        }
        Ok(Self {
            address: address.wrapping_add(offset.wrapping_mul(dtype.size())),
            device: Device::Cpu,
            dtype,
            layout,
        })
    }
}

impl fmt::Debug for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor")
            .field("device", &self.device)
            .field("dtype", &self.dtype)
            .field("shape", &self.layout.shape())
            .field("strides", &self.layout.strides())
            .finish_non_exhaustive()
    }
}

/// A borrowed tensor that is read: an address with dtype, device, shape and strides (in elements).
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub(crate) raw: Raw,
    borrow: PhantomData<&'a [u8]>,
}

/// A borrowed tensor that is written: the mutable sibling of [`TensorView`].
#[derive(Debug)]
pub struct TensorViewMut<'a> {
    pub(crate) raw: Raw,
    borrow: PhantomData<&'a mut [u8]>,
}

macro_rules! view {
    ($view:ident, $slice:ty, $bytes:ty, $as_ptr:ident) => {
        impl<'a> $view<'a> {
            /// A contiguous view of the whole of `data`.
            ///
            /// # Errors
            ///
            /// [`Error::View`] when `shape` does not describe exactly `data.len()` elements.
            pub fn from_slice<T: Element>(data: $slice, shape: &[usize]) -> Result<Self, Error> {
                Self::contiguous(data.$as_ptr() as usize, data.len(), T::DTYPE, shape)
            }

            /// A view of `data` with free strides, in elements; element `[0, 0, ...]` is
            /// `data[offset]`.
            ///
            /// # Errors
            ///
            /// [`Error::View`] when any element of the view would be outside `data`.
            pub fn from_strided<T: Element>(
                data: $slice,
                offset: usize,
                shape: &[usize],
                strides: &[isize],
            ) -> Result<Self, Error> {
                let (address, len) = (data.$as_ptr() as usize, data.len());
                let raw = Layout::strided(shape, strides)
                    .and_then(|layout| Raw::within(address, len, T::DTYPE, layout, offset))
                    .map_err(Error::View)?;
                Ok(Self::from_raw(raw))
            }

            /// A contiguous view of plain bytes (little endian), for example of a file in memory.
            /// Any alignment is accepted.
            ///
            /// # Errors
            ///
            /// [`Error::View`] when `shape` of `dtype` does not need exactly `data.len()` bytes.
            pub fn from_bytes(data: $bytes, dtype: DType, shape: &[usize]) -> Result<Self, Error> {
                if data.len() % dtype.size() != 0 {
                    return Err(Error::View(ViewError::PartialElement {
                        bytes: data.len(),
                        dtype,
                    }));
                }
                Self::contiguous(
                    data.$as_ptr() as usize,
                    data.len() / dtype.size(),
                    dtype,
                    shape,
                )
            }

            /// A view of memory that another allocator owns: host memory or CUDA device memory.
            ///
            /// `address` is that of element `[0, 0, ...]`; strides are in elements. With the
            /// feature `cuda`, a plan asks the driver what the memory behind the address really
            /// is, and believes the driver rather than `device`; only managed memory, which host
            /// and device share, is where `device` says.
            ///
            /// # Safety
            ///
            /// For `'a`, and as long as work enqueued with this view has not completed, every
            /// element of the view lies in one live allocation (for host memory: of this process)
            /// and no one writes it (nor reads it, if the view is mutable) except through views
            /// made under the same condition. A view that names [`Device::Cpu`] is of memory that
            /// the host can access.
            ///
            /// # Errors
            ///
            /// [`Error::View`] when the rank is above [`MAX_RANK`], the numbers of extents and
            /// strides differ, or an address does not fit 64 bits.
            pub unsafe fn from_raw_parts(
                address: u64,
                device: Device,
                dtype: DType,
                shape: &[usize],
                strides: &[isize],
            ) -> Result<Self, Error> {
                let build = || {
                    let raw = Raw {
                        address: address as usize,
                        device,
                        dtype,
                        layout: Layout::strided(shape, strides)?,
                    };
                    raw.byte_range()?;
                    Ok(raw)
                };
                Ok(Self::from_raw(build().map_err(Error::View)?))
            }

            fn contiguous(
                address: usize,
                len: usize,
                dtype: DType,
                shape: &[usize],
            ) -> Result<Self, Error> {
                let build = || {
                    let needed = shape
                        .iter()
                        .try_fold(1usize, |all, &extent| all.checked_mul(extent))
                        .ok_or(ViewError::TooLarge)?;
                    if needed != len {
                        return Err(ViewError::Length { needed, found: len });
                    }
                    Raw::within(address, len, dtype, Layout::contiguous(shape)?, 0)
                };
                Ok(Self::from_raw(build().map_err(Error::View)?))
            }

            pub(crate) fn from_raw(raw: Raw) -> Self {
                Self {
                    raw,
                    borrow: PhantomData,
                }
            }

            /// The same elements with the axes in another order: axis `i` of the result is axis
            /// `order[i]`.
            ///
            /// # Errors
            ///
            /// [`Error::View`] unless `order` names each axis once.
            pub fn permute(self, order: &[usize]) -> Result<Self, Error> {
                let layout = self.raw.layout.permuted(order).map_err(Error::View)?;
                Ok(Self::from_raw(Raw { layout, ..self.raw }))
            }

            /// The views of [`unbind`](Self::unbind).
            fn parts(&self, axis: usize) -> Result<Vec<Self>, ViewError> {
                let rank = self.shape().len();
                let Some(&count) = self.shape().get(axis) else {
                    return Err(ViewError::Axis { axis, rank });
                };
                let mut parts = Vec::new();
                parts
                    .try_reserve_exact(count)
                    .map_err(|_| ViewError::Parts { count })?;
                parts.extend((0..count).map(|index| Self::from_raw(self.raw.select(axis, index))));
                Ok(parts)
            }

            /// Extent of each dimension.
            pub fn shape(&self) -> &[usize] {
                self.raw.layout.shape()
            }

            /// Stride of each dimension, in elements.
            pub fn strides(&self) -> &[isize] {
                self.raw.layout.strides()
            }

            /// Type of the elements.
            pub fn dtype(&self) -> DType {
                self.raw.dtype
            }

            /// The device that the view was made with. (A plan asks the driver again.)
            pub fn device(&self) -> Device {
                self.raw.device
            }

            /// Address of element `[0, 0, ...]`.
            pub fn address(&self) -> u64 {
                self.raw.address as u64
            }
        }
    };
}

view!(TensorView, &'a [T], &'a [u8], as_ptr);
view!(TensorViewMut, &'a mut [T], &'a mut [u8], as_mut_ptr);

impl<'a> TensorView<'a> {
    /// One view for each index of `axis`, without that axis: for example the layers of an
    /// allocation for all layers, or K and V of `[2, ...]`.
    ///
    /// # Errors
    ///
    /// [`Error::View`] when there is no such axis, or no memory for so many views.
    pub fn unbind(self, axis: usize) -> Result<Vec<Self>, Error> {
        self.parts(axis).map_err(Error::View)
    }

    /// The elements as a slice, in row-major order; `None` when they do not follow each other in
    /// host memory, are of another type, or are not aligned for it.
    pub fn as_slice<T: Element>(&self) -> Option<&'a [T]> {
        if self.raw.dtype != T::DTYPE {
            return None;
        }
        let bytes = self.as_bytes()?;
        if bytes.is_empty() {
            return Some(&[]);
        }
        let data = bytes.as_ptr().cast::<T>();
        // SAFETY: as many aligned elements as the bytes hold, and any bits are a value of the
        // sealed element types.
        data.is_aligned()
            .then(|| unsafe { std::slice::from_raw_parts(data, bytes.len() / size_of::<T>()) })
    }

    /// The bytes of the elements, in row-major order; `None` when they do not follow each other in
    /// host memory.
    pub fn as_bytes(&self) -> Option<&'a [u8]> {
        if self.raw.device != Device::Cpu {
            return None;
        }
        let len = self.raw.layout.contiguous_len()? * self.raw.dtype.size();
        if len == 0 {
            return Some(&[]);
        }
        // SAFETY: every constructor makes sure that all elements of a host view are live memory
        // that nobody writes for 'a (directly, or as the condition of `from_raw_parts`); here they
        // are consecutive from the first.
        Some(unsafe { std::slice::from_raw_parts(self.raw.address as *const u8, len) })
    }
}

impl<'a> TensorViewMut<'a> {
    /// One view for each index of `axis`, without that axis: for example the layers of an
    /// allocation for all layers, or K and V of `[2, ...]`.
    ///
    /// # Errors
    ///
    /// [`Error::View`] when there is no such axis, when two elements of the view may be in the same
    /// place (parts that are written have memory of their own), or when there is no memory for so
    /// many views.
    pub fn unbind(self, axis: usize) -> Result<Vec<Self>, Error> {
        let axes = 0..self.shape().len();
        if axes.contains(&axis) && !is_injective(&self.raw).map_err(Error::View)? {
            return Err(Error::View(ViewError::SharedElements));
        }
        self.parts(axis).map_err(Error::View)
    }

    /// A second view of the same memory for a shorter time.
    pub fn reborrow(&mut self) -> TensorViewMut<'_> {
        TensorViewMut::from_raw(self.raw)
    }

    /// The same memory, to be read.
    pub fn as_view(&self) -> TensorView<'_> {
        TensorView::from_raw(self.raw)
    }
}

/// Which output a tensor is, for code that treats both alike.
pub(crate) const OUTPUTS: [Argument; 2] = [Argument::KOut, Argument::VOut];
