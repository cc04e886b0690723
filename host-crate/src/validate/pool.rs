//! The checks of a job that writes into a KV pool.

use std::collections::HashMap;

use super::{
    INDICES, Resolve, Sources, check_alignment, check_apart, check_innermost, check_shape, operand,
    resolved,
};
use crate::error::{Argument, Error, Shape};
use crate::plan::{Config, Inputs};
use crate::pool::{PoolLayout, PoolTarget, PoolTensors};
use crate::problem::{Pool, PoolStrides};
use crate::tensor::Raw;
use crate::{DType, Device};

/// The dtypes of pools.
pub(crate) const POOL_DTYPES: &str = "bfloat16, float16, float32, float8_e4m3fn or float8_e5m2";

/// A job that passed every check.
pub(crate) struct Paged {
    pub(crate) sources: Sources,
    pub(crate) pool: Pool,
}

/// One half of a pool, its tensors on their real devices.
struct Half {
    /// K or V.
    argument: Argument,
    tensors: Tensors,
    layout: PoolLayout,
}

enum Tensors {
    Layers(Vec<Raw>),
    Stacked(Raw),
}

/// All checks of a job with a pool as its target: ranks and shapes of the inputs, the pool's
/// halves, layers, ranks, shapes, devices and dtypes, slots, descales, strides, overlap,
/// alignment, dtypes and devices of the inputs, limits, duplicates.
pub(crate) fn paged(
    config: &Config,
    inputs: &Inputs<'_>,
    target: &PoolTarget<'_>,
    resolve: Resolve<'_>,
) -> Result<Paged, Error> {
    let sources = Sources::resolve(inputs, resolve)?;
    let half = |argument, tensors: &Option<PoolTensors<'_>>| -> Result<_, Error> {
        tensors
            .as_ref()
            .map(|tensors| Half::resolve(argument, tensors, target.layout, resolve))
            .transpose()
    };
    let k = half(Argument::KPool, &target.k)?;
    let v = half(Argument::VPool, &target.v)?;
    let slots = resolved(&target.slots.raw, resolve)?;

    sources.check_shapes(config)?;
    let missing = |missing| Error::PoolHalf { missing };
    let k = k.ok_or(missing(Argument::KPool))?;
    let v = v.ok_or(missing(Argument::VPool))?;
    for half in [&k, &v] {
        half.check_layers(sources.layers())?;
    }
    let extents = k.check_shapes(config, None)?;
    v.check_shapes(config, Some(extents))?;
    // Without layers there is no tensor that could have a dtype.
    let dtype = k.first().map_or(sources.dtype(), |raw| raw.dtype);
    for half in [&k, &v] {
        half.check_device_dtype(sources.device(), dtype)?;
    }
    check_shape(Argument::Slots, &slots, &[sources.tokens()])?;
    let (pages, page_size) = extents;
    let capacity = pages.saturating_mul(page_size);
    let num_slots = target.num_slots.unwrap_or(capacity);
    if num_slots > capacity {
        return Err(Error::PoolSlots {
            found: num_slots,
            capacity,
        });
    }
    let descales = descales(target, dtype, sources.layers())?;
    sources.check_strides()?;
    for half in [&k, &v] {
        half.check_strides()?;
    }
    let inputs: Vec<(Argument, Raw)> = sources.iter().chain([(Argument::Slots, slots)]).collect();
    let tensors: Vec<(Argument, Raw)> = [&k, &v].into_iter().flat_map(Half::iter).collect();
    check_apart(&tensors, &inputs)?;
    for &(argument, raw) in inputs.iter().chain(&tensors) {
        check_alignment(argument, &raw)?;
    }
    sources.check_dtypes()?;
    if !slots.dtype.is_index() {
        return Err(Error::Dtype {
            argument: Argument::Slots,
            found: slots.dtype,
            expected: INDICES,
        });
    }
    sources.check_devices()?;
    if slots.device != sources.device() {
        return Err(Error::InputDevice {
            argument: Argument::Slots,
            found: slots.device,
            expected: sources.device(),
        });
    }
    sources.check_limits(config)?;
    let limit = |what, found: usize, limit: u64| match found as u64 <= limit {
        true => Ok(()),
        false => Err(Error::TooLarge {
            what,
            found: found as u64,
            limit,
        }),
    };
    limit("the number of slots", num_slots, i64::MAX as u64)?;
    let reserved = target.reserved_slot.unwrap_or(0);
    limit("the reserved slot", reserved, i64::MAX as u64)?;
    if !page_size.is_power_of_two() {
        let most = (1 << 31) - 1;
        limit("the page size (no power of two)", page_size, most)?;
        limit("the number of slots in such pages", num_slots, most)?;
    }
    for (argument, raw) in &tensors {
        check_allocation(*argument, raw)?;
    }
    let reserved_slot = target.reserved_slot.map_or(-1, |slot| slot as i64);
    let pool = Pool::new(
        dtype,
        [k.strides(), v.strides()],
        page_size.max(1),
        num_slots,
        reserved_slot,
        operand(&slots, 1),
        [k.bases(), v.bases()],
        descales,
    );
    if target.refuse_duplicates {
        refuse_duplicates(&pool, &slots)?;
    }
    Ok(Paged { sources, pool })
}

