//! The contract in f64, straight from its formulas: sums in any order, one rounding at most.

use fused_kv::{NormWeight, RopeStyle};

use crate::case::Case;
use crate::element;

/// What a case should give, `[L, T, H, D]` in row-major order.
pub struct Oracle {
    /// K, not rounded.
    pub k: Vec<f64>,
    /// `|first*cos| + |second*sin|` of each element of K; for an element that is not rotated the
    /// angle is zero and this is its magnitude.
    pub terms: Vec<f64>,
    /// V as bits: copied, or the exact product rounded once to f32 and once to the type.
    pub v: Vec<u32>,
}

/// Runs the oracle. Tokens whose position is outside the table get NaN and zero bits.
pub fn compute(case: &Case) -> Oracle {
    let [layers, tokens, heads, dim] = case.out_shape();
    let rotary = case.config.rotary_dim;
    let half = rotary / 2;
    let kv_bits = case.kv.bits();
    let kv: Vec<f64> = case.kv.values().into_iter().map(f64::from).collect();
    let weight: Vec<f64> = case
        .k_norm_weight
        .values()
        .into_iter()
        .map(f64::from)
        .collect();
    let eps: Vec<f64> = case.eps.values().into_iter().map(f64::from).collect();
    let table: Vec<f64> = case
        .cos_sin_cache
        .values()
        .into_iter()
        .map(f64::from)
        .collect();
    let scales = case.value_scale.as_ref().map(|scales| scales.values());
    let positions = case.positions.indices();
    let written = case.written();

    let count = layers * tokens * heads * dim;
    let mut oracle = Oracle {
        k: vec![f64::NAN; count],
        terms: vec![0.0; count],
        v: vec![0; count],
    };
    for layer in 0..layers {
        for token in (0..tokens).filter(|&token| written[token]) {
            let angles = &table[positions[token] as usize * rotary..][..rotary];
            for head in 0..heads {
                let from = ((token * layers + layer) * 2 * heads + head) * dim;
                let to = ((layer * tokens + token) * heads + head) * dim;
                let x = &kv[from..from + dim];
                let mean = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
                let norm = (mean + eps[layer]).sqrt();
                let n: Vec<f64> = (0..dim)
                    .map(|i| {
                        let w = weight[layer * dim + i];
                        let w = match case.config.norm_weight {
                            NormWeight::Plain => w,
                            NormWeight::Offset => 1.0 + w,
                        };
                        x[i] / norm * w
                    })
                    .collect();
                let (k, terms) = (&mut oracle.k[to..to + dim], &mut oracle.terms[to..to + dim]);
                for i in 0..dim {
                    (k[i], terms[i]) = (n[i], n[i].abs());
                }
                for pair in 0..half {
                    let (i, j) = match case.config.rope_style {
                        RopeStyle::Neox => (pair, pair + half),
                        RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
                    };
                    let (cos, sin) = (angles[pair], angles[half + pair]);
                    k[i] = n[i] * cos - n[j] * sin;
                    terms[i] = (n[i] * cos).abs() + (n[j] * sin).abs();
                    k[j] = n[j] * cos + n[i] * sin;
                    terms[j] = (n[j] * cos).abs() + (n[i] * sin).abs();
                }
                let from = from + heads * dim;
                for i in 0..dim {
                    oracle.v[to + i] = match &scales {
                        None => kv_bits[from + i],
                        Some(scales) => {
                            // Exact in f64: two 24-bit factors.
                            let product = kv[from + i] * f64::from(scales[layer]);
                            element::encode(case.kv.dtype, product as f32)
                        }
                    };
                }
            }
        }
    }
    oracle
}
