//! What the GPU tests need of a device besides the library: who may use it, streams with work in
//! them, and captured graphs.

use std::io::Write;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cust::sys;
use fused_kv::cuda::{Context, DeviceMemory, Stream};

/// The device, for one test at a time: captures and large allocations of one would disturb the
/// others.
pub struct Gpu {
    /// The primary context of the first device, current on this thread.
    pub context: Context,
    _turn: MutexGuard<'static, ()>,
}

impl Gpu {
    /// The first CUDA device. Where there is none, says so aloud and returns `None`.
    ///
    /// # Panics
    ///
    /// Where there is none and `FUSED_KV_REQUIRE_GPU` is `1`.
    pub fn get() -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        match Context::new(0) {
            Ok(context) => Some(Self {
                context,
                _turn: turn,
            }),
            Err(error) => {
                assert!(
                    std::env::var_os("FUSED_KV_REQUIRE_GPU").is_none_or(|value| value != "1"),
                    "FUSED_KV_REQUIRE_GPU=1, but there is no CUDA device: {error}"
                );
                say(&format!("skipped: no CUDA device ({error})"));
                None
            }
        }
    }

    /// Zeroed device memory, or `None` (said aloud) when the device has not that much.
    pub fn large(&self, bytes: usize) -> Option<DeviceMemory> {
        match DeviceMemory::zeroed(&self.context, bytes) {
            Ok(memory) => Some(memory),
            Err(error) => {
                say(&format!(
                    "skipped: no {bytes} bytes of device memory ({error})"
                ));
                None
            }
        }
    }
}

/// Which cases of a long sweep this process takes: all, or with `FUSED_KV_GPU_PART=i/n` every nth
/// from the ith on, so that n processes share a sweep (under compute-sanitizer one alone takes many
/// minutes).
#[derive(Debug)]
pub struct Part {
    next: usize,
    index: usize,
    of: usize,
}

impl Part {
    /// The part that the environment names.
    ///
    /// # Panics
    ///
    /// Where it names none of 1/n to n/n.
    pub fn from_env() -> Self {
        let Ok(part) = std::env::var("FUSED_KV_GPU_PART") else {
            return Self::new(1, 1);
        };
        let numbers = part
            .split_once('/')
            .and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        match numbers {
            Some((index, of)) if (1..=of).contains(&index) => Self::new(index, of),
            _ => panic!("FUSED_KV_GPU_PART={part}: expected i/n, as 1/4"),
        }
    }

    fn new(index: usize, of: usize) -> Self {
        Self { next: 0, index, of }
    }

    /// Whether this process takes the next case.
    pub fn takes(&mut self) -> bool {
        let case = self.next;
        self.next += 1;
        case % self.of == self.index - 1
    }

    /// It takes all of them.
    pub fn is_whole(&self) -> bool {
        self.of == 1
    }
}

/// Prints for the eyes of whoever runs the tests. The print macros are shown for failing tests
/// only; the stream itself is always.
pub fn say(text: &str) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("test");
    // Nobody is left to tell when stderr is closed.
    let _ = writeln!(std::io::stderr(), "{name}: {text}");
}

fn ok(call: &str, code: sys::CUresult) {
    assert_eq!(code, sys::cudaError_enum::CUDA_SUCCESS, "{call}");
}

/// A stream of the tests' own, or one of the special ones.
pub struct TestStream {
    raw: sys::CUstream,
    owned: bool,
}

impl TestStream {
    /// A new stream that does not wait for the null stream.
    pub fn non_blocking() -> Self {
        Self::create(1)
    }

    /// A new stream that waits for the null stream, as streams do by default.
    pub fn blocking() -> Self {
        Self::create(0)
    }

