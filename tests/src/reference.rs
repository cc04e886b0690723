//! The bit contract as plain loops over scalars, in the order that the contract fixes. Written
//! apart from the implementation: results of every backend must equal it bit for bit.

use fused_kv::{Error, NormWeight, RopeStyle};

use crate::case::Case;
use crate::element::{decode, encode};

/// What a case must give.
pub struct Reference {
    /// K, contiguous `[L, T, H, D]`, as bytes. Rows of unwritten tokens are zero.
    pub k: Vec<u8>,
    /// V, likewise.
    pub v: Vec<u8>,
    /// Tokens whose rows are written.
    pub written: Vec<bool>,
    /// What `check` must return.
    pub check: Result<(), Error>,
}

/// Sum of squares: chunks of 8 in ascending order, then halving.
pub fn sum_of_squares(x: &[f32]) -> f32 {
    let mut count = 1;
    while count * 8 < x.len() {
        count *= 2;
    }
    let mut sums = vec![0.0f32; count];
    let mut chunk = 0;
    while chunk * 8 < x.len() {
        let mut sum = x[chunk * 8] * x[chunk * 8];
        let mut i = chunk * 8 + 1;
        while i < x.len() && i < chunk * 8 + 8 {
            let square = x[i] * x[i];
            sum += square;
            i += 1;
        }
        sums[chunk] = sum;
        chunk += 1;
    }
    while count > 1 {
        count /= 2;
        for i in 0..count {
            sums[i] += sums[i + count];
        }
    }
    sums[0]
}

/// Results before they are rounded, `[L, T, H, D]` in row-major order. Rows of unwritten tokens are
/// zero.
pub struct Unrounded {
    /// K.
    pub k: Vec<f32>,
    /// V; scaled where the case says so.
    pub v: Vec<f32>,
    /// The bits of V in `kv`, for where it is copied.
    pub v_bits: Vec<u32>,
}

/// Runs the reference up to the rounding, for the tokens that are `written`.
pub fn unrounded(case: &Case, written: &[bool]) -> Unrounded {
    let [layers, tokens, heads, dim] = case.out_shape();
    let rotary = case.config.rotary_dim;
    let half = rotary / 2;
    let dtype = case.kv.dtype;
    let kv = case.kv.bits();
    let weight = case.k_norm_weight.values();
    let eps = case.eps.values();
    let table = case.cos_sin_cache.values();
    let scales = case.value_scale.as_ref().map(|scales| scales.values());
    let positions = case.positions.indices();

    let count = layers * tokens * heads * dim;
    let mut results = Unrounded {
        k: vec![0.0; count],
        v: vec![0.0; count],
        v_bits: vec![0; count],
    };
    let mut row = vec![0.0f32; dim];
    for token in 0..tokens {
        if !written[token] {
            continue;
        }
        let angles = &table[positions[token] as usize * rotary..][..rotary];
        for layer in 0..layers {
            for head in 0..heads {
                let from = ((token * layers + layer) * 2 * heads + head) * dim;
                let to = ((layer * tokens + token) * heads + head) * dim;
                for i in 0..dim {
                    row[i] = decode(dtype, kv[from + i]);
                }
                let mean = sum_of_squares(&row) / dim as f32;
                let root = (mean + eps[layer]).sqrt();
                let inv = 1.0f32 / root;
                for i in 0..dim {
                    let mut w = weight[layer * dim + i];
                    if case.config.norm_weight == NormWeight::Offset {
                        w += 1.0f32;
                    }
                    let scaled = row[i] * inv;
                    row[i] = scaled * w;
                }
                for pair in 0..half {
                    let (i, j) = match case.config.rope_style {
                        RopeStyle::Neox => (pair, pair + half),
                        RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
                    };
                    let (cos, sin) = (angles[pair], angles[half + pair]);
                    let (a, b) = (row[i] * cos, row[j] * sin);
                    let (c, d) = (row[j] * cos, row[i] * sin);
                    row[i] = a - b;
                    row[j] = c + d;
                }
                results.k[to..to + dim].copy_from_slice(&row);
                for i in 0..dim {
                    let copied = kv[from + heads * dim + i];
                    let value = decode(dtype, copied);
                    results.v_bits[to + i] = copied;
                    results.v[to + i] = match &scales {
                        None => value,
                        Some(scales) => value * scales[layer],
                    };
                }
            }
        }
    }
    results
}

/// Runs the reference.
pub fn compute(case: &Case) -> Reference {
    let dtype = case.kv.dtype;
    let positions = case.positions.indices();
    let (tokens, rows) = (case.tokens(), case.cos_sin_cache.shape[0]);
    let written = case.written();
    let Unrounded { k, v, v_bits } = unrounded(case, &written);
    let bytes = |bits: &[u32]| -> Vec<u8> {
        bits.iter()
            .flat_map(|bits| bits.to_le_bytes().into_iter().take(dtype.size()))
            .collect()
    };
    let rounded =
        |values: &[f32]| -> Vec<u32> { values.iter().map(|&value| encode(dtype, value)).collect() };
    let k = bytes(&rounded(&k));
    let v = match case.value_scale {
        None => bytes(&v_bits),
        Some(_) => bytes(&rounded(&v)),
    };
    let offenders: Vec<usize> = (0..tokens).filter(|&token| !written[token]).collect();
    let check = match offenders.first() {
        None => Ok(()),
        Some(&first) => Err(Error::PositionOutOfRange {
            token: first as u64,
            position: positions[first],
            table_rows: rows as u64,
            count: offenders.len() as u64,
        }),
    };
    Reference {
        k,
        v,
        written,
        check,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_the_sum_is_the_contracts() {
        // Chunk sums of 24 elements: big, 1, 1 and padding. Halving adds the first and third,
        // then the second (and padding): big + 1 rounds to even and loses both ones. Adding the
        // small ones first would keep them.
        let big = 4096.0f32;
        let mut x = [0.0f32; 24];
        (x[0], x[8], x[16]) = (big, 1.0, 1.0);
        assert_eq!(sum_of_squares(&x), big * big);
        // Second and fourth chunk meet before they meet the first.
        let mut x = [0.0f32; 32];
        (x[0], x[8], x[24]) = (big, 1.0, 1.0);
        assert_eq!(sum_of_squares(&x), big * big + 2.0);
        // In a chunk the order is ascending.
        let ascending = sum_of_squares(&[1.0, 1.0, 1.0, big]);
        assert_eq!(ascending, big * big + 4.0);
        assert_eq!(sum_of_squares(&[big, 1.0, 1.0, 1.0]), big * big);
    }
}
