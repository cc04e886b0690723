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

#[cfg(test)]
mod tests {
    use super::*;

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
}
