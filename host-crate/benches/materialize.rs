//! The CPU backend against a plain copy of the same bytes, on the same threads: the copy is the
//! ceiling, since the job reads `kv` once and writes as many bytes.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fused_kv::half::{bf16, f16};
use fused_kv::{Config, Element, Inputs, NormWeight, Outputs, Plan, RopeStyle, TensorView};
use rayon::prelude::*;

const TOKENS: usize = 2048;
const LAYERS: usize = 8;
const HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const ROW: usize = 2 * HEADS * HEAD_DIM;
/// Tokens that the CPU backend takes at a time, so that the copy is cut in the same chunks.
const TILE: usize = 32;

fn numbers<T: Element>(len: usize, from: impl Fn(f32) -> T) -> Vec<T> {
    (0..len)
        .map(|index| from((index.wrapping_mul(2_654_435_761) % 1000) as f32 / 250.0 - 2.0))
        .collect()
}

fn job<T: Element>(criterion: &mut Criterion, name: &str, style: RopeStyle, from: fn(f32) -> T) {
    let kv = numbers(TOKENS * LAYERS * ROW, from);
    let weight = numbers(LAYERS * HEAD_DIM, from);
    let table = numbers(4096 * HEAD_DIM, from);
    let eps = [1e-6f32; LAYERS];
    let positions: Vec<i64> = (0..TOKENS as i64).map(|token| token + 1000).collect();
    let inputs = Inputs {
        kv: TensorView::from_slice(&kv, &[TOKENS, LAYERS, ROW]).unwrap(),
        k_norm_weight: TensorView::from_slice(&weight, &[LAYERS, HEAD_DIM]).unwrap(),
        eps: TensorView::from_slice(&eps, &[LAYERS]).unwrap(),
        cos_sin_cache: TensorView::from_slice(&table, &[4096, HEAD_DIM]).unwrap(),
        positions: TensorView::from_slice(&positions, &[TOKENS]).unwrap(),
        value_scale: None,
    };
    let config = Config {
        num_kv_heads: HEADS,
        head_dim: HEAD_DIM,
        rotary_dim: HEAD_DIM,
        rope_style: style,
        norm_weight: NormWeight::Plain,
    };
    let mut plan = Plan::new(config, inputs, Outputs::default()).unwrap();
    let mut copy = kv.clone();
    let threads = rayon::current_num_threads();

    let mut group = criterion.benchmark_group(format!("{name}, {threads} threads"));
    // Bytes read and written.
    group.throughput(Throughput::Bytes(2 * size_of_val(kv.as_slice()) as u64));
    group.bench_function("copy", |bencher| {
        bencher.iter(|| {
            copy.par_chunks_mut(TILE * LAYERS * ROW)
                .zip(kv.par_chunks(TILE * LAYERS * ROW))
                .for_each(|(to, from)| to.copy_from_slice(from));
        });
    });
    group.bench_function("materialize", |bencher| {
        bencher.iter(|| plan.run().unwrap());
    });
    group.finish();
    plan.check().unwrap();
}

fn materialize(criterion: &mut Criterion) {
    let (neox, interleaved) = (RopeStyle::Neox, RopeStyle::Interleaved);
    job(criterion, "bfloat16 neox", neox, bf16::from_f32);
    job(
        criterion,
        "bfloat16 interleaved",
        interleaved,
        bf16::from_f32,
    );
    job(criterion, "float16 neox", neox, f16::from_f32);
    job(criterion, "float32 neox", neox, |value| value);
}

criterion_group!(benches, materialize);
criterion_main!(benches);
