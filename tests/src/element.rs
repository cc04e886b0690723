//! Elements as bits and as numbers, independent of the library's conversions.

use std::sync::OnceLock;

use fused_kv::DType;
use half::{bf16, f16};

/// The NaN that a computed NaN is stored as.
pub fn canonical_nan(dtype: DType) -> u32 {
    match dtype {
        DType::Bf16 | DType::F16 => 0x7fff,
        DType::F32 => 0x7fff_ffff,
        DType::F8E4M3Fn | DType::F8E5M2 => 0x7f,
        other => panic!("{other} has no canonical NaN"),
    }
}

/// Bits of a float type as a number; exact.
pub fn decode(dtype: DType, bits: u32) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_bits(bits as u16).to_f32(),
        DType::F16 => f16::from_bits(bits as u16).to_f32(),
        DType::F32 => f32::from_bits(bits),
        DType::F8E4M3Fn => decode_8(bits as u8, 3, |exponent, mantissa| {
            (exponent == 15 && mantissa == 7).then_some(f32::NAN)
        }),
        DType::F8E5M2 => decode_8(bits as u8, 2, |exponent, mantissa| {
            match (exponent, mantissa) {
                (31, 0) => Some(f32::INFINITY),
                (31, _) => Some(f32::NAN),
                _ => None,
            }
        }),
        other => panic!("{other} is not a float type of the contract"),
    }
}

/// An 8-bit float from its fields: sign, exponent, `mantissa_bits` of mantissa.
fn decode_8(bits: u8, mantissa_bits: u32, special: impl Fn(u32, u32) -> Option<f32>) -> f32 {
    let magnitude = u32::from(bits & 0x7f);
    let (exponent, mantissa) = (
        magnitude >> mantissa_bits,
        magnitude & ((1 << mantissa_bits) - 1),
    );
    let bias = (1 << (6 - mantissa_bits)) - 1;
    let value = special(exponent, mantissa).unwrap_or_else(|| {
        let one = 1 << mantissa_bits;
        let (whole, exponent) = match exponent {
            0 => (mantissa, 1),
            _ => (one + mantissa, exponent as i32),
        };
        whole as f32 * 2f32.powi(exponent - bias - mantissa_bits as i32)
    });
    if bits & 0x80 == 0 { value } else { -value }
}

/// The finite values of an 8-bit float, from 0 up.
fn values_8(dtype: DType) -> &'static [f64] {
    static E4M3: OnceLock<Vec<f64>> = OnceLock::new();
    static E5M2: OnceLock<Vec<f64>> = OnceLock::new();
    let (cell, count) = match dtype {
        DType::F8E4M3Fn => (&E4M3, 0x7f),
        _ => (&E5M2, 0x7c),
    };
    cell.get_or_init(|| (0..count).map(|bits| decode(dtype, bits).into()).collect())
}

/// The nearest of the values, the even one of two equally near; the largest beyond the largest.
fn encode_8(dtype: DType, value: f32) -> u32 {
    let values = values_8(dtype);
    let magnitude = f64::from(value.abs());
    let above = values.partition_point(|&x| x < magnitude);
    let code = match (above.checked_sub(1), values.get(above)) {
        (None, _) => 0,
        (Some(below), None) => below,
        (Some(below), Some(next)) => {
            let (down, up) = (magnitude - values[below], next - magnitude);
            if down < up || (down == up && below % 2 == 0) {
                below
            } else {
                above
            }
        }
    };
    code as u32 | if value.is_sign_negative() { 0x80 } else { 0 }
}

/// A number rounded once, to nearest even, to the bits of a float type.
pub fn encode(dtype: DType, value: f32) -> u32 {
    if value.is_nan() {
        return canonical_nan(dtype);
    }
    match dtype {
        DType::Bf16 => bf16::from_f32(value).to_bits().into(),
        DType::F16 => f16::from_f32(value).to_bits().into(),
        DType::F32 => value.to_bits(),
        DType::F8E4M3Fn | DType::F8E5M2 => encode_8(dtype, value),
        other => panic!("{other} is not a float type of the contract"),
    }
}

