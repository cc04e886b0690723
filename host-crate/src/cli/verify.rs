//! How far a result is from a reference, and whether that is within the contract.
//!
//! Everything here is computed in f64 from the stored bytes, independently of the arithmetic and
//! the conversions of the library, so that a fault there does not hide itself.

use fused_kv::{DType, NormWeight, RopeStyle};
use rayon::prelude::*;
use serde::Serialize;

use super::pool::{PoolJob, index};
use super::run::Job;
use crate::io::HostTensor;

/// Part of the allowed distance that grows with the rotated pair: the contract's bound of the
/// f32 arithmetic before the one rounding at the store.
const ARITHMETIC_BOUND: f64 = 4e-6;

/// Distance of one output from its reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Distance {
    /// Elements compared.
    pub(crate) elements: u64,
    /// Elements with other bits (for K, and for V where it is computed: NaN equals NaN).
    pub(crate) differing: u64,
    /// Elements further away than the contract allows.
    pub(crate) beyond_contract: u64,
    /// Largest distance in units in the last place, where neither side is NaN.
    pub(crate) max_ulp: u64,
    /// Elements of which only one side is NaN; they are beyond the contract.
    pub(crate) nan_mismatches: u64,
}

impl Distance {
    fn merge(self, other: Self) -> Self {
        Self {
            elements: self.elements + other.elements,
            differing: self.differing + other.differing,
            beyond_contract: self.beyond_contract + other.beyond_contract,
            max_ulp: self.max_ulp.max(other.max_ulp),
            nan_mismatches: self.nan_mismatches + other.nan_mismatches,
        }
    }

    /// Whether the contract holds.
    pub(crate) fn within_contract(&self) -> bool {
        self.beyond_contract == 0
    }
}

/// A binary floating-point format.
#[derive(Clone, Copy, Debug)]
struct Format {
    size: usize,
    exponent_bits: u32,
    mantissa_bits: u32,
    /// No infinities; only the code with all bits set is NaN (`e4m3fn`).
    finite_only: bool,
    /// Results beyond the largest finite value become that value (8-bit formats).
    saturates: bool,
}

impl Format {
    fn of(dtype: DType) -> Option<Self> {
        let (exponent_bits, mantissa_bits) = match dtype {
            DType::Bf16 => (8, 7),
            DType::F16 => (5, 10),
            DType::F32 => (8, 23),
            DType::F8E4M3Fn => (4, 3),
            DType::F8E5M2 => (5, 2),
            _ => return None,
        };
        Some(Self {
            size: dtype.size(),
            exponent_bits,
            mantissa_bits,
            finite_only: dtype == DType::F8E4M3Fn,
            saturates: dtype.size() == 1,
        })
    }

    fn min_exponent(self) -> i32 {
        2 - (1 << (self.exponent_bits - 1))
    }

    fn value(self, bits: u32) -> f64 {
        let mantissa = bits & ((1 << self.mantissa_bits) - 1);
        let all_ones = (1 << self.exponent_bits) - 1;
        let exponent = (bits >> self.mantissa_bits) & all_ones;
        let sign = match bits >> (self.mantissa_bits + self.exponent_bits) {
            0 => 1.0,
            _ => -1.0,
        };
        let scale = pow2(self.min_exponent() - self.mantissa_bits as i32);
        let special = exponent == all_ones
            && (!self.finite_only || mantissa == (1 << self.mantissa_bits) - 1);
        match (special, exponent) {
            (true, _) if mantissa == 0 => sign * f64::INFINITY,
            (true, _) => f64::NAN,
            (_, 0) => sign * f64::from(mantissa) * scale,
            (_, exponent) => {
                let whole = f64::from(mantissa | (1 << self.mantissa_bits));
                sign * whole * scale * pow2(exponent as i32 - 1)
            }
        }
    }

    /// Position of a value on the number line of this format: neighbours differ by 1, and both
    /// zeros are 0.
    fn ordinal(self, bits: u32) -> i64 {
        let sign_bit = 1 << (self.mantissa_bits + self.exponent_bits);
        let magnitude = i64::from(bits & (sign_bit - 1));
        if bits & sign_bit == 0 {
            magnitude
        } else {
            -magnitude
        }
    }

    /// The unit in the last place of a finite magnitude.
    fn ulp(self, magnitude: f64) -> f64 {
        let exponent = ((magnitude.to_bits() >> 52) & 0x7ff) as i32 - 1023;
        pow2(exponent.max(self.min_exponent()) - self.mantissa_bits as i32)
    }

    fn bits(self, bytes: &[u8], index: usize) -> u32 {
        let element = &bytes[index * self.size..(index + 1) * self.size];
        element
            .iter()
            .rev()
            .fold(0, |bits, &byte| bits << 8 | u32::from(byte))
    }

