//! Contexts: what is loaded and allocated once for each, and kept for as long as the process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fused_kv_kernels::abi::Status;

use super::driver::{self, Bound, DriverDevice, LaunchEx, Pointer, RawContext, RawFunction};
use super::{CudaError, ptx};
use crate::Error;

/// A device's primary context, for callers that have none of another library.
///
/// Creating it makes it current on the calling thread.
#[derive(Clone, Debug)]
pub struct Context {
    pub(super) state: Arc<State>,
}

impl Context {
    /// Retains the primary context of device `ordinal`.
    ///
    /// # Errors
    ///
    /// [`CudaError::NoDevice`], or a failure of the driver.
    pub fn new(ordinal: u32) -> Result<Self, Error> {
        driver::init()?;
        let state = State::primary(ordinal)?;
        // SAFETY: the state of a primary context retains it.
        unsafe { driver::set_current(state.raw) }?;
        Ok(Self { state })
    }

    /// Ordinal of the device.
    pub fn ordinal(&self) -> u32 {
        self.state.ordinal
    }

    /// Waits for all work of this context.
    ///
    /// # Errors
    ///
    /// What the driver reports, failures of earlier kernels included.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _bound = self.state.bind()?;
        Ok(driver::synchronize()?)
    }
}

/// One context, with its loaded kernels and its status records.
#[derive(Debug)]
pub(crate) struct State {
    raw: RawContext,
    pub(super) ordinal: u32,
    /// 10 * major + minor.
    capability: u32,
    /// Kernels by name and PTX source.
    functions: Mutex<HashMap<(ptx::Source, &'static str), Function>>,
    records: Mutex<Records>,
    /// Tables of pools by contents.
    tables: Mutex<HashMap<Vec<u64>, u64>>,
    pub(super) launch_ex: Option<LaunchEx>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    pub(super) raw: RawFunction,
    /// The kernel waits for the one in front of it by itself, and may be launched early.
    pub(super) waits: bool,
}

// SAFETY: handles of the driver may be used from any thread; the state retains its context, or
// belongs to one that was created apart, whose owner keeps it.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Send for State {}
// SAFETY: as above; everything that changes is behind a lock.
unsafe impl Sync for State {}

/// A lock whose holder panicked still holds consistent data: every change is a single insertion.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A context's address, and its number: addresses come back once a context is destroyed.
type Key = (usize, u64);

fn registry() -> &'static Mutex<HashMap<Key, Arc<State>>> {
    static REGISTRY: OnceLock<Mutex<HashMap<Key, Arc<State>>>> = OnceLock::new();
    REGISTRY.get_or_init(Default::default)
}

impl State {
    /// The state of the context that memory at `address` belongs to; where it belongs to none
    /// (stream-ordered pools), of the current context if it is of that device, else of the
    /// device's primary context.
    pub(crate) fn of_pointer(address: u64, ordinal: u32) -> Result<Arc<Self>, CudaError> {
        if let Pointer::Device { context, .. } = driver::pointer(address)?
            && !context.is_null()
        {
            // SAFETY: a context that owns live memory is alive.
            return unsafe { Self::of(context) };
        }
        let current = driver::current_context()?;
        if !current.is_null() && driver::current_device()? == ordinal {
            // SAFETY: the current context is alive.
            return unsafe { Self::of(current) };
        }
        Self::primary(ordinal)
    }

    /// The state of a context. A primary context is retained with it, for as long as the process;
    /// one that was created apart is its owner's, who keeps it until plans and memory of it are gone.
    ///
    /// # Safety
    ///
    /// `raw` is a live context.
    unsafe fn of(raw: RawContext) -> Result<Arc<Self>, CudaError> {
        // SAFETY: the caller's promise.
        let key = (raw as usize, unsafe { driver::context_id(raw) }?);
        let mut registry = lock(registry());
        if let Some(state) = registry.get(&key) {
            return Ok(state.clone());
        }
        let ordinal = {
            // SAFETY: the caller's promise.
            let _bound = unsafe { Bound::new(raw) }?;
            driver::current_device()?
        };
        let device = DriverDevice::new(ordinal)?;
        let (major, minor) = device.compute_capability()?;
        let state = Arc::new(Self {
            raw,
            ordinal,
            capability: 10 * major + minor,
            functions: Mutex::default(),
            records: Mutex::default(),
            tables: Mutex::default(),
            launch_ex: LaunchEx::find(),
        });
        device.retain_if_primary(raw)?;
        registry.insert(key, state.clone());
        Ok(state)
    }

    fn primary(ordinal: u32) -> Result<Arc<Self>, CudaError> {
        let count = driver::device_count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let device = DriverDevice::new(ordinal)?;
        let raw = device.retain_primary()?;
        // SAFETY: just retained.
        let state = unsafe { Self::of(raw) };
        // SAFETY: retained above; the state has retained it for itself, or there is none.
        unsafe { device.release_primary() }?;
        state
    }

