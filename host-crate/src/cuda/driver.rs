//! The driver calls of this library, with plain integer results.
//!
//! `cust` folds result codes into a Rust enum from CUDA 11.4: a newer driver's code would be an
//! invalid value. Here a result stays an integer, and an error keeps it.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::CudaError;

pub(super) type RawContext = *mut c_void;
pub(super) type RawModule = *mut c_void;
pub(super) type RawFunction = *mut c_void;
pub(super) type RawStream = *mut c_void;

const SUCCESS: c_int = 0;
pub(super) const INVALID_VALUE: c_int = 1;
pub(super) const NOT_INITIALIZED: c_int = 3;
pub(super) const STUB_LIBRARY: c_int = 34;

// Linked by cust_raw (`libcuda`).
unsafe extern "C" {
    fn cuGetErrorName(error: c_int, name: *mut *const c_char) -> c_int;
    fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> c_int;
    fn cuDriverGetVersion(version: *mut c_int) -> c_int;
    fn cuInit(flags: c_uint) -> c_int;
    fn cuDeviceGetCount(count: *mut c_int) -> c_int;
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int;
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int;
    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: c_int) -> c_int;
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int;
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) -> c_int;
    fn cuDevicePrimaryCtxRetain(context: *mut RawContext, device: c_int) -> c_int;
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int;
    fn cuCtxSetCurrent(context: RawContext) -> c_int;
    fn cuCtxGetCurrent(context: *mut RawContext) -> c_int;
    fn cuCtxPushCurrent_v2(context: RawContext) -> c_int;
    fn cuCtxPopCurrent_v2(context: *mut RawContext) -> c_int;
    fn cuCtxGetDevice(device: *mut c_int) -> c_int;
    fn cuCtxSynchronize() -> c_int;
    fn cuStreamSynchronize(stream: RawStream) -> c_int;
    fn cuPointerGetAttributes(
        count: c_uint,
        attributes: *mut c_int,
        values: *mut *mut c_void,
        pointer: u64,
    ) -> c_int;
    fn cuModuleLoadDataEx(
        module: *mut RawModule,
        image: *const c_void,
        options: c_uint,
        keys: *mut c_int,
        values: *mut *mut c_void,
    ) -> c_int;
    fn cuModuleGetFunction(
        function: *mut RawFunction,
        module: RawModule,
        name: *const c_char,
    ) -> c_int;
    fn cuLaunchKernel(
        function: RawFunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: RawStream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;
    fn cuGetProcAddress(
        name: *const c_char,
        function: *mut *mut c_void,
        version: c_int,
        flags: u64,
    ) -> c_int;
    fn cuFuncSetAttribute(function: RawFunction, attribute: c_int, value: c_int) -> c_int;
    fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize) -> c_int;
    fn cuMemFree_v2(pointer: u64) -> c_int;
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> c_int;
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> c_int;
    fn cuMemsetD8_v2(to: u64, value: u8, bytes: usize) -> c_int;
}

/// The driver's name and text of a result code.
pub(super) fn describe(code: c_int) -> (String, String) {
    let text = |call: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
        let mut pointer = std::ptr::null();
        // SAFETY: the call writes the address of a static string, or fails and writes null.
        let known = unsafe { call(code, &mut pointer) } == SUCCESS && !pointer.is_null();
        known.then(|| {
            // SAFETY: a pointer from a successful call is a static C string.
            unsafe { CStr::from_ptr(pointer) }
                .to_string_lossy()
                .into_owned()
        })
    };
    (
        text(cuGetErrorName).unwrap_or_else(|| format!("CUDA error {code}")),
        text(cuGetErrorString).unwrap_or_else(|| "unknown to this driver".into()),
    )
}

fn result(call: &'static str, code: c_int) -> Result<(), CudaError> {
    match code {
        SUCCESS => Ok(()),
        code => Err(CudaError::driver(call, code)),
    }
}

/// The newest CUDA version that the driver supports, as 1000 * major + 10 * minor.
pub(super) fn driver_version() -> Result<i32, CudaError> {
    let mut version = 0;
    // SAFETY: writes one integer.
    result("cuDriverGetVersion", unsafe {
        cuDriverGetVersion(&mut version)
    })?;
    Ok(version)
}

