//! What can go wrong on the CUDA side.

use thiserror::Error as ThisError;

/// A failure of the CUDA driver, of a device, or of the PTX for it.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum CudaError {
    /// A driver call failed.
    #[error("{call} failed: {name} ({code}): {text}.")]
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's result code (`CUresult`), as it came.
        code: i32,
        /// Its name, for example `CUDA_ERROR_OUT_OF_MEMORY`.
        name: String,
        /// The driver's description.
        text: String,
    },

    /// The driver did not take the PTX. Code 222 means that its version is newer than the driver.
    #[error(
        "Loading PTX failed: {name} ({code}). Compiler errors: {error_log:?}, notes: {info_log:?}."
    )]
    Load {
        /// The driver's result code.
        code: i32,
        /// Its name.
        name: String,
        /// The error log of the driver's compiler.
        error_log: String,
        /// Its information log.
        info_log: String,
    },

    /// No PTX for a device this old.
    #[error(
        "No PTX for cuda:{ordinal}: its compute capability is {}.{}, the lowest supported is {}.{}.",
        found / 10, found % 10, lowest / 10, lowest % 10
    )]
    UnsupportedDevice {
        /// The device.
        ordinal: u32,
        /// 10 * major + minor of its compute capability.
        found: u32,
        /// The same of the lowest architecture tier.
        lowest: u32,
    },

    /// A PTX folder that cannot be used.
    #[error("Invalid PTX folder {path}: {reason}.")]
    PtxFolder {
        /// The folder.
        path: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A device that does not exist.
    #[error("No CUDA device {ordinal}: {count} found.")]
    NoDevice {
        /// The ordinal asked for.
        ordinal: u32,
        /// Devices that there are.
        count: u32,
    },

    /// Memory of the wrong size for a copy.
    #[error("A copy of {found} bytes does not fit device memory of {expected} bytes.")]
    CopySize {
        /// Bytes on the host side.
        found: usize,
        /// Bytes of the device memory.
        expected: usize,
    },
}

impl CudaError {
    pub(super) fn driver(call: &'static str, code: i32) -> Self {
        let (name, text) = super::driver::describe(code);
        Self::Driver {
            call,
            code,
            name,
            text,
        }
    }
}
