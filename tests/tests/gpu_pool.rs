//! KV pools on a GPU: every dispatch path against the scalar reference, bit for bit, canaries
//! before, between and after all pages; graphs; what the driver knows of a pool's memory. Without
//! a CUDA device each test says aloud that it skips; `FUSED_KV_REQUIRE_GPU=1` makes that a failure.
//! (`tests/gpu.rs` says so where the tests are not compiled in.)
#![cfg(feature = "cuda")]

use fused_kv::cuda::DeviceMemory;
use fused_kv::{
    Argument, DType, Device, Dispatch, Error, Inputs, Path, Plan, PoolLayout, PoolTarget,
    TensorView, TensorViewMut,
};
use fused_kv_tests::arbitrary::{Alignment, config, spec_with_bad_positions};
use fused_kv_tests::case::Values;
use fused_kv_tests::gpu::{Gpu, Part, TestStream, read, write};
use fused_kv_tests::pool::{
    LAYOUTS, POOL_TYPES, PoolCase, PoolSpec, check_dispatches, every_value, random_pool, specs,
};
use fused_kv_tests::runner::{ALIGNED, HostMemory, all_dispatches};
use fused_kv_tests::{Runner, Spec, Tensor, reference};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

fn check(gpu: &Gpu, case: &PoolCase) -> Vec<Path> {
    check_dispatches(case, &all_dispatches(&case.case), |dispatch| {
        Runner::Cuda(gpu.context.clone(), dispatch)
    })
}

#[test]
fn every_spec() {
    let Some(gpu) = Gpu::get() else { return };
    let mut served = Vec::new();
    let mut part = Part::from_env();
    for spec in specs().into_iter().filter(|_| part.takes()) {
        served.extend(check(&gpu, &spec.build()));
    }
    for path in Path::ALL {
        assert!(
            served.contains(&path) || !part.is_whole(),
            "{path:?} served no case"
        );
    }
}

/// All types and layouts with more tokens than a block takes, arbitrary bits among the values.
#[test]
fn larger_jobs() {
    let Some(gpu) = Gpu::get() else { return };
    let mut part = Part::from_env();
    for (index, dtype) in POOL_TYPES.into_iter().enumerate() {
        for layout in LAYOUTS {
            for kv in [DType::Bf16, DType::F16, DType::F32] {
                if !part.takes() {
                    continue;
                }
                for (head_dim, rotary_dim) in [(128, 128), (64, 32), (46, 22)] {
                    let spec = PoolSpec {
                        job: Spec {
                            tokens: 70,
                            layers: 3,
                            heads: 3,
                            head_dim,
                            rotary_dim,
                            values: Values::Wild,
                            value_scale: index % 2 == 0,
                            seed: index as u64,
                            ..Spec::default().dtype(kv)
                        },
                        layout,
                        dtype,
                        pages: if layout == PoolLayout::Nhd { 100 } else { 10 },
                        page_size: 10,
                        ..PoolSpec::default()
                    };
                    check(&gpu, &spec.build());
                    check(&gpu, &spec.shifted(1).build());
                }
            }
        }
    }
}

/// 37, 38: all 65536 values of both 16-bit types, to both FP8 types.
#[test]
fn every_16_bit_value_to_fp8() {
    let Some(gpu) = Gpu::get() else { return };
    let mut part = Part::from_env();
    for kv in [DType::Bf16, DType::F16] {
        for dtype in [DType::F8E4M3Fn, DType::F8E5M2] {
            if !part.takes() {
                continue;
            }
            check(&gpu, &every_value(kv, dtype));
        }
    }
}

