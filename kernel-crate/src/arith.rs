//! The arithmetic of the bit contract, shared by every backend.
//!
//! Plain f32 operations, each rounded to nearest even, none fused: the same bits everywhere.

/// Elements of a chunk: the unit in which squares are added in order.
pub const CHUNK: usize = 8;

/// Sum of squares of one chunk, from the lowest index up, starting at the first square.
///
/// An empty chunk gives 0.0, the padding of the tree.
#[inline(always)]
pub fn chunk_sum(x: &[f32]) -> f32 {
    let mut squares = x.iter().map(|x| x * x);
    let Some(first) = squares.next() else {
        return 0.0;
    };
    squares.fold(first, |sum, square| sum + square)
}

/// Number of leaves of the tree over `head_dim` elements: the chunks, padded to a power of two.
#[inline(always)]
pub const fn leaves(head_dim: u32) -> u32 {
    head_dim.div_ceil(CHUNK as u32).next_power_of_two()
}

/// Halves `sums`, whose length is a power of two, until one is left:
/// `c[i] += c[i + m]` for m = N/2, N/4 ... 1.
#[inline(always)]
pub fn tree_sum(sums: &mut [f32]) -> f32 {
    let mut m = sums.len() / 2;
    while m > 0 {
        let (low, high) = sums.split_at_mut(m);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        m /= 2;
    }
    sums[0]
}

/// `1 / sqrt(sum / D + eps)`, square root and divisions correctly rounded.
#[inline(always)]
pub fn inverse_rms(sum: f32, head_dim: u32, eps: f32, sqrt: impl FnOnce(f32) -> f32) -> f32 {
    1.0 / sqrt(sum / head_dim as f32 + eps)
}

/// The weight in effect: `1 + w` in offset mode.
#[inline(always)]
pub fn effective_weight(w: f32, offset: bool) -> f32 {
    if offset { 1.0 + w } else { w }
}

/// `(x * inv) * w`.
#[inline(always)]
pub fn normalize(x: f32, inv: f32, w: f32) -> f32 {
    (x * inv) * w
}

/// The pair `(first, second)` rotated by one angle.
#[inline(always)]
pub fn rotate(first: f32, second: f32, cos: f32, sin: f32) -> (f32, f32) {
    (first * cos - second * sin, second * cos + first * sin)
}

/// Many divisions by one divisor, each quotient on its way to an 8-bit float.
///
/// Such a quotient is rounded to f32 and then to 8 bits; only those f32 matter where the second
/// rounding changes sides. With `high + low` for the reciprocal, two operations give a quotient
/// whose relative error before its rounding is below 2^-45, which decides every such f32 right
/// unless the divisor is one of a few:
///
/// The second rounding changes sides at a number t of at most five significant bits, so the first
/// does at the midpoint m of t and a neighbour of t: 25 bits, of which the last 20 are those of
/// 1 or -1. Let the significands be integers, A of the dividend and B of the divisor. Being within
/// 2^-45 of m means A * 2^s - m * B = e with |e| <= 16, s >= 20. Modulo 2^20, B or -B is then
/// e; e = 0 cannot be, since m has 25 bits, is odd, and would divide A. So wherever the last 20
/// bits of B are not within 16 of 0, or are 0, the quotient is right; for other divisors, and for
/// those so large or small that a step could overflow or lose bits, [`Self::new`] gives nothing.
#[derive(Clone, Copy, Debug)]
pub struct Reciprocal {
    high: f32,
    low: f32,
}

impl Reciprocal {
    /// Prepares division by `divisor`; `None` where only a true division is right. `fma` rounds
    /// `a * b + c` once.
    #[inline(always)]
    pub fn new(divisor: f32, fma: impl Fn(f32, f32, f32) -> f32) -> Option<Self> {
        const RANGE: core::ops::Range<u32> = (127 - 40) << 23..(127 + 40) << 23;
        // Twice and four times as far from 0 as the proof asks.
        const NEAR: u32 = 64;
        let bits = divisor.to_bits();
        let last = bits & 0xf_ffff;
        let near = last != 0 && last.wrapping_add(NEAR) & 0xf_ffff <= 2 * NEAR;
        if near || bits < RANGE.start || bits >= RANGE.end {
            return None;
        }
        // `high` is not above the reciprocal, so that `low` is positive and infinite dividends
        // meet no infinity of the other sign. Both errors are exact.
        let nearest = 1.0 / divisor;
        let below = if fma(-divisor, nearest, 1.0) < 0.0 {
            f32::from_bits(nearest.to_bits() - 1)
        } else {
            nearest
        };
        let low = fma(-divisor, below, 1.0) * below;
        // Not 0 either: an infinity times 0 would be NaN.
        let low = if low > 0.0 { low } else { f32::from_bits(1) };
        Some(Self { high: below, low })
    }