    fn get(self, bytes: &[u8], index: usize) -> f64 {
        self.value(self.bits(bytes, index))
    }
}

/// 2^exponent, for exponents of normal f64 numbers.
fn pow2(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// What may separate two elements.
#[derive(Clone, Copy, Debug)]
enum Allowance {
    /// Nothing: the bits are the same.
    Bits,
    /// Nothing, but NaN equals NaN.
    BitsOrNan,
    /// One unit in the last place (at the larger magnitude) and this much more.
    OneUlpAnd(f64),
}

fn compare(format: Format, ours: u32, theirs: u32, allowance: Allowance) -> Distance {
    let (a, b) = (format.value(ours), format.value(theirs));
    let distance = Distance {
        elements: 1,
        ..Distance::default()
    };
    if a.is_nan() || b.is_nan() {
        let mismatch = a.is_nan() != b.is_nan();
        let differs = match allowance {
            Allowance::Bits => ours != theirs,
            _ => mismatch,
        };
        return Distance {
            differing: u64::from(differs),
            beyond_contract: u64::from(differs),
            nan_mismatches: u64::from(mismatch),
            ..distance
        };
    }
    let max_ulp = format.ordinal(ours).abs_diff(format.ordinal(theirs));
    let within = match allowance {
        Allowance::Bits | Allowance::BitsOrNan => ours == theirs,
        // An infinity is never what a format that saturates should hold.
        _ if format.saturates && a.is_infinite() != b.is_infinite() => false,
        // Neighbours are fine without a look at the bound: this covers an infinity beside the
        // largest finite number as well.
        Allowance::OneUlpAnd(more) => {
            let magnitude = a.abs().max(b.abs());
            max_ulp <= 1 || magnitude.is_finite() && (a - b).abs() <= format.ulp(magnitude) + more
        }
    };
    Distance {
        differing: u64::from(ours != theirs),
        beyond_contract: u64::from(!within),
        max_ulp,
        ..distance
    }
}

/// Splits `[L, T, H, D]` outputs into rows and adds up what `row` finds; `row` gets layer, token,
/// head, and both rows.
fn by_row(
    head_dim: usize,
    format: Format,
    ours: &HostTensor,
    theirs: &HostTensor,
    row: impl Fn([usize; 3], &[u8], &[u8]) -> Distance + Sync,
) -> Distance {
    let row_bytes = head_dim * format.size;
    let &[_, tokens, heads, _] = ours.shape.as_slice() else {
        return Distance::default();
    };
    ours.bytes
        .par_chunks_exact(row_bytes)
        .zip(theirs.bytes.par_chunks_exact(row_bytes))
        .enumerate()
        .map(|(index, (ours, theirs))| {
            let at = [
                index / (tokens * heads),
                index / heads % tokens,
                index % heads,
            ];
            row(at, ours, theirs)
        })
        .reduce(Distance::default, Distance::merge)
}

/// What the bound of K is computed from: the types of a job's inputs.
struct Bounds<'j> {
    job: &'j Job,
    kv: Format,
    weight: Format,
    eps: Format,
    table: Format,
    layers: usize,
    width: usize,
}

impl<'j> Bounds<'j> {
    fn new(job: &'j Job) -> Option<Self> {
        let &[_, layers, width] = job.kv.shape.as_slice() else {
            return None;
        };
        Some(Self {
            job,
            kv: Format::of(job.kv.dtype)?,
            weight: Format::of(job.k_norm_weight.dtype)?,
            eps: Format::of(job.eps.dtype)?,
            table: Format::of(job.cos_sin_cache.dtype)?,
            layers,
            width,
        })
    }

    /// `|first * cos| + |second * sin|` of each element of a row of K (its own magnitude where it
    /// is not rotated); `None` for a token whose position is not in the table.
    fn row(&self, layer: usize, token: usize, head: usize) -> Option<Vec<f64>> {
        let job = self.job;
        let head_dim = job.config.head_dim;
        let half = job.config.rotary_dim / 2;
        let table_rows = *job.cos_sin_cache.shape.first()?;
        let position = usize::try_from(index(&job.positions, token)?).ok()?;
        if position >= table_rows {
            return None;
        }
        let start = (token * self.layers + layer) * self.width + head * head_dim;
        let mut normed: Vec<f64> = (0..head_dim)
            .map(|i| self.kv.get(&job.kv.bytes, start + i))
            .collect();
        let mean = normed.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
        let inv = 1.0 / (mean + self.eps.get(&job.eps.bytes, layer)).sqrt();
        for (i, x) in normed.iter_mut().enumerate() {
            let w = self
                .weight
                .get(&job.k_norm_weight.bytes, layer * head_dim + i);
            *x *= inv
                * match job.config.norm_weight {
                    NormWeight::Plain => w,
                    NormWeight::Offset => 1.0 + w,
                };
        }
        let mut bound: Vec<f64> = normed.iter().map(|n| n.abs()).collect();
        for i in 0..half {
            let (first, second) = match job.config.rope_style {
                RopeStyle::Neox => (i, i + half),
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            };
            let angle = position * 2 * half + i;
            let cos = self.table.get(&job.cos_sin_cache.bytes, angle).abs();
            let sin = self.table.get(&job.cos_sin_cache.bytes, angle + half).abs();
            let (a, b) = (normed[first].abs(), normed[second].abs());
            bound[first] = a * cos + b * sin;
            bound[second] = b * cos + a * sin;
        }
        Some(bound)
    }
}