/// Random pools. `FUSED_KV_GPU_CASES` sets how many.
#[test]
fn random_pools() {
    let Some(gpu) = Gpu::get() else { return };
    let count = match std::env::var("FUSED_KV_GPU_CASES") {
        Ok(count) => count.parse().expect("a number"),
        Err(_) => 300,
    };
    let strategy = (spec_with_bad_positions(Alignment::Element), any::<u64>());
    TestRunner::new(config(count))
        .run(&strategy, |(job, seed)| {
            check(&gpu, &random_pool(job, seed, false).build());
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// A job whose tensors stay in device memory, with a pool `[slots, 8, 128]` of FP8 for each layer.
struct Resident {
    case: fused_kv_tests::Case,
    sources: Vec<DeviceMemory>,
    slots: DeviceMemory,
    pool: Vec<DeviceMemory>,
    num_slots: usize,
}

const ROW: usize = 8 * 128;
const DESCALES: [[f32; 2]; 2] = [[0.5, 0.25], [1.5, 0.125]];

impl Resident {
    fn new(gpu: &Gpu, num_slots: usize, slots: &[i64]) -> Self {
        let case = Spec {
            tokens: slots.len(),
            heads: 8,
            ..Spec::default()
        }
        .build();
        let place = |tensor: &Tensor| {
            DeviceMemory::from_bytes(&gpu.context, &tensor.memory).expect("memory")
        };
        let sources = [
            &case.kv,
            &case.k_norm_weight,
            &case.eps,
            &case.cos_sin_cache,
            &case.positions,
        ];
        let bytes: Vec<u8> = slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
        Self {
            sources: sources.map(place).into(),
            slots: DeviceMemory::from_bytes(&gpu.context, &bytes).expect("memory"),
            pool: (0..4)
                .map(|_| DeviceMemory::zeroed(&gpu.context, num_slots * ROW).expect("memory"))
                .collect(),
            num_slots,
            case,
        }
    }

    fn target(&self) -> PoolTarget<'static> {
        let layer = |memory: &DeviceMemory| {
            // SAFETY: the memory outlives every plan of these tests, each of which waits for what
            // it enqueued; each tensor has one view in a plan.
            unsafe {
                TensorViewMut::from_raw_parts(
                    memory.address(),
                    Device::Cuda(0),
                    DType::F8E4M3Fn,
                    &[self.num_slots, 8, 128],
                    &[ROW as isize, 128, 1],
                )
            }
            .expect("a view")
        };
        let half = |half: usize| -> Vec<_> {
            (0..2)
                .map(|index| layer(&self.pool[2 * index + half]))
                .collect()
        };
        // SAFETY: as above.
        let slots = unsafe {
            TensorView::from_raw_parts(
                self.slots.address(),
                Device::Cuda(0),
                DType::I64,
                &[self.case.tokens()],
                &[1],
            )
        };
        PoolTarget::nhd(half(0), half(1), slots.expect("a view"))
            .with_descales(&DESCALES[0], &DESCALES[1])
    }

    fn inputs(&self) -> Inputs<'static> {
        let case = &self.case;
        let view = |index: usize, tensor: &Tensor| {
            // SAFETY: as in `target`.
            unsafe {
                TensorView::from_raw_parts(
                    self.sources[index].address() + tensor.first as u64,
                    Device::Cuda(0),
                    tensor.dtype,
                    &tensor.shape,
                    &tensor.strides,
                )
            }
            .expect("a view")
        };
        Inputs {
            kv: view(0, &case.kv),
            k_norm_weight: view(1, &case.k_norm_weight),
            eps: view(2, &case.eps),
            cos_sin_cache: view(3, &case.cos_sin_cache),
            positions: view(4, &case.positions),
            value_scale: None,
        }
    }

    fn plan(&self) -> Result<Plan<'static>, Error> {
        Plan::paged(self.case.config, self.inputs(), self.target())
    }

    /// The rows of these tokens are in their slots; the slots in `untouched` are zero.
    fn assert_written(&self, slots: &[i64], untouched: &[i64], when: &str) {
        let tokens = self.case.tokens();
        let results = reference::unrounded(&self.case, &vec![true; tokens]);
        for layer in 0..2 {
            for half in 0..2 {
                let memory = &self.pool[2 * layer + half];
                for (token, &slot) in slots.iter().enumerate() {
                    if slot < 0 {
                        continue;
                    }
                    let values = [&results.k, &results.v][half];
                    let expected: Vec<u8> = values[(layer * tokens + token) * ROW..][..ROW]
                        .iter()
                        .map(|value| value / DESCALES[half][layer])
                        .map(|value| fused_kv_tests::element::encode(DType::F8E4M3Fn, value) as u8)
                        .collect();
                    let found = read(memory, slot as usize * ROW, ROW);
                    assert!(found == expected, "{when}: layer {layer}, slot {slot}");
                }
                for &slot in untouched {
                    let found = read(memory, slot as usize * ROW, ROW);
                    assert!(found.iter().all(|&byte| byte == 0), "{when}: slot {slot}");
                }
            }
        }
    }

    fn set_slots(&mut self, slots: &[i64]) {
        let bytes: Vec<u8> = slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
        write(&mut self.slots, 0, &bytes);
    }
}

