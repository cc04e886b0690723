//! Elements as bits and as numbers, independent of the library's conversions.

use fused_kv::DType;
use half::{bf16, f16};

/// The NaN that a computed NaN is stored as.
pub fn canonical_nan(dtype: DType) -> u32 {
    match dtype {
        DType::Bf16 | DType::F16 => 0x7fff,
        DType::F32 => 0x7fff_ffff,
        other => panic!("{other} has no canonical NaN here"),
    }
}

/// Bits of a float type as a number; exact.
pub fn decode(dtype: DType, bits: u32) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_bits(bits as u16).to_f32(),
        DType::F16 => f16::from_bits(bits as u16).to_f32(),
        DType::F32 => f32::from_bits(bits),
        other => panic!("{other} is not a float type of the contract"),
    }
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
}