    /// `dividend / divisor`, good for a conversion to 8 bits.
    #[inline(always)]
    pub fn quotient(self, dividend: f32, fma: impl Fn(f32, f32, f32) -> f32) -> f32 {
        fma(dividend, self.high, dividend * self.low)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert;

    #[test]
    fn chunk_sum_starts_at_the_first_square() {
        assert_eq!(chunk_sum(&[]), 0.0);
        assert_eq!(chunk_sum(&[3.0, 4.0]), 25.0);
        // Order matters: the small squares vanish one by one in the large one that comes first.
        let big = 4096.0f32;
        let ascending = chunk_sum(&[1.0, 1.0, 1.0, big]);
        let descending = chunk_sum(&[big, 1.0, 1.0, 1.0]);
        assert_eq!(descending, big * big);
        assert_ne!(ascending, descending);
    }

    #[test]
    fn tree_adds_halves_not_neighbours() {
        let big = 16_777_216.0f32;
        // Halving gives (big + 1) + (1 + 0); pairs of neighbours would give (big + 1) + (1 + 0)
        // only in another order, so place the small terms where the orders differ.
        assert_eq!(tree_sum(&mut [big, 1.0, 0.0, 1.0]), big + 2.0);
        assert_eq!(tree_sum(&mut [big, 0.0, 1.0, 1.0]), big);
    }

    #[test]
    fn leaves_are_padded_chunks() {
        for (head_dim, expected) in [(2, 1), (8, 1), (10, 2), (46, 8), (96, 16), (1024, 128)] {
            assert_eq!(leaves(head_dim), expected);
        }
    }

    #[test]
    fn rotation_of_a_quarter_turn() {
        assert_eq!(rotate(1.0, 2.0, 0.0, 1.0), (-2.0, 1.0));
    }

    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    fn same_bytes(dividend: f32, divisor: f32, reciprocal: Reciprocal) {
        let (quick, exact) = (reciprocal.quotient(dividend, fma), dividend / divisor);
        for convert in [convert::e4m3_from_f32, convert::e5m2_from_f32] {
            assert_eq!(
                convert(quick),
                convert(exact),
                "{dividend:e} / {divisor:e} = {exact:e}, not {quick:e}"
            );
        }
    }

    /// Every f32 at which a conversion to 8 bits changes sides.
    fn ties() -> std::vec::Vec<f32> {
        let e4m3 =
            (0..0x7eu8).map(|code| (convert::e4m3_to_f32(code), convert::e4m3_to_f32(code + 1)));
        let e5m2 =
            (0..0x7bu8).map(|code| (convert::e5m2_to_f32(code), convert::e5m2_to_f32(code + 1)));
        e4m3.chain(e5m2)
            .map(|(low, high)| (low + high) / 2.0)
            .collect()
    }

    fn divisors() -> impl Iterator<Item = f32> {
        let mut state = 1u32;
        let mut random = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        // Whole powers of two, divisors just outside of the excluded ones, whatever else.
        (0..4000u32).map(move |i| {
            let exponent = (127 - 20 + i % 40) << 23;
            let top = (random() & 7) << 20;
            let last = match i % 4 {
                0 => 0,
                1 => 65 + random() % 64,
                2 => (1 << 20) - 65 - random() % 64,
                _ => random() & 0xf_ffff,
            };
            f32::from_bits(exponent | top | last)
        })
    }

    #[test]
    fn quotients_convert_like_those_of_a_division() {
        let ties = ties();
        let mut tried = 0;
        for divisor in divisors() {
            let Some(reciprocal) = Reciprocal::new(divisor, fma) else {
                continue;
            };
            tried += 1;
            for tie in &ties {
                let middle = tie * divisor;
                let mut dividend = middle;
                for _ in 0..3 {
                    dividend = dividend.next_down();
                }
                for _ in 0..7 {
                    same_bytes(dividend, divisor, reciprocal);
                    same_bytes(-dividend, divisor, reciprocal);
                    dividend = dividend.next_up();
                }
            }
        }
        assert!(tried > 3900, "{tried}");
    }

    #[test]
    fn quotients_of_every_16_bit_value() {
        for divisor in [
            0.05,
            1.0,
            0.75,
            448.0,
            3.3e-5,
            1e9,
            f32::from_bits(0x3f80_0041),
        ] {
            let reciprocal = Reciprocal::new(divisor, fma).unwrap();
            for bits in 0..=u16::MAX {
                same_bytes(convert::bf16_to_f32(bits), divisor, reciprocal);
                same_bytes(convert::f16_to_f32(bits), divisor, reciprocal);
            }
        }
        for value in [
            0.0,
            f32::INFINITY,
            f32::MAX,
            f32::MIN_POSITIVE,
            f32::from_bits(1),
        ] {
            let reciprocal = Reciprocal::new(0.3, fma).unwrap();
            same_bytes(value, 0.3, reciprocal);
            same_bytes(-value, 0.3, reciprocal);
        }
    }

    #[test]
    fn some_divisors_are_left_to_a_division() {
        for bits in [
            0x3f80_0001,
            0x3f80_0040,
            0x3fff_ffff,
            0x3fef_ffff,
            0x3f90_0001,
        ] {
            assert!(
                Reciprocal::new(f32::from_bits(bits), fma).is_none(),
                "{bits:#x}"
            );
        }
        for divisor in [
            1e-13,
            1e13,
            f32::MIN_POSITIVE,
            f32::MAX,
            f32::INFINITY,
            f32::NAN,
            0.0,
            -1.0,
        ] {
            assert!(Reciprocal::new(divisor, fma).is_none(), "{divisor:e}");
        }
    }
}