    fn create(flags: u32) -> Self {
        let mut raw = ptr::null_mut();
        // SAFETY: a context is current (`Gpu::get`); writes one handle.
        ok("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut raw, flags)
        });
        Self { raw, owned: true }
    }

    /// The null stream.
    pub fn null() -> Self {
        Self {
            raw: ptr::null_mut(),
            owned: false,
        }
    }

    /// The calling thread's stream.
    pub fn per_thread() -> Self {
        Self {
            raw: ptr::without_provenance_mut(2),
            owned: false,
        }
    }

    /// For a plan.
    pub fn stream(&self) -> Stream<'_> {
        // SAFETY: live as long as `self`, or one of the special handles.
        unsafe { Stream::from_raw(self.raw.cast()) }
    }

    /// Waits for what was enqueued.
    pub fn wait(&self) {
        // SAFETY: a live stream.
        ok("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.raw)
        });
    }

    /// Enqueues a copy of all of `from` to the start of `to`.
    pub fn copy(&self, to: &DeviceMemory, from: &DeviceMemory) {
        assert!(from.len() <= to.len());
        // SAFETY: both ranges lie within live memory; callers wait before they drop it.
        ok("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), from.len(), self.raw)
        });
    }

    /// Captures what `enqueue` enqueues to this stream. A call that may not be captured (an
    /// allocation, a wait) fails, on this thread.
    pub fn capture(&self, enqueue: impl FnOnce()) -> Graph {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let (mut graph, mut exec, mut nodes) = (ptr::null_mut(), ptr::null_mut(), 0);
        // SAFETY: the stream is live; handles are written before they are used.
        unsafe {
            ok(
                "cuStreamBeginCapture",
                sys::cuStreamBeginCapture_v2(self.raw, mode),
            );
            enqueue();
            ok(
                "cuStreamEndCapture",
                sys::cuStreamEndCapture(self.raw, &mut graph),
            );
            ok(
                "cuGraphGetNodes",
                sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut nodes),
            );
            let code = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
            ok("cuGraphInstantiate", code);
            ok("cuGraphDestroy", sys::cuGraphDestroy(graph));
        }
        Graph { exec, nodes }
    }

    /// Enqueues a replay.
    pub fn replay(&self, graph: &Graph) {
        // SAFETY: both are live; callers keep the memory that the graph names.
        ok("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(graph.exec, self.raw)
        });
    }
}

impl Drop for TestStream {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: created by `create`, not used again.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A captured graph.
pub struct Graph {
    exec: sys::CUgraphExec,
    /// Number of its nodes.
    pub nodes: usize,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `TestStream::capture`, not used again.
        unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}

/// Writes `data` at `first` bytes into device memory.
pub fn write(memory: &mut DeviceMemory, first: usize, data: &[u8]) {
    assert!(first + data.len() <= memory.len());
    // SAFETY: within live memory; the copy waits.
    ok("cuMemcpyHtoD", unsafe {
        sys::cuMemcpyHtoD_v2(
            memory.address() + first as u64,
            data.as_ptr().cast(),
            data.len(),
        )
    });
}

/// Reads `len` bytes from `first` on, without waiting for anything but the null stream.
pub fn read(memory: &DeviceMemory, first: usize, len: usize) -> Vec<u8> {
    assert!(first + len <= memory.len());
    let mut bytes = vec![0; len];
    // SAFETY: within live memory; the copy waits.
    ok("cuMemcpyDtoH", unsafe {
        sys::cuMemcpyDtoH_v2(
            bytes.as_mut_ptr().cast(),
            memory.address() + first as u64,
            len,
        )
    });
    bytes
}

/// Repeats the first `period` bytes over all of the memory.
pub fn repeat(memory: &mut DeviceMemory, period: usize) {
    let mut done = period;
    while done < memory.len() {
        let step = done.min(memory.len() - done);
        // SAFETY: both ranges lie within live memory and do not overlap.
        ok("cuMemcpyDtoD", unsafe {
            sys::cuMemcpyDtoD_v2(memory.address() + done as u64, memory.address(), step)
        });
        done += step;
    }
}

/// Number of CUDA devices.
pub fn devices() -> usize {
    fused_kv::cuda::devices().map_or(0, |devices| devices.len())
}

/// Page-locked host memory.
pub struct Pinned {
    address: *mut std::ffi::c_void,
}

impl Pinned {
    /// `bytes` bytes of it.
    pub fn new(bytes: usize) -> Self {
        let mut address = ptr::null_mut();
        // SAFETY: a context is current; writes one address.
        ok("cuMemAllocHost", unsafe {
            sys::cuMemAllocHost_v2(&mut address, bytes)
        });
        Self { address }
    }

    /// Its address.
    pub fn address(&self) -> u64 {
        self.address as u64
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, not used again.
        unsafe { sys::cuMemFreeHost(self.address) };
    }
}

#[cfg(test)]
mod tests {
    use super::Part;

    #[test]
    fn parts_take_every_case_once() {
        let mut parts = [1, 2, 3].map(|index| Part::new(index, 3));
        for case in 0..10 {
            let takers = parts.each_mut().map(Part::takes);
            assert_eq!(takers.iter().filter(|takes| **takes).count(), 1);
            assert!(takers[case % 3]);
        }
        let mut whole = Part::new(1, 1);
        assert!(whole.is_whole() && (0..10).all(|_| whole.takes()));
    }
}
