//! Everything that can be known about a job before it runs, checked in one fixed order.
//!
//! The pieces are separate so that each kind of target can interleave its own checks: shapes of
//! the inputs, the target, innermost strides, overlap, alignment, dtypes, devices, limits.

use crate::error::{Argument, Error, Shape};
use crate::footprint::{are_separate, is_injective};
use crate::plan::{Config, Inputs};
use crate::problem::{Operand, Problem, Target};
use crate::tensor::{OUTPUTS, Raw};
use crate::{DType, Device};

/// Tells where the memory behind a view really is.
pub(crate) type Resolve<'r> = &'r dyn Fn(&Raw) -> Result<Device, Error>;

/// The resolver of builds that cannot ask a driver: believes the view.
#[cfg_attr(feature = "cuda", allow(dead_code))]
pub(crate) fn believe(raw: &Raw) -> Result<Device, Error> {
    Ok(raw.device)
}

/// The same view, with the device that its memory is really on. A view that touches no memory is
/// believed.
pub(crate) fn resolved(raw: &Raw, resolve: Resolve<'_>) -> Result<Raw, Error> {
    let device = match raw.layout.span().map_err(Error::View)? {
        Some(_) => resolve(raw)?,
        None => raw.device,
    };
    Ok(Raw { device, ..*raw })
}

pub(crate) use pool::{POOL_DTYPES, Paged, paged, unique_slots};

const FLOATS: &str = "bfloat16, float16 or float32";
const FLOAT32: &str = "float32";
const INDICES: &str = "int64 or int32";

/// The inputs of a job, on their real devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sources {
    kv: Raw,
    weight: Raw,
    eps: Raw,
    table: Raw,
    positions: Raw,
    value_scale: Option<Raw>,
}

/// A job that passed every check; outputs that are still to be allocated are `None`.
#[derive(Debug)]
pub(crate) struct Dense {
    pub(crate) sources: Sources,
    pub(crate) k: Option<Raw>,
    pub(crate) v: Option<Raw>,
}

/// All checks of a job with dense outputs, in the order of the contract.
pub(crate) fn dense(
    config: &Config,
    inputs: &Inputs<'_>,
    outputs: [Option<&Raw>; 2],
    resolve: Resolve<'_>,
) -> Result<Dense, Error> {
    let sources = Sources::resolve(inputs, resolve)?;
    let mut found = [None, None];
    for (found, output) in found.iter_mut().zip(outputs) {
        *found = output.map(|raw| resolved(raw, resolve)).transpose()?;
    }
    let [k, v] = found;

    sources.check_shapes(config)?;
    let expected = sources.output_shape(config);
    let outputs = || {
        OUTPUTS
            .into_iter()
            .zip([k, v])
            .filter_map(|(argument, raw)| Some((argument, raw?)))
    };
    for (argument, raw) in outputs() {
        if raw.layout.shape() != expected {
            return Err(Error::Shape {
                argument,
                found: raw.layout.shape().into(),
                expected: expected.into(),
            });
        }
        if (raw.device, raw.dtype) != (sources.kv.device, sources.kv.dtype) {
            return Err(Error::DeviceDtype {
                argument,
                device: raw.device,
                dtype: raw.dtype,
                expected_device: sources.kv.device,
                expected_dtype: sources.kv.dtype,
            });
        }
    }
    sources.check_strides()?;
    for (argument, raw) in outputs() {
        check_innermost(argument, &raw)?;
    }
    check_overlap(outputs(), &sources)?;
    for (argument, raw) in sources.iter().chain(outputs()) {
        check_alignment(argument, &raw)?;
    }
    sources.check_dtypes()?;
    sources.check_devices()?;
    sources.check_limits(config)?;
    Ok(Dense { sources, k, v })
}

impl Sources {
    /// The inputs with their devices resolved; nothing else is checked yet.
    pub(crate) fn resolve(inputs: &Inputs<'_>, resolve: Resolve<'_>) -> Result<Self, Error> {
        Ok(Self {
            kv: resolved(&inputs.kv.raw, resolve)?,
            weight: resolved(&inputs.k_norm_weight.raw, resolve)?,
            eps: resolved(&inputs.eps.raw, resolve)?,
            table: resolved(&inputs.cos_sin_cache.raw, resolve)?,
            positions: resolved(&inputs.positions.raw, resolve)?,
            value_scale: inputs
                .value_scale
                .map(|view| resolved(&view.raw, resolve))
                .transpose()?,
        })
    }