/// 2 (tokenspeed PR 748): the last slot of a pool of more than 2^31 bytes, and one further, on
/// every path.
#[test]
fn the_last_slot_of_a_large_pool() {
    let Some(gpu) = Gpu::get() else { return };
    let last = 1i64 << 21;
    let Some(probe) = gpu.large(4 * (last as usize + 1) * ROW) else {
        return;
    };
    drop(probe);
    let slots = [last, last - 1];
    let resident = Resident::new(&gpu, last as usize + 1, &slots);
    for path in ALIGNED {
        let mut plan = resident.plan().expect("a valid job");
        plan.dispatch(Dispatch {
            path: Some(path),
            ..Dispatch::default()
        })
        .expect("a path");
        plan.run().expect("a launch");
        plan.check().expect("slots of the pool");
        resident.assert_written(&slots, &[0, 1, last - 2], path.name());
    }
}

/// 34 (vLLM PR 54851): a capture with all slots -1 is valid; the replay writes what the slots say
/// at replay, and what it finds out is reported.
#[test]
fn slots_at_replay() {
    let Some(gpu) = Gpu::get() else { return };
    let mut resident = Resident::new(&gpu, 16, &[-1; 4]);
    let stream = TestStream::non_blocking();
    let mut plan = resident.plan().expect("a valid job");
    let graph = stream.capture(|| plan.run_on(stream.stream()).expect("a captured launch"));
    assert_eq!(graph.nodes, 1, "one launch for all layers");
    stream.replay(&graph);
    stream.wait();
    assert_eq!(plan.check(), Ok(()));
    resident.assert_written(&[], &[0, 5, 9, 15], "all skipped");
    resident.set_slots(&[9, -1, 0, 15]);
    gpu.context.synchronize().expect("nothing failed");
    stream.replay(&graph);
    stream.wait();
    assert_eq!(plan.check(), Ok(()));
    resident.assert_written(&[9, -1, 0, 15], &[5, 8, 10], "the replay");
    resident.set_slots(&[16, -1, 5, 15]);
    gpu.context.synchronize().expect("nothing failed");
    stream.replay(&graph);
    stream.wait();
    assert_eq!(
        plan.check(),
        Err(Error::SlotOutOfRange {
            token: 0,
            slot: 16,
            num_slots: 16,
            count: 1
        })
    );
    resident.assert_written(&[-1, -1, 5, 15], &[8, 10], "the second replay");
}

/// 35 (candle PR 3352, cudarc 590): capture a call, drop every temporary, the plan too, replay
/// twice, drop the buffers, make another call. Descales and base addresses outlive the plan.
#[test]
fn replays_after_the_plan_is_gone() {
    let Some(gpu) = Gpu::get() else { return };
    let resident = Resident::new(&gpu, 16, &[3, 1, 4, 15]);
    let stream = TestStream::non_blocking();
    let graph = {
        let mut plan = resident.plan().expect("a valid job");
        stream.capture(|| plan.run_on(stream.stream()).expect("a captured launch"))
    };
    // Other plans' tables come and go meanwhile.
    for seed in 0..50 {
        let other = Resident::new(&gpu, 8 + seed, &[0]);
        let mut plan = other.plan().expect("a valid job");
        plan.run().expect("a launch");
        plan.check().expect("slot 0");
    }
    for _ in 0..2 {
        stream.replay(&graph);
        stream.wait();
        resident.assert_written(&[3, 1, 4, 15], &[0, 2, 5], "a replay");
    }
    drop((graph, resident));
    let other = Resident::new(&gpu, 16, &[7]);
    other
        .plan()
        .expect("a valid job")
        .run_on(stream.stream())
        .expect("a launch");
    stream.wait();
    other.assert_written(&[7], &[6, 8], "a call after all was dropped");
}