/// K against a reference: each element within one unit in the last place of the output type plus
/// [`ARITHMETIC_BOUND`] times `|first * cos| + |second * sin|` (for elements that are not
/// rotated, times their own magnitude). `theirs` has the shape and dtype of `ours`; `None` when those
/// are no output of `job`.
pub(crate) fn k(job: &Job, ours: &HostTensor, theirs: &HostTensor) -> Option<Distance> {
    let format = Format::of(ours.dtype)?;
    let bounds = Bounds::new(job)?;
    let (tokens, layers) = (job.kv.shape.first(), job.kv.shape.get(1));
    if ours.shape.first() != layers || ours.shape.get(1) != tokens {
        return None;
    }
    Some(by_row(
        job.config.head_dim,
        format,
        ours,
        theirs,
        |[layer, token, head], ours, theirs| {
            let Some(bound) = bounds.row(layer, token, head) else {
                // The job was refused for this position; nothing to compare.
                return Distance::default();
            };
            let allowances = bound
                .iter()
                .map(|bound| Allowance::OneUlpAnd(ARITHMETIC_BOUND * bound));
            compare_row(format, ours, theirs, allowances)
        },
    ))
}

/// Element after element of two rows.
fn compare_row(
    format: Format,
    ours: &[u8],
    theirs: &[u8],
    allowances: impl Iterator<Item = Allowance>,
) -> Distance {
    allowances
        .enumerate()
        .map(|(i, allowance)| {
            compare(
                format,
                format.bits(ours, i),
                format.bits(theirs, i),
                allowance,
            )
        })
        .fold(Distance::default(), Distance::merge)
}

/// One half of a pool against a reference of the whole half, likewise: rows that the job wrote as
/// [`k`] and [`v`] have it, with the bound of K divided as K is; every other byte is the same.
pub(crate) fn pool(
    job: &Job,
    pool: &PoolJob,
    is_k: bool,
    ours: &HostTensor,
    theirs: &HostTensor,
) -> Option<Distance> {
    let format = Format::of(ours.dtype)?;
    let bounds = Bounds::new(job)?;
    let (heads, head_dim) = (job.config.num_kv_heads, job.config.head_dim);
    let writers = pool.writers(job);
    let mut rows: Vec<(usize, [usize; 3])> = writers
        .iter()
        .flat_map(|(&slot, &token)| {
            (0..bounds.layers)
                .flat_map(move |layer| (0..heads).map(move |head| (slot, [layer, token, head])))
        })
        .map(|(slot, row)| (pool.row(ours, row[0], slot, row[2]), row))
        .collect();
    rows.par_sort_unstable_by_key(|&(first, _)| first);
    let (dtype, size) = (ours.dtype, format.size);
    let written = rows
        .par_iter()
        .map(|&(first, [layer, token, head])| {
            let descale = pool
                .k_descale
                .as_deref()
                .map_or(1.0, |k| f64::from(k[layer]));
            let range = first * size..(first + head_dim) * size;
            let (ours, theirs) = (&ours.bytes[range.clone()], &theirs.bytes[range]);
            if !is_k {
                return compare_row(format, ours, theirs, v_allowances(job, dtype));
            }
            let bound = bounds.row(layer, token, head).unwrap_or_default();
            let allowances = bound
                .into_iter()
                .map(|bound| Allowance::OneUlpAnd(ARITHMETIC_BOUND * bound / descale));
            compare_row(format, ours, theirs, allowances)
        })
        .reduce(Distance::default, Distance::merge);
    // Nothing differs between those rows.
    let ends = rows.iter().map(|&(first, _)| (first + head_dim) * size);
    let starts = rows.iter().map(|&(first, _)| first * size);
    let untouched: u64 = std::iter::once(0)
        .chain(ends)
        .zip(starts.chain([ours.bytes.len()]))
        .map(|(from, to)| (&ours.bytes[from..to], &theirs.bytes[from..to]))
        .filter(|(ours, theirs)| ours != theirs)
        .map(|(ours, theirs)| {
            let pairs = ours.chunks_exact(size).zip(theirs.chunks_exact(size));
            pairs.filter(|(ours, theirs)| ours != theirs).count() as u64
        })
        .sum();
    Some(Distance {
        elements: (ours.bytes.len() / size) as u64,
        differing: written.differing + untouched,
        beyond_contract: written.beyond_contract + untouched,
        ..written
    })
}

