//! Five draft layers on the CPU, into the first rows of a workspace that the caller keeps.
//!
//! ```sh
//! cargo run --release -p fused-kv --example cpu
//! ```

use fused_kv::half::bf16;
use fused_kv::{
    Config, Inputs, NormWeight, Output, Outputs, Plan, RopeStyle, TensorView, TensorViewMut,
};

const TOKENS: usize = 7;
const LAYERS: usize = 5;
const HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const CAPACITY: usize = 64;
const TABLE_ROWS: usize = 4096;

fn main() -> Result<(), fused_kv::Error> {
    // What the drafter's stacked projection gives: for each token and layer K heads, then V heads.
    let kv: Vec<bf16> = (0..TOKENS * LAYERS * 2 * HEADS * HEAD_DIM)
        .map(|i| bf16::from_f32((i as f32 * 0.37).sin()))
        .collect();
    let weight = vec![bf16::ONE; LAYERS * HEAD_DIM];
    let eps = [1e-6f32; LAYERS];
    let table = rope_table();
    let positions: Vec<i64> = (100..).take(TOKENS).collect();

    // [L, capacity, H, D]; this call writes the rows of its own tokens, behind 20 older ones.
    let mut k_workspace = vec![bf16::ZERO; LAYERS * CAPACITY * HEADS * HEAD_DIM];
    let mut v_workspace = k_workspace.clone();
    let shape = [LAYERS, TOKENS, HEADS, HEAD_DIM];
    let row = HEADS * HEAD_DIM;
    let strides = [CAPACITY * row, row, HEAD_DIM, 1].map(|stride| stride as isize);
    let first = 20 * row;

    let config = Config {
        num_kv_heads: HEADS,
        head_dim: HEAD_DIM,
        rotary_dim: HEAD_DIM,
        rope_style: RopeStyle::Neox,
        norm_weight: NormWeight::Plain,
    };
    let inputs = Inputs {
        kv: TensorView::from_slice(&kv, &[TOKENS, LAYERS, 2 * HEADS * HEAD_DIM])?,
        k_norm_weight: TensorView::from_slice(&weight, &[LAYERS, HEAD_DIM])?,
        eps: TensorView::from_slice(&eps, &[LAYERS])?,
        cos_sin_cache: TensorView::from_slice(&table, &[TABLE_ROWS, HEAD_DIM])?,
        positions: TensorView::from_slice(&positions, &[TOKENS])?,
        value_scale: None,
    };
    let outputs = Outputs {
        k: Output::Into(TensorViewMut::from_strided(
            &mut k_workspace,
            first,
            &shape,
            &strides,
        )?),
        v: Output::Into(TensorViewMut::from_strided(
            &mut v_workspace,
            first,
            &shape,
            &strides,
        )?),
    };
    let mut plan = Plan::new(config, inputs, outputs)?;
    plan.run()?;
    plan.check()?;
    drop(plan);

    println!("first elements of K: {:?}", &k_workspace[first..first + 4]);
    println!("first elements of V: {:?}", &v_workspace[first..first + 4]);
    Ok(())
}

/// `[P, R]`: cosines, then sines, of base 10000.
fn rope_table() -> Vec<f32> {
    let angle =
        |row: usize, i: usize| row as f64 * 10_000f64.powf(-2.0 * i as f64 / HEAD_DIM as f64);
    let columns =
        |row, of: fn(f64) -> f64| (0..HEAD_DIM / 2).map(move |i| of(angle(row, i)) as f32);
    (0..TABLE_ROWS)
        .flat_map(|row| columns(row, f64::cos).chain(columns(row, f64::sin)))
        .collect()
}