/// Descales of K and V: there for FP8 and for nothing else, one a layer, finite and positive.
fn descales(
    target: &PoolTarget<'_>,
    dtype: DType,
    layers: usize,
) -> Result<Option<[Vec<f32>; 2]>, Error> {
    let pairs = [
        (Argument::KDescale, &target.k_descale),
        (Argument::VDescale, &target.v_descale),
    ];
    for (argument, values) in pairs {
        match values {
            None if dtype.is_fp8() => {
                return Err(Error::DescaleMissing {
                    argument,
                    dtype,
                    layers,
                });
            }
            Some(_) if !dtype.is_fp8() => {
                return Err(Error::DescaleUnexpected { argument, dtype });
            }
            Some(values) if values.len() != layers => {
                return Err(Error::Shape {
                    argument,
                    found: [values.len()].into(),
                    expected: [layers].into(),
                });
            }
            _ => {}
        }
        for (layer, &found) in values.iter().flatten().enumerate() {
            if !(found > 0.0 && found.is_finite()) {
                return Err(Error::Descale {
                    argument,
                    layer,
                    found,
                });
            }
        }
    }
    Ok(target
        .k_descale
        .clone()
        .zip(target.v_descale.clone())
        .map(|(k, v)| [k, v]))
}

impl Half {
    fn resolve(
        argument: Argument,
        tensors: &PoolTensors<'_>,
        layout: PoolLayout,
        resolve: Resolve<'_>,
    ) -> Result<Self, Error> {
        Ok(Self {
            argument,
            tensors: match tensors {
                PoolTensors::Stacked(view) => Tensors::Stacked(resolved(&view.raw, resolve)?),
                PoolTensors::Layers(views) => Tensors::Layers(
                    views
                        .iter()
                        .map(|view| resolved(&view.raw, resolve))
                        .collect::<Result<_, _>>()?,
                ),
            },
            layout,
        })
    }

    /// The name of the tensor of one layer.
    fn name(&self, layer: usize) -> Argument {
        match self.argument {
            Argument::VPool => Argument::VPoolLayer(layer),
            _ => Argument::KPoolLayer(layer),
        }
    }

    /// Every tensor with its name.
    fn iter(&self) -> impl Iterator<Item = (Argument, Raw)> {
        let (stacked, layers) = match &self.tensors {
            Tensors::Stacked(raw) => (Some((self.argument, *raw)), [].as_slice()),
            Tensors::Layers(layers) => (None, layers.as_slice()),
        };
        let layers = layers.iter().enumerate();
        stacked
            .into_iter()
            .chain(layers.map(|(layer, raw)| (self.name(layer), *raw)))
    }