/// Initializes CUDA in this process.
pub(super) fn init() -> Result<(), CudaError> {
    // SAFETY: may be called any number of times.
    result("cuInit", unsafe { cuInit(0) })
}

/// Number of CUDA devices.
pub(super) fn device_count() -> Result<u32, CudaError> {
    let mut count = 0;
    // SAFETY: writes one integer.
    result("cuDeviceGetCount", unsafe { cuDeviceGetCount(&mut count) })?;
    Ok(count as u32)
}

/// A device of the driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct DriverDevice(c_int);

impl DriverDevice {
    /// The device with this ordinal.
    pub(super) fn new(ordinal: u32) -> Result<Self, CudaError> {
        let mut device = 0;
        // SAFETY: writes one integer.
        result("cuDeviceGet", unsafe {
            cuDeviceGet(&mut device, ordinal as c_int)
        })?;
        Ok(Self(device))
    }

    /// Compute capability, major and minor.
    pub(super) fn compute_capability(self) -> Result<(u32, u32), CudaError> {
        const MAJOR: c_int = 75;
        const MINOR: c_int = 76;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: writes one integer.
            let code = unsafe { cuDeviceGetAttribute(&mut value, attribute, self.0) };
            result("cuDeviceGetAttribute", code)?;
            Ok::<_, CudaError>(value as u32)
        };
        Ok((attribute(MAJOR)?, attribute(MINOR)?))
    }

    pub(super) fn name(self) -> Result<String, CudaError> {
        let mut name = [0u8; 256];
        // SAFETY: writes a C string of at most as many bytes as it is told.
        let code =
            unsafe { cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, self.0) };
        result("cuDeviceGetName", code)?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    /// Bytes of memory.
    pub(super) fn memory(self) -> Result<u64, CudaError> {
        let mut bytes = 0;
        // SAFETY: writes one integer.
        result("cuDeviceTotalMem", unsafe {
            cuDeviceTotalMem_v2(&mut bytes, self.0)
        })?;
        Ok(bytes as u64)
    }

    /// The primary context, which lives until [`release_primary`](Self::release_primary) was
    /// called as often as this.
    pub(super) fn retain_primary(self) -> Result<RawContext, CudaError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        result("cuDevicePrimaryCtxRetain", unsafe {
            cuDevicePrimaryCtxRetain(&mut context, self.0)
        })?;
        Ok(context)
    }

    /// Takes back one [`retain_primary`](Self::retain_primary).
    ///
    /// # Safety
    ///
    /// That call was made, and nobody relies on it.
    pub(super) unsafe fn release_primary(self) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        result("cuDevicePrimaryCtxRelease", unsafe {
            cuDevicePrimaryCtxRelease_v2(self.0)
        })
    }

    /// Retains `context` where it is the primary context of this device.
    pub(super) fn retain_if_primary(self, context: RawContext) -> Result<(), CudaError> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: writes two integers.
        result("cuDevicePrimaryCtxGetState", unsafe {
            cuDevicePrimaryCtxGetState(self.0, &mut flags, &mut active)
        })?;
        if active != 0 && self.retain_primary()? != context {
            // SAFETY: just retained, for nobody.
            unsafe { self.release_primary() }?;
        }
        Ok(())
    }
}

/// Makes a context, or none, current.
///
/// # Safety
///
/// `context` is a live context or null.
pub(super) unsafe fn set_current(context: RawContext) -> Result<(), CudaError> {
    // SAFETY: the caller's promise.
    result("cuCtxSetCurrent", unsafe { cuCtxSetCurrent(context) })
}

/// The calling thread's context; null when it has none.
pub(super) fn current_context() -> Result<RawContext, CudaError> {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes one pointer.
    result("cuCtxGetCurrent", unsafe { cuCtxGetCurrent(&mut context) })?;
    Ok(context)
}

/// The ordinal of the calling thread's context.
pub(super) fn current_device() -> Result<u32, CudaError> {
    let mut device = 0;
    // SAFETY: writes one integer.
    result("cuCtxGetDevice", unsafe { cuCtxGetDevice(&mut device) })?;
    Ok(device as u32)
}

/// A context made current for the lifetime of this value, where it was not.
pub(super) struct Bound {
    pushed: bool,
}