/// Bytes of one element, little endian, to its bits.
pub fn bits_of(bytes: &[u8]) -> u32 {
    let mut word = [0; 4];
    word[..bytes.len()].copy_from_slice(bytes);
    u32::from_le_bytes(word)
}

/// The values as contiguous bytes of `dtype`, each rounded once.
pub fn encode_all(dtype: DType, values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        bytes.extend_from_slice(&encode(dtype, value).to_le_bytes()[..dtype.size()]);
    }
    bytes
}

/// Integers as contiguous bytes of an index type.
pub fn encode_index(dtype: DType, values: &[i64]) -> Vec<u8> {
    match dtype {
        DType::I64 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::I32 => values
            .iter()
            .flat_map(|&v| i32::try_from(v).expect("fits i32").to_le_bytes())
            .collect(),
        other => panic!("{other} is not an index type"),
    }
}

/// Contiguous bytes of an index type as integers.
pub fn decode_index(dtype: DType, bytes: &[u8]) -> Vec<i64> {
    match dtype {
        DType::I64 => bytes
            .chunks_exact(8)
            .map(|c| i64::from_le_bytes(c.try_into().expect("eight bytes")))
            .collect(),
        DType::I32 => bytes
            .chunks_exact(4)
            .map(|c| i32::from_le_bytes(c.try_into().expect("four bytes")).into())
            .collect(),
        other => panic!("{other} is not an index type"),
    }
}

/// Distance between neighbouring values of `dtype` at the magnitude of `value` (of the binade that
/// holds it; never below the step of the subnormals).
pub fn ulp(dtype: DType, value: f64) -> f64 {
    let (mantissa, lowest) = match dtype {
        DType::Bf16 => (7, -126),
        DType::F16 => (10, -14),
        DType::F32 => (23, -126),
        other => panic!("{other} is not a float type of the contract"),
    };
    let exponent = ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    2f64.powi(exponent.max(lowest) - mantissa)
}

/// Largest finite value of a float type.
pub fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => bf16::MAX.to_f64(),
        DType::F16 => f16::MAX.to_f64(),
        DType::F32 => f32::MAX.into(),
        other => panic!("{other} is not a float type of the contract"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ulp_is_the_distance_to_the_next_value() {
        for (dtype, bits) in [
            (DType::Bf16, 0x3f80u32),
            (DType::Bf16, 0x0001),
            (DType::Bf16, 0x7f00),
            (DType::F16, 0x3c00),
            (DType::F16, 0x0001),
            (DType::F16, 0x7800),
            (DType::F32, 0x3f80_0000),
            (DType::F32, 0x0000_0001),
        ] {
            let (here, next) = (decode(dtype, bits), decode(dtype, bits + 1));
            assert_eq!(ulp(dtype, here.into()), f64::from(next) - f64::from(here));
        }
    }

    #[test]
    fn eight_bit_floats_are_those_of_their_tables() {
        for (bits, value) in [
            (0x38, 1.0),
            (0x7e, 448.0),
            (0x01, 0.001953125),
            (0x08, 0.015625),
        ] {
            assert_eq!(decode(DType::F8E4M3Fn, bits), value);
            assert_eq!(encode(DType::F8E4M3Fn, value), bits);
        }
        for (bits, value) in [(0x3c, 1.0), (0x7b, 57344.0), (0x01, 1.0 / 65536.0)] {
            assert_eq!(decode(DType::F8E5M2, bits), value);
            assert_eq!(encode(DType::F8E5M2, value), bits);
        }
        assert!(decode(DType::F8E4M3Fn, 0xff).is_nan());
        assert!(decode(DType::F8E5M2, 0x7d).is_nan());
        assert_eq!(decode(DType::F8E5M2, 0xfc), f32::NEG_INFINITY);
        // Ties to even, saturation, signs.
        assert_eq!(encode(DType::F8E4M3Fn, 1.0625), 0x38);
        assert_eq!(encode(DType::F8E4M3Fn, 1.1875), 0x3a);
        assert_eq!(encode(DType::F8E4M3Fn, -1e9), 0xfe);
        assert_eq!(encode(DType::F8E5M2, f32::NEG_INFINITY), 0xfb);
        assert_eq!(encode(DType::F8E5M2, -0.0), 0x80);
    }
}
