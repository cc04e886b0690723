//! Streams of any library.

use std::ffi::c_void;
use std::marker::PhantomData;

use super::driver::RawStream;

/// A borrowed CUDA stream (`CUstream`). The null stream, the legacy handle 0x1 and the per-thread
/// handle 0x2 are streams like others.
#[derive(Clone, Copy, Debug)]
pub struct Stream<'s> {
    pub(super) raw: RawStream,
    borrow: PhantomData<&'s ()>,
}

impl Stream<'static> {
    /// The null stream.
    pub const fn null() -> Self {
        Self {
            raw: std::ptr::null_mut(),
            borrow: PhantomData,
        }
    }

    /// The calling thread's default stream (`CU_STREAM_PER_THREAD`).
    pub const fn per_thread() -> Self {
        Self {
            raw: std::ptr::without_provenance_mut(2),
            borrow: PhantomData,
        }
    }
}

impl Stream<'_> {
    /// A stream of another library, for example cudarc's `stream.cu_stream()`.
    ///
    /// # Safety
    ///
    /// `stream` is null, one of the special handles, or a live stream of the context that the
    /// plan's tensors belong to, for as long as this value is used.
    pub const unsafe fn from_raw(stream: *mut c_void) -> Self {
        Self {
            raw: stream,
            borrow: PhantomData,
        }
    }
}

impl<'s> From<&'s cust::stream::Stream> for Stream<'s> {
    fn from(stream: &'s cust::stream::Stream) -> Self {
        Self {
            raw: stream.as_inner().cast(),
            borrow: PhantomData,
        }
    }
}