impl Bound {
    /// # Safety
    ///
    /// `context` is a live context.
    pub(super) unsafe fn new(context: RawContext) -> Result<Self, CudaError> {
        let pushed = current_context()? != context;
        if pushed {
            // SAFETY: the caller's promise.
            result("cuCtxPushCurrent", unsafe { cuCtxPushCurrent_v2(context) })?;
        }
        Ok(Self { pushed })
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.pushed {
            let mut context = std::ptr::null_mut();
            // SAFETY: pops what `new` pushed; a failure leaves nothing to be done.
            unsafe { cuCtxPopCurrent_v2(&mut context) };
        }
    }
}

/// Waits for all work of the current context.
pub(super) fn synchronize() -> Result<(), CudaError> {
    // SAFETY: no arguments.
    result("cuCtxSynchronize", unsafe { cuCtxSynchronize() })
}

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pointer {
    /// No memory of the driver's: plain host memory.
    Unknown,
    /// Pinned host memory.
    Host,
    /// Device memory.
    Device {
        ordinal: u32,
        /// Null where the allocation belongs to none.
        context: RawContext,
        /// The host can access it as well.
        managed: bool,
    },
}

/// Asks the driver about an address.
pub(super) fn pointer(address: u64) -> Result<Pointer, CudaError> {
    const CONTEXT: c_int = 1;
    const MEMORY_TYPE: c_int = 2;
    const IS_MANAGED: c_int = 8;
    const DEVICE_ORDINAL: c_int = 9;
    const TYPE_HOST: c_uint = 1;
    const TYPE_DEVICE: c_uint = 2;

    let mut memory_type: c_uint = 0;
    let mut ordinal: c_int = 0;
    let mut context: RawContext = std::ptr::null_mut();
    let mut managed: c_uint = 0;
    let mut attributes = [MEMORY_TYPE, DEVICE_ORDINAL, CONTEXT, IS_MANAGED];
    let mut values: [*mut c_void; 4] = [
        (&raw mut memory_type).cast(),
        (&raw mut ordinal).cast(),
        (&raw mut context).cast(),
        (&raw mut managed).cast(),
    ];
    // SAFETY: four attributes with a place of at least its size for each; any address may be asked
    // about, and one that the driver does not know gives zeros.
    let code =
        unsafe { cuPointerGetAttributes(4, attributes.as_mut_ptr(), values.as_mut_ptr(), address) };
    result("cuPointerGetAttributes", code)?;
    Ok(match memory_type {
        TYPE_HOST => Pointer::Host,
        TYPE_DEVICE => Pointer::Device {
            ordinal: ordinal as u32,
            context,
            // A single byte.
            managed: managed & 0xff != 0,
        },
        _ => Pointer::Unknown,
    })
}

/// First address and size of the allocation at `address`, for memory of `cuMemAlloc`; other kinds
/// (stream-ordered pools, mapped ranges) have no such bounds or others than their owner thinks of.
pub(super) fn allocation(address: u64) -> Option<(u64, u64)> {
    const IS_LEGACY_IPC_CAPABLE: c_int = 10;
    const RANGE_START: c_int = 11;
    const RANGE_SIZE: c_int = 12;

    let mut legacy: c_uint = 0;
    let (mut start, mut size) = (0u64, 0usize);
    let mut attributes = [IS_LEGACY_IPC_CAPABLE, RANGE_START, RANGE_SIZE];
    let mut values: [*mut c_void; 3] = [
        (&raw mut legacy).cast(),
        (&raw mut start).cast(),
        (&raw mut size).cast(),
    ];
    // SAFETY: three attributes with a place of at least its size for each; any address may be
    // asked about, and one that the driver does not know gives zeros.
    let code =
        unsafe { cuPointerGetAttributes(3, attributes.as_mut_ptr(), values.as_mut_ptr(), address) };
    // The first attribute is a single byte.
    (code == SUCCESS && legacy & 0xff == 1).then_some((start, size as u64))
}