/// V against a reference, likewise; see [`v_allowances`].
pub(crate) fn v(job: &Job, ours: &HostTensor, theirs: &HostTensor) -> Option<Distance> {
    let format = Format::of(ours.dtype)?;
    let (head_dim, dtype) = (job.config.head_dim, ours.dtype);
    Some(by_row(head_dim, format, ours, theirs, |_, ours, theirs| {
        compare_row(format, ours, theirs, v_allowances(job, dtype))
    }))
}

/// A row of V that is stored as `dtype`: bit for bit where it is copied, or converted (its one
/// rounding is determined, the bits of a NaN are not), one unit in the last place where it is scaled.
fn v_allowances(job: &Job, dtype: DType) -> impl Iterator<Item = Allowance> {
    let allowance = match &job.value_scale {
        Some(_) => Allowance::OneUlpAnd(0.0),
        None if dtype == job.kv.dtype => Allowance::Bits,
        None => Allowance::BitsOrNan,
    };
    std::iter::repeat_n(allowance, job.config.head_dim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_agree_with_the_half_crate() {
        let [bf16, f16] = [DType::Bf16, DType::F16].map(|dtype| Format::of(dtype).unwrap());
        for bits in 0..=u16::MAX {
            let pairs = [
                (bf16, half::bf16::from_bits(bits).to_f64()),
                (f16, half::f16::from_bits(bits).to_f64()),
            ];
            for (format, expected) in pairs {
                let found = format.value(u32::from(bits));
                assert!(found == expected || (found.is_nan() && expected.is_nan()));
                assert_eq!(found.is_sign_negative() && !found.is_nan(), {
                    expected.is_sign_negative() && !expected.is_nan()
                });
            }
        }
        let f32s = Format::of(DType::F32).unwrap();
        for value in [0.0, -0.0, 1.0, 1e-45, 3.4e38, -7.25, f32::INFINITY] {
            assert_eq!(f32s.value(value.to_bits()), f64::from(value));
        }
        let e4m3 = Format::of(DType::F8E4M3Fn).unwrap();
        assert_eq!(e4m3.value(0x38), 1.0);
        assert_eq!(e4m3.value(0x7e), 448.0);
        assert!(e4m3.value(0x7f).is_nan());
        let e5m2 = Format::of(DType::F8E5M2).unwrap();
        assert_eq!(e5m2.value(0x7b), 57344.0);
        assert_eq!(e5m2.value(0xfc), f64::NEG_INFINITY);
    }

    #[test]
    fn the_unit_in_the_last_place_is_the_step_to_the_next_number() {
        for dtype in [DType::Bf16, DType::F16, DType::F32] {
            let format = Format::of(dtype).unwrap();
            let largest = ((1 << format.exponent_bits) - 1) << format.mantissa_bits;
            for bits in (0..largest - 1).step_by(largest as usize / 10_000 + 1) {
                let (here, next) = (format.value(bits), format.value(bits + 1));
                assert_eq!(format.ulp(here), next - here, "{dtype} {bits:#x}");
            }
        }
    }

    fn bf16(value: f32) -> u32 {
        u32::from(half::bf16::from_f32(value).to_bits())
    }

    #[test]
    fn neighbours_pass_and_others_do_not() {
        let format = Format::of(DType::Bf16).unwrap();
        let one = bf16(1.0);
        let check = |a, b, allowance| compare(format, a, b, allowance);
        let strict = Allowance::OneUlpAnd(0.0);
        assert!(check(one, one + 1, strict).within_contract());
        assert!(!check(one, one + 2, strict).within_contract());
        assert_eq!(check(one, one + 2, strict).max_ulp, 2);
        assert!(check(one, one + 2, Allowance::OneUlpAnd(0.01)).within_contract());
        assert!(!check(one, one + 1, Allowance::Bits).within_contract());
        // Both sides of zero, one step each.
        assert_eq!(check(1, 0x8001, strict).max_ulp, 2);
        assert_eq!(check(0, 0x8000, strict).max_ulp, 0);
        // NaN matches NaN, of any payload; V's bits must match.
        assert!(check(0x7fff, 0x7fc0, strict).within_contract());
        assert!(!check(0x7fff, one, strict).within_contract());
        assert_eq!(check(0x7fff, one, strict).nan_mismatches, 1);
        assert!(!check(0x7fff, 0x7fc0, Allowance::Bits).within_contract());
        // An infinity passes beside the largest number only, whatever the bound.
        let wide = Allowance::OneUlpAnd(f64::INFINITY);
        assert!(check(0x7f80, 0x7f7f, strict).within_contract());
        assert!(!check(0x7f80, one, wide).within_contract());
    }
}
