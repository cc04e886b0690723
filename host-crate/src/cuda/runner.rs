//! A problem on a device: its launches, prepared once.

use std::sync::Arc;

use super::context::{Function, Record, State};
use super::stream::Stream;
use super::{CudaError, driver, ptx};
use crate::launches::{Call, Dispatch, launches};
use crate::problem::{Problem, Target};
use crate::{Device, Error};

/// What a plan keeps for CUDA.
#[derive(Debug)]
pub(crate) struct Runner {
    state: Arc<State>,
    record: Record,
    /// Address of the table of a pool.
    table: u64,
    source: ptx::Source,
    calls: Vec<(Function, Call)>,
    overlap: bool,
}

impl Runner {
    /// Loads the kernels and prepares the launches.
    pub(crate) fn new(problem: &Problem) -> Result<Self, Error> {
        let state = state_near(problem.device, problem.kv.address)?;
        let table = match &problem.target {
            Target::Dense { .. } => 0,
            Target::Pool(pool) => state.table(pool.table())?,
        };
        let mut runner = Self {
            record: state.record()?,
            table,
            source: ptx::Source::current()?,
            state,
            calls: Vec::new(),
            overlap: true,
        };
        runner.dispatch(problem, Dispatch::default())?;
        Ok(runner)
    }

    /// Prepares the launches anew.
    pub(crate) fn dispatch(&mut self, problem: &Problem, dispatch: Dispatch) -> Result<(), Error> {
        self.overlap = dispatch.overlap.unwrap_or(true);
        self.calls = launches(problem, dispatch, self.record.address, self.table)?
            .into_iter()
            .map(|call| {
                let function = self.state.function(&self.source, call.entry)?;
                if call.shared_bytes > 0 {
                    let _bound = self.state.bind()?;
                    // SAFETY: the function is this context's.
                    unsafe { driver::allow_shared(function.raw, call.shared_bytes) }?;
                }
                Ok((function, call))
            })
            .collect::<Result<_, CudaError>>()?;
        Ok(())
    }

    /// Enqueues the job: no allocation, no waiting.
    pub(crate) fn enqueue(&self, stream: Stream<'_>) -> Result<(), Error> {
        let _bound = self.state.bind()?;
        for (function, call) in &self.calls {
            let Call {
                grid,
                threads,
                shared_bytes: shared,
                params,
                ..
            } = call;
            // SAFETY: the function is this context's and takes `Params`; the plan's validation
            // covers what the parameters name; `Stream` stands for a live stream (a launch to one
            // of another device's context fails); only a kernel that waits is launched early.
            unsafe {
                match self.state.launch_ex {
                    Some(launch_ex) if self.overlap && function.waits => launch_ex.launch_early(
                        function.raw,
                        *grid,
                        *threads,
                        *shared,
                        stream.raw,
                        params,
                    ),
                    _ => driver::launch(function.raw, *grid, *threads, *shared, stream.raw, params),
                }
            }?;
        }
        Ok(())
    }

    /// Waits for the context's work, then reads and clears the record.
    pub(crate) fn check(&self, problem: &Problem) -> Result<(), Error> {
        let _bound = self.state.bind()?;
        driver::synchronize()?;
        let status = self.record.read()?;
        let report = problem.report(&status);
        if report.is_err() {
            self.record.clear()?;
        }
        report
    }
}

/// The context to work in for memory on `device`: that of the memory at `address`.
pub(crate) fn state_near(device: Device, address: usize) -> Result<Arc<State>, Error> {
    let Device::Cuda(ordinal) = device else {
        return Err(CudaError::NoDevice {
            ordinal: 0,
            count: 0,
        }
        .into());
    };
    driver::init()?;
    Ok(State::of_pointer(address as u64, ordinal)?)
}
