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

/// Division by one divisor of many dividends, each quotient on its way to an 8-bit float: prepared
/// on the host, read by the kernels as it lies in memory.
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
/// bits of B are not within 16 of 0, or are 0, the quotient is right.
///
/// Other divisors, and those so large or small that a step could overflow or lose bits, take a
/// longer way, which gives the correctly rounded quotient of any two numbers: both are scaled by a
/// power of two, and the quotient is corrected by its exact remainder (Markstein, "Computation of
/// elementary functions on the IBM RISC System/6000 processor", 1990, theorem 7).
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reciprocal {
    /// `high + low` is the reciprocal to twice the precision.
    high: f32,
    low: f32,
    /// The scaled divisor where the long way is to be taken, else 0.
    divisor: f32,
    /// What dividends are multiplied with first on the long way.
    scale: f32,
}

impl Reciprocal {
    /// Prepares division by `divisor`, which is finite and above 0.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn new(divisor: f32) -> Self {
        // Four times as far from 0 as the proof asks.
        const NEAR: u32 = 64;
        let last = divisor.to_bits() & 0xf_ffff;
        let near = last != 0 && last.wrapping_add(NEAR) & 0xf_ffff <= 2 * NEAR;
        let power = |exponent: i32| f32::from_bits(((127 + exponent) as u32) << 23);
        let scale = if divisor < power(-104) {
            power(126)
        } else if divisor < power(-40) {
            power(64)
        } else if divisor < power(40) {
            1.0
        } else if divisor < power(104) {
            power(-64)
        } else {
            power(-104)
        };
        let divisor = divisor * scale;
        let nearest = 1.0 / divisor;
        // Errors of a reciprocal are exact in f32.
        let error = |reciprocal: f32| (-divisor).mul_add(reciprocal, 1.0);
        if near || scale != 1.0 {
            return Self {
                high: nearest,
                low: error(nearest) * nearest,
                divisor,
                scale,
            };
        }
        // `high` is not above the reciprocal, so that `low` is positive: an infinite dividend then
        // meets no infinity of the other sign. Nor is `low` 0: that would make it NaN.
        let high = if error(nearest) < 0.0 {
            nearest.next_down()
        } else {
            nearest
        };
        Self {
            high,
            low: (error(high) * high).max(f32::from_bits(1)),
            divisor: 0.0,
            scale,
        }
    }

    /// From the words of a [`Reciprocal`] in memory.
    #[inline(always)]
    pub fn from_words(words: [[u32; 2]; 2]) -> Self {
        Self {
            high: f32::from_bits(words[0][0]),
            low: f32::from_bits(words[0][1]),
            divisor: f32::from_bits(words[1][0]),
            scale: f32::from_bits(words[1][1]),
        }
    }

    /// The words of this in the memory of a device, which is little-endian.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn to_words(self) -> [u64; 2] {
        [[self.high, self.low], [self.divisor, self.scale]]
            .map(|[low, high]| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32)
    }

    /// `dividends / divisor`, good for a conversion to 8 bits. `fma` rounds `a * b + c` once.
    #[inline(always)]
    pub fn quotients<const N: usize>(
        self,
        dividends: [f32; N],
        fma: impl Fn(f32, f32, f32) -> f32,
    ) -> [f32; N] {
        if self.divisor == 0.0 {
            return dividends.map(|x| fma(x, self.high, x * self.low));
        }
        dividends.map(|x| {
            let x = x * self.scale;
            let faithful = fma(x, self.high, x * self.low);
            let remainder = fma(-faithful, self.divisor, x);
            let quotient = fma(remainder, self.high, faithful);
            // Beyond these the quotient becomes 0, or the largest number, or NaN, as x does.
            let moderate = 7.9e-31 < x.abs() && x.abs() < 1.2e24;
            if moderate { quotient } else { x }
        })
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
        let [quick] = reciprocal.quotients([dividend], fma);
        let exact = dividend / divisor;
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
        let middles = |decode: fn(u8) -> f32, max: u8| {
            (0..max).map(move |code| (decode(code) + decode(code + 1)) / 2.0)
        };
        middles(convert::e4m3_to_f32, 0x7e)
            .chain(middles(convert::e5m2_to_f32, 0x7b))
            .collect()
    }

    fn random() -> impl FnMut() -> u32 {
        let mut state = 1u32;
        move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        }
    }

    /// Both ways, with dividends on both sides of what decides a byte.
    fn check_around_ties(divisor: f32) {
        let reciprocal = Reciprocal::new(divisor);
        for tie in ties() {
            let mut dividend = tie * divisor;
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

    #[test]
    fn quotients_convert_like_those_of_a_division() {
        let mut random = random();
        let mut short = 0;
        for i in 0..4000u32 {
            let exponent = (127 - 20 + i % 40) << 23;
            let top = (random() & 7) << 20;
            // Powers of two and the like, divisors just beside those of the long way, any.
            let last = match i % 4 {
                0 => 0,
                1 => 65 + random() % 64,
                2 => (1 << 20) - 65 - random() % 64,
                _ => random() & 0xf_ffff,
            };
            let divisor = f32::from_bits(exponent | top | last);
            short += u32::from(Reciprocal::new(divisor).divisor == 0.0);
            check_around_ties(divisor);
        }
        assert!(short > 3900, "{short}");
    }

    #[test]
    fn the_long_way_too() {
        let mut random = random();
        for i in 0..4000u32 {
            let top = (random() & 7) << 20;
            let divisor = match i % 4 {
                0 => f32::from_bits((127 - 20 + i % 40) << 23 | top | (1 + random() % 64)),
                1 => f32::from_bits(((127 - 20 + i % 40) << 23 | top) - 1 - random() % 64),
                2 => f32::from_bits((1 + random() % 86) << 23 | random() & 0x7f_ffff),
                _ => f32::from_bits((168 + random() % 86) << 23 | random() & 0x7f_ffff),
            };
            assert_ne!(Reciprocal::new(divisor).divisor, 0.0, "{divisor:e}");
            check_around_ties(divisor);
        }
    }

    #[test]
    fn quotients_of_every_16_bit_value() {
        let divisors = [0.05, 1.0, 0.75, 448.0, 3.3e-5, 1e9, 1e-30, 3e38];
        let near = [0x3f80_0041, 0x3f80_0001, 0x3fff_ffff, 1, 0x7f7f_ffff].map(f32::from_bits);
        for divisor in divisors.into_iter().chain(near) {
            let reciprocal = Reciprocal::new(divisor);
            for bits in 0..=u16::MAX {
                same_bytes(convert::bf16_to_f32(bits), divisor, reciprocal);
                same_bytes(convert::f16_to_f32(bits), divisor, reciprocal);
            }
            for value in [0.0, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1)] {
                same_bytes(value, divisor, reciprocal);
                same_bytes(-value, divisor, reciprocal);
            }
        }
    }

    #[test]
    fn a_reciprocal_survives_memory() {
        let reciprocal = Reciprocal::new(0.3);
        let halves = |word: u64| [word as u32, (word >> 32) as u32];
        let words = reciprocal.to_words().map(halves);
        assert_eq!(Reciprocal::from_words(words), reciprocal);
        assert_eq!(size_of::<Reciprocal>(), 16);
    }
}