    /// Every input with its name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Argument, Raw)> {
        [
            (Argument::Kv, Some(self.kv)),
            (Argument::KNormWeight, Some(self.weight)),
            (Argument::Eps, Some(self.eps)),
            (Argument::CosSinCache, Some(self.table)),
            (Argument::Positions, Some(self.positions)),
            (Argument::ValueScale, self.value_scale),
        ]
        .into_iter()
        .filter_map(|(argument, raw)| Some((argument, raw?)))
    }

    /// Device of `kv`, on which everything else must be.
    pub(crate) fn device(&self) -> Device {
        self.kv.device
    }

    /// Address of `kv`.
    pub(crate) fn kv_address(&self) -> usize {
        self.kv.address
    }

    /// Dtype of `kv`.
    pub(crate) fn dtype(&self) -> DType {
        self.kv.dtype
    }

    /// Number of tokens; only after [`Self::check_shapes`].
    pub(crate) fn tokens(&self) -> usize {
        self.kv.layout.shape()[0]
    }

    /// Number of layers; only after [`Self::check_shapes`].
    pub(crate) fn layers(&self) -> usize {
        self.kv.layout.shape()[1]
    }

    /// Shape of a dense output; only after [`Self::check_shapes`].
    pub(crate) fn output_shape(&self, config: &Config) -> [usize; 4] {
        [
            self.layers(),
            self.tokens(),
            config.num_kv_heads,
            config.head_dim,
        ]
    }

    /// Ranks and shapes, each against `kv` and the configuration.
    pub(crate) fn check_shapes(&self, config: &Config) -> Result<(), Error> {
        let Config {
            num_kv_heads,
            head_dim,
            rotary_dim,
            ..
        } = *config;
        let kv = self.kv.layout.shape();
        let &[tokens, layers, width] = kv else {
            return Err(Error::KvRank { found: kv.into() });
        };
        let expected = num_kv_heads.saturating_mul(head_dim).saturating_mul(2);
        if width != expected {
            return Err(Error::KvLastDim {
                found: width,
                expected,
                num_kv_heads,
                head_dim,
            });
        }
        let pairs = |dim: usize, most: usize| dim.is_multiple_of(2) && (2..=most).contains(&dim);
        if num_kv_heads == 0 || !pairs(head_dim, 1024) || !pairs(rotary_dim, head_dim) {
            return Err(Error::Geometry {
                head_dim,
                rotary_dim,
                num_kv_heads,
            });
        }
        check_shape(Argument::KNormWeight, &self.weight, &[layers, head_dim])?;
        check_shape(Argument::Eps, &self.eps, &[layers])?;
        if let Some(value_scale) = &self.value_scale {
            check_shape(Argument::ValueScale, value_scale, &[layers])?;
        }
        let table = self.table.layout.shape();
        if !matches!(table, &[_, width] if width == rotary_dim) {
            return Err(Error::TableShape {
                found: table.into(),
                rotary_dim,
            });
        }
        let positions = self.positions.layout.shape();
        if positions.len() != 1 {
            return Err(Error::PositionsRank {
                found: positions.into(),
                tokens,
            });
        }
        check_shape(Argument::Positions, &self.positions, &[tokens])
    }

    /// Innermost strides; `positions` may have any.
    pub(crate) fn check_strides(&self) -> Result<(), Error> {
        self.iter()
            .filter(|(argument, _)| *argument != Argument::Positions)
            .try_for_each(|(argument, raw)| check_innermost(argument, &raw))
    }

    /// The dtype of each input.
    pub(crate) fn check_dtypes(&self) -> Result<(), Error> {
        self.iter().try_for_each(|(argument, raw)| {
            let found = raw.dtype;
            let (valid, expected) = match argument {
                Argument::Positions => (found.is_index(), INDICES),
                Argument::Eps | Argument::ValueScale => (found == DType::F32, FLOAT32),
                _ => (found.is_float(), FLOATS),
            };
            if valid {
                Ok(())
            } else {
                Err(Error::Dtype {
                    argument,
                    found,
                    expected,
                })
            }
        })
    }

    /// Every input is where `kv` is.
    pub(crate) fn check_devices(&self) -> Result<(), Error> {
        let expected = self.kv.device;
        self.iter().try_for_each(|(argument, raw)| {
            if raw.device == expected {
                Ok(())
            } else {
                Err(Error::InputDevice {
                    argument,
                    found: raw.device,
                    expected,
                })
            }
        })
    }

    /// Counts that the kernels and the status record keep in 32 bits.
    pub(crate) fn check_limits(&self, config: &Config) -> Result<(), Error> {
        for (what, found) in [
            ("the number of tokens", self.tokens()),
            ("the number of layers", self.layers()),
            ("the number of heads", config.num_kv_heads),
        ] {
            if u32::try_from(found).is_err() {
                return Err(Error::TooLarge {
                    what,
                    found: found as u64,
                    limit: u64::from(u32::MAX),
                });
            }
        }
        Ok(())
    }

    /// The job that the backends run; only after all checks.
    pub(crate) fn problem(&self, config: Config, target: Target) -> Problem {
        Problem {
            device: self.kv.device,
            config,
            tokens: self.tokens(),
            layers: self.layers(),
            table_rows: self.table.layout.shape()[0],
            kv: operand(&self.kv, 2),
            weight: operand(&self.weight, 1),
            eps: operand(&self.eps, 0),
            table: operand(&self.table, 1),
            positions: operand(&self.positions, 1),
            value_scale: self.value_scale.as_ref().map(|raw| operand(raw, 0)),
            target,
        }
    }
}

