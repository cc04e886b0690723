//! Conversions between f32 and the storage types, in software and bit for bit what NVIDIA hardware
//! does: one rounding to nearest even, a NaN stored as the canonical NaN of its type.

#[cfg(not(target_arch = "nvptx64"))]
use half::f16;

/// Canonical NaN of `bfloat16` and of `float16`.
pub const NAN_16: u16 = 0x7fff;
/// Canonical NaN of `float32`.
pub const NAN_32: u32 = 0x7fff_ffff;
/// Canonical NaN of both 8-bit formats.
pub const NAN_8: u8 = 0x7f;

/// f32 to the bits of a `bfloat16`.
#[inline(always)]
pub fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    if value.is_nan() { NAN_16 } else { rounded }
}

/// The bits of a `bfloat16` to f32; exact.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// f32 to the bits of a `float16`.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
pub fn f16_from_f32(value: f32) -> u16 {
    if value.is_nan() {
        NAN_16
    } else {
        f16::from_f32(value).to_bits()
    }
}

/// The bits of a `float16` to f32; exact.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// f32 as it is stored: a NaN becomes the canonical one.
#[inline(always)]
pub fn f32_from_f32(value: f32) -> u32 {
    if value.is_nan() {
        NAN_32
    } else {
        value.to_bits()
    }
}

/// f32 to an 8-bit float with `MANTISSA` bits of mantissa and exponent bias `BIAS`, saturating at
/// the code `MAX` (infinities too).
#[inline(always)]
fn fp8_from_f32<const MANTISSA: u32, const BIAS: u32, const MAX: u32>(value: f32) -> u8 {
    let bits = value.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return NAN_8;
    }
    let smallest_normal = (128 - BIAS) << 23;
    let code = if magnitude < smallest_normal {
        // Adding the power of two whose last place is the step of the subnormals makes the f32
        // adder do the rounding: the low bits of the sum are the code.
        let anchor = (128 + 22 - BIAS - MANTISSA + 1) << 23;
        (f32::from_bits(magnitude) + f32::from_bits(anchor)).to_bits() - anchor
    } else {
        let shift = 23 - MANTISSA;
        let odd = (magnitude >> shift) & 1;
        ((magnitude + (1 << (shift - 1)) - 1 + odd) >> shift) - ((127 - BIAS) << MANTISSA)
    };
    sign | (if code > MAX { MAX } else { code }) as u8
}

/// f32 to `float8_e4m3fn`: largest value 448, infinities saturate, NaN is 0x7f.
#[inline(always)]
pub fn e4m3_from_f32(value: f32) -> u8 {
    fp8_from_f32::<3, 7, 0x7e>(value)
}

/// f32 to `float8_e5m2`: largest finite value 57344, infinities saturate, NaN is 0x7f.
#[inline(always)]
pub fn e5m2_from_f32(value: f32) -> u8 {
    fp8_from_f32::<2, 15, 0x7b>(value)
}

/// `float8_e4m3fn` to f32; exact.
#[inline(always)]
pub fn e4m3_to_f32(code: u8) -> f32 {
    let magnitude = (code & 0x7f) as u32;
    let sign = ((code & 0x80) as u32) << 24;
    let value = match magnitude {
        0x7f => f32::NAN.to_bits(),
        // Subnormals: multiples of 2^-9.
        0..8 => (magnitude as f32 / 512.0).to_bits(),
        _ => (magnitude << 20) + ((127 - 7) << 23),
    };
    f32::from_bits(sign | value)
}

/// `float8_e5m2` to f32; exact.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
pub fn e5m2_to_f32(code: u8) -> f32 {
    // The format is the upper half of a float16.
    f16_to_f32((code as u16) << 8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// Nearest code by search over all finite codes: ties to the even code, beyond the largest
    /// finite value the largest.
    fn nearest(value: f32, decode: fn(u8) -> f32, max: u8) -> u8 {
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        let magnitude = f64::from(value.abs());
        if magnitude >= f64::from(decode(max)) {
            return sign | max;
        }
        let mut best = 0u8;
        for code in 0..=max {
            let (distance, best_distance) = (
                (f64::from(decode(code)) - magnitude).abs(),
                (f64::from(decode(best)) - magnitude).abs(),
            );
            if distance < best_distance || (distance == best_distance && code % 2 == 0) {
                best = code;
            }
        }
        sign | best
    }

    fn check_fp8(encode: fn(f32) -> u8, decode: fn(u8) -> f32, max: u8) {
        for bits in 0..=u16::MAX {
            for value in [bf16_to_f32(bits), f16_to_f32(bits)] {
                let expected = if value.is_nan() {
                    NAN_8
                } else {
                    nearest(value, decode, max)
                };
                assert_eq!(encode(value), expected, "{value:e} ({bits:#06x})");
            }
        }
        // Around every tie: the midpoint of neighbouring codes and its two f32 neighbours.
        for code in 0..max {
            let middle = (decode(code) + decode(code + 1)) / 2.0;
            for value in [middle.next_down(), middle, middle.next_up()] {
                for value in [value, -value] {
                    assert_eq!(encode(value), nearest(value, decode, max), "{value:e}");
                }
            }
        }
        // Every code survives a round trip.
        for code in 0..=max {
            assert_eq!(encode(decode(code)), code);
            assert_eq!(encode(decode(code | 0x80)), code | 0x80);
        }
    }

    #[test]
    fn e4m3_rounds_to_nearest_even() {
        check_fp8(e4m3_from_f32, e4m3_to_f32, 0x7e);
        assert_eq!(e4m3_from_f32(1.0), 0x38);
        assert_eq!(e4m3_to_f32(0x7e), 448.0);
        assert_eq!(e4m3_from_f32(f32::NEG_INFINITY), 0xfe);
    }

    #[test]
    fn e5m2_rounds_to_nearest_even() {
        check_fp8(e5m2_from_f32, e5m2_to_f32, 0x7b);
        assert_eq!(e5m2_to_f32(0x7b), 57344.0);
        assert_eq!(e5m2_from_f32(f32::INFINITY), 0x7b);
    }

    #[test]
    fn sixteen_bit_types_round_trip_and_canonicalize_nan() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            let expected = if b.is_nan() { NAN_16 } else { bits };
            assert_eq!(bf16_from_f32(bf16_to_f32(bits)), expected);
            let expected = if h.is_nan() { NAN_16 } else { bits };
            assert_eq!(f16_from_f32(f16_to_f32(bits)), expected);
        }
    }

    #[test]
    fn bf16_agrees_with_half_on_f32_ties() {
        for high in (0..=u16::MAX).step_by(7) {
            for low in [0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits((high as u32) << 16 | low);
                if !value.is_nan() {
                    assert_eq!(bf16_from_f32(value), bf16::from_f32(value).to_bits());
                    assert_eq!(f16_from_f32(value), f16::from_f32(value).to_bits());
                }
            }
        }
    }
}