/// A pool that ends behind its allocation, as the driver knows it.
#[test]
fn pools_that_leave_their_allocation() {
    let Some(gpu) = Gpu::get() else { return };
    let resident = Resident::new(&gpu, 16, &[3]);
    resident.plan().expect("the pool as it is");
    // Allocations may be rounded up: far enough to leave any rounding behind.
    let mut longer = resident;
    longer.num_slots = 1 << 20;
    let start = longer.pool[0].address();
    let error = longer.plan().expect_err("a longer pool");
    let Error::OutsideAllocation {
        argument: Argument::KPoolLayer(0),
        start: found,
        end,
        allocation_start,
        allocation_end,
    } = error
    else {
        // Pools that run into each other are refused for that.
        assert!(matches!(error, Error::Overlap { .. }), "{error}");
        return;
    };
    assert_eq!((found, end), (start, start + ((ROW as u64) << 20)));
    assert!(allocation_start <= start && allocation_end < end);
}

/// Pools, and slots, on the host while the job is on the device.
#[test]
fn pools_on_the_host() {
    let Some(gpu) = Gpu::get() else { return };
    let resident = Resident::new(&gpu, 16, &[3]);
    let mut host = HostMemory::from_bytes(&vec![7; 16 * ROW]);
    let mut target = resident.target();
    let address = host.address();
    // SAFETY: the memory is live; refused, never run.
    let view = unsafe {
        TensorViewMut::from_raw_parts(
            address,
            Device::Cuda(0),
            DType::F8E4M3Fn,
            &[16, 8, 128],
            &[ROW as isize, 128, 1],
        )
    };
    if let Some(fused_kv::PoolTensors::Layers(layers)) = &mut target.v {
        layers[1] = view.expect("a view");
    }
    let error = Plan::paged(resident.case.config, resident.inputs(), target)
        .expect_err("host memory")
        .to_string();
    assert_eq!(
        error,
        "Invalid v_pool[1] device/dtype for fused KV materialization: got device=cpu, \
         dtype=float8_e4m3fn, expected device=cuda:0, dtype=float8_e4m3fn."
    );
    let mut target = resident.target();
    let slots = [3i64];
    // SAFETY: as above.
    target.slots = unsafe {
        TensorView::from_raw_parts(slots.as_ptr() as u64, Device::Cpu, DType::I64, &[1], &[1])
    }
    .expect("a view");
    assert_eq!(
        Plan::paged(resident.case.config, resident.inputs(), target).map(drop),
        Err(Error::InputDevice {
            argument: Argument::Slots,
            found: Device::Cpu,
            expected: Device::Cuda(0)
        })
    );
    assert!(host.to_bytes() == vec![7; 16 * ROW]);
}

/// Duplicates in a list in device memory, where they are to be refused.
#[test]
fn duplicate_slots() {
    let Some(gpu) = Gpu::get() else { return };
    let resident = Resident::new(&gpu, 16, &[3, -1, 7, -1, 3]);
    let target = resident.target().refusing_duplicates();
    assert_eq!(
        Plan::paged(resident.case.config, resident.inputs(), target).map(drop),
        Err(Error::DuplicateSlot {
            slot: 3,
            first: 0,
            second: 4
        })
    );
    // Not asked for, the job runs, and other slots are as they should be.
    let mut plan = resident.plan().expect("a valid job");
    plan.run().expect("a launch");
    plan.check().expect("slots of the pool");
    resident.assert_written(&[-1, -1, 7], &[0, 2, 4, 6, 8], "beside duplicates");
}