/// Compiles PTX in the current context; an error carries the compiler's log.
pub(super) fn load_module(ptx: &CStr) -> Result<RawModule, CudaError> {
    const INFO_LOG: c_int = 3;
    const INFO_LOG_BYTES: c_int = 4;
    const ERROR_LOG: c_int = 5;
    const ERROR_LOG_BYTES: c_int = 6;
    const BYTES: usize = 16 * 1024;

    let mut info = vec![0u8; BYTES];
    let mut error = vec![0u8; BYTES];
    let mut keys = [INFO_LOG, INFO_LOG_BYTES, ERROR_LOG, ERROR_LOG_BYTES];
    let mut values: [*mut c_void; 4] = [
        info.as_mut_ptr().cast(),
        BYTES as *mut c_void,
        error.as_mut_ptr().cast(),
        BYTES as *mut c_void,
    ];
    let mut module = std::ptr::null_mut();
    // SAFETY: the image is a C string, the four options come with values of their kinds, and both
    // buffers have the sizes given.
    let code = unsafe {
        cuModuleLoadDataEx(
            &mut module,
            ptx.as_ptr().cast(),
            keys.len() as c_uint,
            keys.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    if code == SUCCESS {
        return Ok(module);
    }
    let text = |log: &[u8]| {
        let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
        String::from_utf8_lossy(&log[..end]).trim().to_owned()
    };
    let (name, _) = describe(code);
    Err(CudaError::Load {
        code,
        name,
        error_log: text(&error),
        info_log: text(&info),
    })
}

/// A kernel of a module.
///
/// # Safety
///
/// `module` is a live module of the current context.
pub(super) unsafe fn function(module: RawModule, name: &CStr) -> Result<RawFunction, CudaError> {
    let mut function = std::ptr::null_mut();
    // SAFETY: the caller's promise; writes one pointer.
    let code = unsafe { cuModuleGetFunction(&mut function, module, name.as_ptr()) };
    result("cuModuleGetFunction", code)?;
    Ok(function)
}

/// Lets a kernel reserve this much shared memory, which may be more than the default limit.
///
/// # Safety
///
/// `function` belongs to the current context.
pub(super) unsafe fn allow_shared(function: RawFunction, bytes: u32) -> Result<(), CudaError> {
    const MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
    // SAFETY: the caller's promise.
    let code = unsafe { cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, bytes as c_int) };
    result("cuFuncSetAttribute", code)
}

/// Launches a kernel that takes one argument.
///
/// # Safety
///
/// `function` belongs to the current context, takes one `T` by value, and may run on it with this
/// grid; `stream` is live and of the same context.
#[inline]
pub(super) unsafe fn launch<T>(
    function: RawFunction,
    grid: (u32, u32),
    threads: u32,
    shared: u32,
    stream: RawStream,
    argument: &T,
) -> Result<(), CudaError> {
    let mut arguments = [std::ptr::from_ref(argument).cast_mut().cast::<c_void>()];
    // SAFETY: the caller's promise; the driver copies the argument before it returns.
    let code = unsafe {
        cuLaunchKernel(
            function,
            grid.0,
            grid.1,
            1,
            threads,
            1,
            1,
            shared,
            stream,
            arguments.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    };
    result("cuLaunchKernel", code)
}

/// `cuLaunchKernelEx`, which drivers have since CUDA 11.8.
#[derive(Clone, Copy)]
pub(super) struct LaunchEx(LaunchExFunction);

type LaunchExFunction = unsafe extern "C" fn(
    *const LaunchConfig,
    RawFunction,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;

impl std::fmt::Debug for LaunchEx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cuLaunchKernelEx")
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: RawStream,
    attributes: *const LaunchAttribute,
    attribute_count: c_uint,
}

/// `CUlaunchAttribute` with an integer as its value; others are pointers, hence the alignment.
#[repr(C, align(8))]
struct LaunchAttribute {
    id: c_int,
    padding: c_int,
    value: c_int,
    rest: [c_int; 15],
}

/// Address of an entry point that drivers have since CUDA `version`, where this one has it.
fn entry_point(name: &CStr, version: c_int) -> Option<*mut c_void> {
    let mut address = std::ptr::null_mut();
    // SAFETY: the name is a C string; the call writes one pointer.
    let code = unsafe { cuGetProcAddress(name.as_ptr(), &mut address, version, 0) };
    (code == SUCCESS && !address.is_null()).then_some(address)
}

/// What tells a context from an earlier one at the same address: 0 where the driver, older than
/// CUDA 12.0, cannot say.
///
/// # Safety
///
/// `context` is a live context.
pub(super) unsafe fn context_id(context: RawContext) -> Result<u64, CudaError> {
    type GetId = unsafe extern "C" fn(RawContext, *mut u64) -> c_int;
    static FOUND: std::sync::OnceLock<Option<GetId>> = std::sync::OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let address = entry_point(c"cuCtxGetId", 12_000)?;
        // SAFETY: the driver gives the address of the function of this name and signature.
        Some(unsafe { std::mem::transmute::<*mut c_void, GetId>(address) })
    });
    let mut id = 0;
    if let Some(get_id) = found {
        // SAFETY: the caller's promise; the call writes one integer.
        result("cuCtxGetId", unsafe { get_id(context, &mut id) })?;
    }
    Ok(id)
}