    /// The first tensor.
    fn first(&self) -> Option<Raw> {
        self.iter().next().map(|(_, raw)| raw)
    }

    /// Rank and number of layers.
    fn check_layers(&self, expected: usize) -> Result<(), Error> {
        let (rank, dimensions) = match &self.tensors {
            Tensors::Stacked(_) => (self.layout.rank() + 1, self.layout.stacked_dimensions()),
            Tensors::Layers(_) => (self.layout.rank(), self.layout.dimensions()),
        };
        for (argument, raw) in self.iter() {
            if raw.layout.shape().len() != rank {
                return Err(Error::PoolRank {
                    argument,
                    found: raw.layout.shape().into(),
                    expected: dimensions,
                });
            }
        }
        let found = match &self.tensors {
            Tensors::Stacked(raw) => raw.layout.shape()[0],
            Tensors::Layers(layers) => layers.len(),
        };
        if found == expected {
            Ok(())
        } else {
            Err(Error::PoolLayers {
                argument: self.argument,
                found,
                expected,
            })
        }
    }

    /// Heads and head dimension are those of the job; pages and page size are `expected`, or the
    /// same for all layers. Returns those two.
    fn check_shapes(
        &self,
        config: &Config,
        expected: Option<(usize, usize)>,
    ) -> Result<(usize, usize), Error> {
        let (token, head) = self.layout.axes();
        let mut extents = expected;
        for (argument, raw) in self.iter() {
            let found = raw.layout.shape();
            let lead = usize::from(matches!(self.tensors, Tensors::Stacked(_)));
            let (pages, page_size) = *extents.get_or_insert_with(|| {
                let page_size = token.map_or(1, |axis| found[lead + axis]);
                (found[lead], page_size)
            });
            let mut expected = found.to_vec();
            expected[lead] = pages;
            if let Some(token) = token {
                expected[lead + token] = page_size;
            }
            expected[lead + head] = config.num_kv_heads;
            expected[lead + self.layout.rank() - 1] = config.head_dim;
            if found != expected {
                return Err(Error::Shape {
                    argument,
                    found: found.into(),
                    expected: Shape(expected),
                });
            }
        }
        Ok(extents.unwrap_or((0, 1)))
    }

    fn check_device_dtype(&self, device: Device, dtype: DType) -> Result<(), Error> {
        for (argument, raw) in self.iter() {
            if raw.dtype.is_index() {
                return Err(Error::Dtype {
                    argument,
                    found: raw.dtype,
                    expected: POOL_DTYPES,
                });
            }
            if (raw.device, raw.dtype) != (device, dtype) {
                return Err(Error::DeviceDtype {
                    argument,
                    device: raw.device,
                    dtype: raw.dtype,
                    expected_device: device,
                    expected_dtype: dtype,
                });
            }
        }
        Ok(())
    }

    /// Innermost strides, and the same strides for all layers where it matters.
    fn check_strides(&self) -> Result<(), Error> {
        for (argument, raw) in self.iter() {
            check_innermost(argument, &raw)?;
        }
        let Tensors::Layers(layers) = &self.tensors else {
            return Ok(());
        };
        let Some(first) = layers.first() else {
            return Ok(());
        };
        let expected = operand(first, self.layout.rank() - 1).strides;
        for (layer, raw) in layers.iter().enumerate() {
            if operand(raw, self.layout.rank() - 1).strides != expected {
                return Err(Error::PoolStrides {
                    argument: self.name(layer),
                    found: raw.layout.strides().to_vec(),
                    expected: first.layout.strides().to_vec(),
                });
            }
        }
        Ok(())
    }

    /// The tensor of one layer; only after [`Self::check_layers`].
    fn layer(&self, layer: usize) -> Raw {
        match &self.tensors {
            Tensors::Stacked(raw) => raw.select(0, layer),
            Tensors::Layers(layers) => layers[layer],
        }
    }