    /// Makes this context current until the result is dropped.
    pub(super) fn bind(&self) -> Result<Bound, CudaError> {
        // SAFETY: this state retains its context, or the context's owner keeps it.
        unsafe { Bound::new(self.raw) }
    }

    /// The kernel `entry`, compiled and loaded into this context on first use.
    pub(super) fn function(
        &self,
        source: &ptx::Source,
        entry: &'static str,
    ) -> Result<Function, CudaError> {
        let key = (source.clone(), entry);
        let mut functions = lock(&self.functions);
        if let Some(function) = functions.get(&key) {
            return Ok(*function);
        }
        let text = source.entry(self.capability, self.ordinal, entry)?;
        let _bound = self.bind()?;
        let module = driver::load_module(&text)?;
        let name = std::ffi::CString::new(entry).unwrap_or_default();
        // SAFETY: the module was just loaded into the bound context and is never unloaded.
        let raw = unsafe { driver::function(module, &name) }?;
        let waits = text
            .to_bytes()
            .windows(WAIT.len())
            .any(|window| window == WAIT);
        let function = Function { raw, waits };
        functions.insert(key, function);
        Ok(function)
    }

    /// Address of a copy of `words` in device memory. Copies are made once and never freed: a plan
    /// for the same pool finds its own again without an allocation, and a graph that outlives its
    /// plan still reads the right one.
    pub(super) fn table(&self, words: &[u64]) -> Result<u64, CudaError> {
        let mut tables = lock(&self.tables);
        if let Some(address) = tables.get(words) {
            return Ok(*address);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let _bound = self.bind()?;
        let address = driver::allocate(bytes.len().max(1))?;
        // SAFETY: just allocated with this size.
        unsafe { driver::copy_to_device(address, &bytes) }?;
        tables.insert(words.to_vec(), address);
        Ok(address)
    }

    /// A cleared status record in device memory.
    pub(super) fn record(self: &Arc<Self>) -> Result<Record, CudaError> {
        let _bound = self.bind()?;
        let address = {
            let mut records = lock(&self.records);
            if records.free.is_empty() {
                let slab = driver::allocate(SLAB_RECORDS * size_of::<Status>())?;
                let all = (0..SLAB_RECORDS).map(|i| slab + (i * size_of::<Status>()) as u64);
                records.free.extend(all);
            }
            records.free.pop_front()
        };
        // A slab was just added where there was none left.
        let Some(address) = address else {
            return Err(CudaError::driver("cuMemAlloc", driver::INVALID_VALUE));
        };
        let record = Record {
            state: self.clone(),
            address,
        };
        record.clear()?;
        Ok(record)
    }
}

/// What PTX of a kernel that may be launched early contains.
const WAIT: &[u8] = b"griddepcontrol.wait";

const SLAB_RECORDS: usize = 1024;

/// Addresses of unused records, the longest unused first. Slabs are never freed: a graph that
/// outlives its plan still has somewhere to write.
#[derive(Debug, Default)]
struct Records {
    free: std::collections::VecDeque<u64>,
}

/// A status record in device memory; given back when dropped.
#[derive(Debug)]
pub(super) struct Record {
    state: Arc<State>,
    pub(super) address: u64,
}

/// The record as bytes.
const CLEAR: [u64; 6] = {
    let c = Status::CLEAR;
    [
        c.bad_positions,
        c.position_high,
        c.position_low,
        c.bad_slots,
        c.slot_high,
        c.slot_low,
    ]
};

impl Record {
    /// Forgets what was reported.
    pub(super) fn clear(&self) -> Result<(), CudaError> {
        let bytes: Vec<u8> = CLEAR.iter().flat_map(|field| field.to_le_bytes()).collect();
        let _bound = self.state.bind()?;
        // SAFETY: the record is live.
        unsafe { driver::copy_to_device(self.address, &bytes) }
    }

    /// Reads what was reported; all work that may report must have completed.
    pub(super) fn read(&self) -> Result<Status, CudaError> {
        let mut bytes = [0u8; size_of::<Status>()];
        let _bound = self.state.bind()?;
        // SAFETY: the record is live and of this size.
        unsafe { driver::copy_to_host(&mut bytes, self.address) }?;
        let mut fields = [0u64; 6];
        for (field, bytes) in fields.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *field = u64::from_le_bytes(*bytes);
        }
        let [
            bad_positions,
            position_high,
            position_low,
            bad_slots,
            slot_high,
            slot_low,
        ] = fields;
        Ok(Status {
            bad_positions,
            position_high,
            position_low,
            bad_slots,
            slot_high,
            slot_low,
        })
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        lock(&self.state.records).free.push_back(self.address);
    }
}