impl LaunchEx {
    /// The driver's entry point, where it has one.
    pub(super) fn find() -> Option<Self> {
        let address = entry_point(c"cuLaunchKernelEx", 11_080)?;
        // SAFETY: the driver gives the address of the function of this name and signature.
        Some(Self(unsafe {
            std::mem::transmute::<*mut c_void, LaunchExFunction>(address)
        }))
    }

    /// Launches a kernel that takes one argument and may start before the one in front of it has
    /// ended.
    ///
    /// # Safety
    ///
    /// As for [`launch`]; the kernel waits (`griddepcontrol.wait`) before it loads or stores anything.
    #[inline]
    pub(super) unsafe fn launch_early<T>(
        self,
        function: RawFunction,
        grid: (u32, u32),
        threads: u32,
        shared: u32,
        stream: RawStream,
        argument: &T,
    ) -> Result<(), CudaError> {
        const PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;
        let attribute = LaunchAttribute {
            id: PROGRAMMATIC_STREAM_SERIALIZATION,
            padding: 0,
            value: 1,
            rest: [0; 15],
        };
        let config = LaunchConfig {
            grid: [grid.0, grid.1, 1],
            block: [threads, 1, 1],
            shared,
            stream,
            attributes: &attribute,
            attribute_count: 1,
        };
        let mut arguments = [std::ptr::from_ref(argument).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise; the driver copies everything before it returns.
        let code = unsafe {
            (self.0)(
                &config,
                function,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        result("cuLaunchKernelEx", code)
    }
}

/// Allocates device memory in the current context.
pub(super) fn allocate(bytes: usize) -> Result<u64, CudaError> {
    let mut address = 0;
    // SAFETY: writes one address.
    result("cuMemAlloc", unsafe { cuMemAlloc_v2(&mut address, bytes) })?;
    Ok(address)
}

/// Frees device memory.
///
/// # Safety
///
/// `address` came from [`allocate`] in the current context and is not used again.
pub(super) unsafe fn free(address: u64) {
    // SAFETY: the caller's promise. A failure (the context is gone) leaves nothing to free.
    unsafe { cuMemFree_v2(address) };
}

/// Waits for the null stream.
fn synchronize_null_stream() -> Result<(), CudaError> {
    // SAFETY: the null stream is one of every context.
    result("cuStreamSynchronize", unsafe {
        cuStreamSynchronize(std::ptr::null_mut())
    })
}

/// Copies to the device and waits.
///
/// # Safety
///
/// `to` has `from.len()` bytes of device memory.
pub(super) unsafe fn copy_to_device(to: u64, from: &[u8]) -> Result<(), CudaError> {
    // SAFETY: the caller's promise.
    result("cuMemcpyHtoD", unsafe {
        cuMemcpyHtoD_v2(to, from.as_ptr().cast(), from.len())
    })?;
    // From pageable memory the call returns when the bytes are staged; a stream that does not wait
    // for the null stream could be there before them.
    synchronize_null_stream()
}

/// Copies from the device and waits.
///
/// # Safety
///
/// `from` has `to.len()` bytes of device memory.
pub(super) unsafe fn copy_to_host(to: &mut [u8], from: u64) -> Result<(), CudaError> {
    // SAFETY: the caller's promise.
    result("cuMemcpyDtoH", unsafe {
        cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from, to.len())
    })
}

/// Sets bytes on the device and waits.
///
/// # Safety
///
/// `to` has `bytes` bytes of device memory.
pub(super) unsafe fn fill(to: u64, value: u8, bytes: usize) -> Result<(), CudaError> {
    // SAFETY: the caller's promise.
    result("cuMemsetD8", unsafe { cuMemsetD8_v2(to, value, bytes) })?;
    synchronize_null_stream()
}