    fn layers(&self) -> usize {
        match &self.tensors {
            Tensors::Stacked(raw) => raw.layout.shape()[0],
            Tensors::Layers(layers) => layers.len(),
        }
    }

    fn bases(&self) -> Vec<u64> {
        (0..self.layers())
            .map(|layer| self.layer(layer).address as u64)
            .collect()
    }

    /// Strides of every layer; only after all checks.
    fn strides(&self) -> PoolStrides {
        let (token, head) = self.layout.axes();
        let strides = match self.layers() {
            0 => [0; 3],
            _ => operand(&self.layer(0), self.layout.rank() - 1).strides,
        };
        PoolStrides {
            page: strides[0],
            token: token.map_or(0, |axis| strides[axis]),
            head: strides[head],
        }
    }
}

/// The tensor lies within one allocation, where the driver knows its size.
#[cfg(feature = "cuda")]
fn check_allocation(argument: Argument, raw: &Raw) -> Result<(), Error> {
    if raw.device == Device::Cpu {
        return Ok(());
    }
    let Some((start, end)) = raw.byte_range().map_err(Error::View)? else {
        return Ok(());
    };
    let (start, end) = (start as u64, end as u64);
    match crate::cuda::allocation(raw.address as u64)? {
        Some(range) if start < range.start || end > range.end => Err(Error::OutsideAllocation {
            argument,
            start,
            end,
            allocation_start: range.start,
            allocation_end: range.end,
        }),
        _ => Ok(()),
    }
}

/// Views of host memory were checked against it when they were made.
#[cfg(not(feature = "cuda"))]
fn check_allocation(_: Argument, _: &Raw) -> Result<(), Error> {
    Ok(())
}

/// No two tokens have the same slot of a pool whose slot list is in host memory.
pub(crate) fn unique_slots(pool: &Pool, tokens: usize) -> Result<(), Error> {
    // SAFETY: the list has an element for each token; it is the plan's, which holds it borrowed.
    let slots = (0..tokens).map(|token| unsafe { crate::cpu::read_slot(&pool.slots, token) });
    let mut first = HashMap::new();
    first
        .try_reserve(tokens)
        .map_err(|_| out_of_memory(tokens.saturating_mul(size_of::<(i64, usize)>())))?;
    for (second, slot) in slots.enumerate() {
        if pool.holds(slot)
            && let Some(first) = first.insert(slot, second)
        {
            return Err(Error::DuplicateSlot {
                slot,
                first,
                second,
            });
        }
    }
    Ok(())
}

fn out_of_memory(bytes: usize) -> Error {
    let argument = Argument::Slots;
    Error::OutOfMemory { argument, bytes }
}

/// As [`unique_slots`], for a list on any device.
fn refuse_duplicates(pool: &Pool, slots: &Raw) -> Result<(), Error> {
    let tokens = slots.layout.shape()[0];
    let Device::Cuda(_) = slots.device else {
        return unique_slots(pool, tokens);
    };
    let Some((start, end)) = slots.byte_range().map_err(Error::View)? else {
        return Ok(());
    };
    let mut copy = Vec::new();
    copy.try_reserve_exact(end - start)
        .map_err(|_| out_of_memory(end - start))?;
    copy.resize(end - start, 0u8);
    copy_from_device(slots, start, &mut copy)?;
    let mut pool = pool.clone();
    pool.slots.address = copy.as_ptr() as usize + (slots.address - start);
    unique_slots(&pool, tokens)
}

#[cfg(feature = "cuda")]
fn copy_from_device(slots: &Raw, start: usize, to: &mut [u8]) -> Result<(), Error> {
    // SAFETY: the bytes from `start` that the view spans, in one allocation.
    unsafe { crate::cuda::copy_to_host(slots.device, start, to) }
}

#[cfg(not(feature = "cuda"))]
fn copy_from_device(_: &Raw, _: usize, _: &mut [u8]) -> Result<(), Error> {
    Err(Error::cuda_not_compiled())
}
