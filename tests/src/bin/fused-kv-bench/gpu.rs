//! The device as the measurements need it: a stream, graphs of launches, raw fills and copies.

use std::ffi::c_void;
use std::ptr;

use cust::sys;
use fused_kv::cuda::{Context, DeviceMemory, Stream};

/// A result of this program: what fails here is reported and ends it.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A failed driver call.
fn ok(call: &str, code: sys::CUresult) -> Result<()> {
    if code == sys::cudaError_enum::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(format!("{call} failed: {code:?}").into())
    }
}

/// A context and a stream that can be captured.
pub struct Gpu {
    /// The context.
    pub context: Context,
    stream: sys::CUstream,
    start: sys::CUevent,
    end: sys::CUevent,
}

/// A captured graph, ready to be replayed.
pub struct Graph {
    exec: sys::CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `Gpu::capture`, not used again.
        unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}

impl Gpu {
    /// The first device.
    pub fn new() -> Result<Self> {
        let context = Context::new(0)?;
        let mut gpu = Self {
            context,
            stream: ptr::null_mut(),
            start: ptr::null_mut(),
            end: ptr::null_mut(),
        };
        // SAFETY: a context is current; each call writes one handle. Flag 1 of the stream: it
        // does not wait for the null stream.
        unsafe {
            ok("cuStreamCreate", sys::cuStreamCreate(&mut gpu.stream, 1))?;
            ok("cuEventCreate", sys::cuEventCreate(&mut gpu.start, 0))?;
            ok("cuEventCreate", sys::cuEventCreate(&mut gpu.end, 0))?;
        }
        Ok(gpu)
    }

    /// The stream, for a plan.
    pub fn stream(&self) -> Stream<'_> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { Stream::from_raw(self.stream.cast()) }
    }

    /// Waits for the stream.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the stream is live.
        ok("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.stream)
        })
    }

    /// Captures what `enqueue` enqueues to the stream.
    pub fn capture(&self, enqueue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        let mut graph = ptr::null_mut();
        let mut exec = ptr::null_mut();
        // SAFETY: the stream is live; the handles are written before they are used.
        unsafe {
            ok(
                "cuStreamBeginCapture",
                sys::cuStreamBeginCapture_v2(self.stream, mode),
            )?;
            let enqueued = enqueue();
            ok(
                "cuStreamEndCapture",
                sys::cuStreamEndCapture(self.stream, &mut graph),
            )?;
            enqueued?;
            let code = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
            sys::cuGraphDestroy(graph);
            ok("cuGraphInstantiate", code)?;
        }
        Ok(Graph { exec })
    }

    /// Microseconds of each of `replays` replays, after `warm` unmeasured ones.
    pub fn time(&self, graph: &Graph, warm: usize, replays: usize) -> Result<Vec<f64>> {
        let mut times = Vec::with_capacity(replays);
        for replay in 0..warm + replays {
            let mut milliseconds = 0.0;
            // SAFETY: all handles are live.
            unsafe {
                ok("cuEventRecord", sys::cuEventRecord(self.start, self.stream))?;
                ok("cuGraphLaunch", sys::cuGraphLaunch(graph.exec, self.stream))?;
                ok("cuEventRecord", sys::cuEventRecord(self.end, self.stream))?;
                ok("cuEventSynchronize", sys::cuEventSynchronize(self.end))?;
                let code = sys::cuEventElapsedTime(&mut milliseconds, self.start, self.end);
                ok("cuEventElapsedTime", code)?;
            }
            if replay >= warm {
                times.push(f64::from(milliseconds) * 1e3);
            }
        }
        Ok(times)
    }

    /// Enqueues a device-to-device copy.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: callers copy within their own device memory.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) };
        ok("cuMemcpyDtoDAsync", code)
    }

    /// Device memory filled with repetitions of `pattern`.
    pub fn filled(&self, bytes: usize, pattern: &[u8]) -> Result<DeviceMemory> {
        let memory = DeviceMemory::zeroed(&self.context, bytes)?;
        let mut done = bytes.min(pattern.len());
        // SAFETY: both ranges lie within the memory.
        unsafe {
            let first = sys::cuMemcpyHtoD_v2(memory.address(), pattern.as_ptr().cast(), done);
            ok("cuMemcpyHtoD", first)?;
            while done < bytes {
                let step = done.min(bytes - done);
                let to = memory.address() + done as u64;
                ok(
                    "cuMemcpyDtoD",
                    sys::cuMemcpyDtoD_v2(to, memory.address(), step),
                )?;
                done += step;
            }
        }
        Ok(memory)
    }
}

