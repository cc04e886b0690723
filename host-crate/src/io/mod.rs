//! Files of the program: safetensors in, safetensors out.

mod read;
mod write;

use std::collections::TryReserveError;
use std::path::{Path, PathBuf};

use fused_kv::{DType, Shape, TensorView, TensorViewMut};
use safetensors::Dtype;
use thiserror::Error as ThisError;

pub(crate) use read::InputFile;
pub(crate) use write::OutputFile;

/// A contiguous tensor in host memory.
#[derive(Debug)]
pub(crate) struct HostTensor {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// Little-endian elements; exactly as many as `shape` says.
    pub(crate) bytes: Vec<u8>,
}

impl HostTensor {
    /// A tensor of zeros; refused where the memory for it cannot be had.
    pub(crate) fn zeros(dtype: DType, shape: &[usize]) -> Result<Self, TooMuchMemory> {
        let len = shape
            .iter()
            .try_fold(dtype.size(), |all, &extent| all.checked_mul(extent))
            .ok_or(TooMuchMemory { bytes: None })?;
        Ok(Self {
            dtype,
            shape: shape.to_vec(),
            bytes: zeroed(len)?,
        })
    }

    /// A copy; refused as [`HostTensor::zeros`] is.
    pub(crate) fn try_clone(&self) -> Result<Self, TooMuchMemory> {
        let mut bytes = reserved(self.bytes.len())?;
        bytes.extend_from_slice(&self.bytes);
        Ok(Self {
            dtype: self.dtype,
            shape: self.shape.clone(),
            bytes,
        })
    }

    pub(crate) fn elements(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    pub(crate) fn view(&self) -> Result<TensorView<'_>, fused_kv::Error> {
        TensorView::from_bytes(&self.bytes, self.dtype, &self.shape)
    }

    pub(crate) fn view_mut(&mut self) -> Result<TensorViewMut<'_>, fused_kv::Error> {
        TensorViewMut::from_bytes(&mut self.bytes, self.dtype, &self.shape)
    }

    /// For messages: `(37, 3, 1024) bfloat16`.
    pub(crate) fn describe(&self) -> String {
        format!("{} {}", Shape(self.shape.clone()), self.dtype)
    }
}

/// Memory that cannot be had.
#[derive(Debug, ThisError)]
#[error("not enough memory: {} needed", match bytes {
    Some(bytes) => format!("{bytes} bytes"),
    None => "more bytes than 64 bits can count".to_owned(),
})]
pub(crate) struct TooMuchMemory {
    bytes: Option<usize>,
}

/// Room for `len` bytes, without ending the process where the allocator refuses.
fn reserved(len: usize) -> Result<Vec<u8>, TooMuchMemory> {
    let mut bytes = Vec::new();
    bytes
        .try_reserve_exact(len)
        .map_err(|_: TryReserveError| TooMuchMemory { bytes: Some(len) })?;
    Ok(bytes)
}

/// `len` zero bytes, likewise.
pub(crate) fn zeroed(len: usize) -> Result<Vec<u8>, TooMuchMemory> {
    let mut bytes = reserved(len)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// A file that cannot be read, is not what it should be, or cannot be written.
#[derive(Debug, ThisError)]
#[error("{}: {fault}", path.display())]
pub(crate) struct FileError {
    pub(crate) path: PathBuf,
    #[source]
    pub(crate) fault: FileFault,
}

impl FileError {
    fn new(path: &Path, fault: FileFault) -> Self {
        Self {
            path: path.to_owned(),
            fault,
        }
    }
}

/// What is wrong with a file.
#[derive(Debug, ThisError)]
pub(crate) enum FileFault {
    #[error("cannot open: {0}")]
    Open(std::io::Error),
    #[error("is {0}, expected a regular file")]
    Kind(&'static str),
    #[error("cannot read: {0}")]
    Read(std::io::Error),
    #[error("is no safetensors file: {len} bytes, expected at least 8")]
    TooShort { len: u64 },
    #[error("is truncated or no safetensors file: header of {header} bytes in a file of {len}")]
    HeaderTruncated { header: u64, len: u64 },
    #[error("is no safetensors file: header of {header} bytes, the limit is {limit}")]
    HeaderTooLarge { header: u64, limit: u64 },
    #[error("invalid safetensors header: {0}")]
    Header(serde_json::Error),
    #[error("is truncated: {found} bytes, the header describes {expected}")]
    Truncated { found: u64, expected: u64 },
    #[error("is oversized: {found} bytes, the header describes {expected}")]
    Oversized { found: u64, expected: u64 },
    #[error("the header describes more bytes than 64 bits can count")]
    Overflow,
    #[error("tensor {name} is missing")]
    MissingTensor { name: &'static str },
    #[error(
        "tensor {name} has dtype {found}, expected one of BF16, F16, F32, F8_E4M3, F8_E5M2, I32, I64"
    )]
    TensorDtype { name: &'static str, found: Dtype },
    #[error("tensor {name}: {fault}")]
    TensorMemory {
        name: &'static str,
        fault: TooMuchMemory,
    },
    #[error("metadata {key} is {found:?}, expected {expected}")]
    Metadata {
        key: &'static str,
        found: String,
        expected: &'static str,
    },
    #[error("cannot write: {0}")]
    Write(std::io::Error),
    #[error("cannot write: the file is read-only")]
    ReadOnly,
}

/// The type of the library for one of the file format.
fn dtype_from_file(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::BF16 => DType::Bf16,
        Dtype::F16 => DType::F16,
        Dtype::F32 => DType::F32,
        // The file format's `F8_E4M3` is the variant without infinities.
        Dtype::F8_E4M3 => DType::F8E4M3Fn,
        Dtype::F8_E5M2 => DType::F8E5M2,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        _ => return None,
    })
}

/// The type of the file format for one of the library; `None` for types that it has no name for.
fn dtype_to_file(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::F32 => Dtype::F32,
        DType::F8E4M3Fn => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        _ => return None,
    })
}

/// Watches bytes go by, for a progress bar.
pub(crate) trait Watch {
    /// `bytes` more were read or written.
    fn advance(&self, bytes: u64);
}

impl<F: Fn(u64)> Watch for F {
    fn advance(&self, bytes: u64) {
        self(bytes);
    }
}

/// Bytes moved between two calls of [`Watch::advance`].
const PIECE: usize = 8 << 20;

/// What kind of thing a path is that is no regular file.
fn kind_of(kind: std::fs::FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else {
        "a special file"
    }
}