/// A checked view as numbers: byte strides of its first `axes` dimensions.
///
/// The stride of a dimension that is never stepped along is 0, since it may be any number. The
/// others cannot overflow: the view was built from offsets in bytes that fit an address.
pub(crate) fn operand(raw: &Raw, axes: usize) -> Operand {
    let size = raw.dtype.size() as i64;
    let empty = raw.layout.shape().contains(&0);
    let mut strides = [0; 3];
    for ((to, &stride), &extent) in strides
        .iter_mut()
        .zip(raw.layout.strides())
        .zip(raw.layout.shape())
        .take(axes)
    {
        if extent > 1 && !empty {
            *to = stride as i64 * size;
        }
    }
    Operand {
        address: raw.address,
        dtype: raw.dtype,
        strides,
    }
}

fn check_shape(argument: Argument, raw: &Raw, expected: &[usize]) -> Result<(), Error> {
    if raw.layout.shape() == expected {
        return Ok(());
    }
    Err(Error::Shape {
        argument,
        found: raw.layout.shape().into(),
        expected: Shape::from(expected),
    })
}

/// The last dimension has stride 1, unless nothing steps along it.
pub(crate) fn check_innermost(argument: Argument, raw: &Raw) -> Result<(), Error> {
    match (raw.layout.shape().last(), raw.layout.strides().last()) {
        (Some(&extent), Some(&found)) if extent > 1 && found != 1 => {
            Err(Error::InnermostStride { argument, found })
        }
        _ => Ok(()),
    }
}

/// Device memory is accessed in whole elements, so their addresses must be multiples of their
/// size. Host memory may lie anywhere: bytes of a file often do.
pub(crate) fn check_alignment(argument: Argument, raw: &Raw) -> Result<(), Error> {
    let expected = raw.dtype.size();
    let touches_memory = !raw.layout.shape().contains(&0);
    if raw.device != Device::Cpu && touches_memory && !raw.address.is_multiple_of(expected) {
        return Err(Error::Alignment {
            argument,
            address: raw.address as u64,
            expected,
        });
    }
    Ok(())
}

/// Every output element has memory of its own: no two elements of one output, of two outputs, or
/// of an output and an input share a byte.
pub(crate) fn check_overlap(
    outputs: impl Iterator<Item = (Argument, Raw)> + Clone,
    sources: &Sources,
) -> Result<(), Error> {
    let (outputs, inputs): (Vec<_>, Vec<_>) = (outputs.collect(), sources.iter().collect());
    check_apart(&outputs, &inputs)
}

/// The same for any lists of outputs and inputs.
pub(crate) fn check_apart(
    outputs: &[(Argument, Raw)],
    inputs: &[(Argument, Raw)],
) -> Result<(), Error> {
    let meets = |argument, other| Error::Overlap { argument, other };
    for &(argument, raw) in outputs {
        if !is_injective(&raw).map_err(Error::View)? {
            return Err(meets(argument, argument));
        }
    }
    // In the order of their first bytes, each output is compared with those that begin before it
    // ends: there may be two for each of very many layers.
    let mut spans = Vec::with_capacity(outputs.len());
    for (index, (_, raw)) in outputs.iter().enumerate() {
        if let Some((start, end)) = raw.byte_range().map_err(Error::View)? {
            spans.push((start, end, index));
        }
    }
    spans.sort_unstable();
    for (at, &(_, end, a)) in spans.iter().enumerate() {
        for &(start, _, b) in &spans[at + 1..] {
            if start >= end {
                break;
            }
            let (first, second) = (outputs[a.min(b)], outputs[a.max(b)]);
            if !are_separate(&first.1, &second.1).map_err(Error::View)? {
                return Err(meets(first.0, second.0));
            }
        }
    }
    for &(argument, raw) in outputs {
        for &(other, other_raw) in inputs {
            if !are_separate(&raw, &other_raw).map_err(Error::View)? {
                return Err(meets(argument, other));
            }
        }
    }
    Ok(())
}

mod pool;
#[cfg(test)]
mod tests;