/// A copy kernel, the other measure of what the memory can do: 16 bytes a load, four loads in
/// flight a thread, streaming stores.
const COPY: &str = "
.version 7.8
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 to, .param .u64 from, .param .u32 units)
{
    .reg .pred %p<4>;
    .reg .u32 %r<24>;
    .reg .u64 %d<12>;
    mov.u32 %r0, %ctaid.x;
    shl.b32 %r0, %r0, 10;
    mov.u32 %r1, %tid.x;
    add.u32 %r0, %r0, %r1;
    ld.param.u32 %r1, [units];
    ld.param.u64 %d0, [to];
    ld.param.u64 %d1, [from];
    add.u32 %r2, %r0, 256;
    add.u32 %r3, %r0, 512;
    add.u32 %r4, %r0, 768;
    setp.lt.u32 %p0, %r0, %r1;
    setp.lt.u32 %p1, %r2, %r1;
    setp.lt.u32 %p2, %r3, %r1;
    setp.lt.u32 %p3, %r4, %r1;
    mul.wide.u32 %d2, %r0, 16;
    add.u64 %d3, %d1, %d2;
    add.u64 %d4, %d0, %d2;
    @%p0 ld.global.nc.v4.u32 {%r5, %r6, %r7, %r8}, [%d3];
    @%p1 ld.global.nc.v4.u32 {%r9, %r10, %r11, %r12}, [%d3+4096];
    @%p2 ld.global.nc.v4.u32 {%r13, %r14, %r15, %r16}, [%d3+8192];
    @%p3 ld.global.nc.v4.u32 {%r17, %r18, %r19, %r20}, [%d3+12288];
    @%p0 st.global.cs.v4.u32 [%d4], {%r5, %r6, %r7, %r8};
    @%p1 st.global.cs.v4.u32 [%d4+4096], {%r9, %r10, %r11, %r12};
    @%p2 st.global.cs.v4.u32 [%d4+8192], {%r13, %r14, %r15, %r16};
    @%p3 st.global.cs.v4.u32 [%d4+12288], {%r17, %r18, %r19, %r20};
    ret;
}
";

/// The loaded copy kernel.
pub struct CopyKernel {
    function: sys::CUfunction,
}

impl CopyKernel {
    /// Loads it.
    pub fn new(_: &Gpu) -> Result<Self> {
        let text = std::ffi::CString::new(COPY)?;
        let mut module = ptr::null_mut();
        let mut function = ptr::null_mut();
        // SAFETY: a context is current and the image is a C string; the module stays loaded.
        unsafe {
            ok(
                "cuModuleLoadData",
                sys::cuModuleLoadData(&mut module, text.as_ptr().cast()),
            )?;
            let code = sys::cuModuleGetFunction(&mut function, module, c"copy".as_ptr());
            ok("cuModuleGetFunction", code)?;
        }
        Ok(Self { function })
    }

    /// Enqueues a copy of `bytes` bytes, a multiple of 16.
    pub fn copy(&self, gpu: &Gpu, mut to: u64, mut from: u64, bytes: usize) -> Result<()> {
        let mut units = u32::try_from(bytes / 16)?;
        let mut arguments: [*mut c_void; 3] = [
            (&raw mut to).cast(),
            (&raw mut from).cast(),
            (&raw mut units).cast(),
        ];
        // SAFETY: the arguments are those of the kernel; callers copy within their own memory.
        let code = unsafe {
            sys::cuLaunchKernel(
                self.function,
                units.div_ceil(1024),
                1,
                1,
                256,
                1,
                1,
                0,
                gpu.stream,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        ok("cuLaunchKernel", code)
    }
}
