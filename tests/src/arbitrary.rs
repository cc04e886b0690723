//! Random cases for property tests.

use fused_kv::{DType, NormWeight, RopeStyle};
use proptest::prelude::*;

use crate::case::{Layouts, Spec, Values};
use crate::tensor::{Layout, Rows};

/// What addresses may be a multiple of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alignment {
    /// Any address, as the CPU takes them.
    Byte,
    /// Whole elements, as devices need them.
    Element,
}

/// A configuration of `cases` cases. Failures are shrunk and printed, not kept: the binary may run
/// where its source is not.
pub fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn floats() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::Bf16), Just(DType::F16), Just(DType::F32)]
}

/// A layout of `rank` axes. `free` axes, from the outermost, may be padded, permuted and reversed.
fn layout(rank: usize, free: usize, alignment: Alignment) -> impl Strategy<Value = Layout> {
    let axes: Vec<usize> = (0..free).collect();
    (
        0usize..9,
        match alignment {
            Alignment::Byte => 0usize..4,
            Alignment::Element => 0..1,
        },
        prop::collection::vec(0usize..11, free),
        Just(axes.clone()).prop_shuffle(),
        prop::sample::subsequence(axes, 0..=free),
    )
        .prop_map(move |(offset, byte_offset, pads, mut order, reversed)| {
            order.extend(free..rank);
            Layout {
                offset,
                byte_offset,
                pads,
                order,
                reversed,
            }
        })
}

fn output(alignment: Alignment) -> impl Strategy<Value = Option<Layout>> {
    prop_oneof![1 => Just(None), 4 => layout(4, 3, alignment).prop_map(Some)]
}

/// Layouts of all tensors; often, the rows of all that come in rows start alike, as one of the
/// paths needs it: where.
fn layouts(alignment: Alignment) -> impl Strategy<Value = (Layouts, Rows)> {
    let rows = prop_oneof![
        3 => Just(Rows::Anywhere),
        2 => Just(Rows::Shifted),
        1 => Just(Rows::Pairs),
        2 => Just(Rows::Chunks),
    ];
    (any_layouts(alignment), rows).prop_map(|(mut layouts, rows)| {
        layouts.kv = layouts.kv.aligned(rows);
        layouts.k_out = layouts.k_out.map(|layout| layout.aligned(rows));
        layouts.v_out = layouts.v_out.map(|layout| layout.aligned(rows));
        if rows == Rows::Chunks {
            layouts.weight = layouts.weight.aligned(rows);
            layouts.table = layouts.table.aligned(rows);
        }
        (layouts, rows)
    })
}

fn any_layouts(alignment: Alignment) -> impl Strategy<Value = Layouts> {
    (
        layout(3, 2, alignment),
        layout(2, 1, alignment),
        layout(1, 0, alignment),
        layout(2, 1, alignment),
        layout(1, 1, alignment),
        layout(1, 0, alignment),
        output(alignment),
        output(alignment),
    )
        .prop_map(
            |(kv, weight, eps, table, positions, value_scale, k_out, v_out)| Layouts {
                kv,
                weight,
                eps,
                table,
                positions,
                value_scale,
                k_out,
                v_out,
            },
        )
}

/// H, D and R.
fn heads() -> impl Strategy<Value = (usize, usize, usize)> {
    let half = prop_oneof![
        4 => 1usize..=40,
        2 => 1usize..=128,
        1 => 1usize..=512,
        1 => prop::sample::select(vec![1usize, 2, 3, 5, 23, 511, 512]),
        2 => prop::sample::select(vec![32usize, 36, 40, 48, 56, 64, 80, 96, 128, 256, 288]),
        1 => (1usize..=32).prop_map(|chunks| 4 * chunks),
    ];
    half.prop_flat_map(|half| {
        // A whole warp of small heads, and more.
        let heads = match half {
            1..=16 => prop_oneof![3 => 1usize..5, 1 => 5usize..70].boxed(),
            _ => (1usize..5).boxed(),
        };
        let rotary = prop_oneof![
            2 => Just(half),
            2 => 1..=half,
            1 => (1..=half.div_ceil(8)).prop_map(move |chunks| (8 * chunks).min(half)),
        ];
        (heads, Just(2 * half), rotary.prop_map(|half| 2 * half))
    })
}

/// Any valid case.
pub fn spec(alignment: Alignment) -> impl Strategy<Value = Spec> {
    (
        (0usize..7, 1usize..4, heads(), 1usize..40),
        (
            any::<bool>(),
            any::<bool>(),
            any::<bool>(),
            any::<bool>(),
            any::<bool>(),
        ),
        (floats(), floats(), floats()),
        layouts(alignment),
        prop_oneof![Just(1.0f32), Just(1.28f32)],
        any::<u64>(),
    )
        .prop_map(
            |(
                (tokens, layers, (heads, mut head_dim, mut rotary_dim), table_rows),
                (interleaved, offset, narrow, value_scale, wild),
                (kv, weight, table),
                (layouts, rows),
                attention_factor,
                seed,
            )| {
                // Whole chunks, for rows that start at chunks.
                if rows == Rows::Chunks {
                    head_dim = head_dim.next_multiple_of(8);
                    rotary_dim = rotary_dim.next_multiple_of(16).min(head_dim);
                }
                Spec {
                    tokens,
                    layers,
                    heads,
                    head_dim,
                    rotary_dim,
                    table_rows,
                    style: if interleaved {
                        RopeStyle::Interleaved
                    } else {
                        RopeStyle::Neox
                    },
                    norm_weight: if offset {
                        NormWeight::Offset
                    } else {
                        NormWeight::Plain
                    },
                    kv,
                    weight,
                    table,
                    index: if narrow { DType::I32 } else { DType::I64 },
                    value_scale,
                    attention_factor,
                    values: if wild { Values::Wild } else { Values::Normal },
                    positions: None,
                    layouts,
                    seed,
                }
            },
        )
}

/// Some positions replaced by ones outside the table.
pub fn spec_with_bad_positions(alignment: Alignment) -> impl Strategy<Value = Spec> {
    (spec(alignment), any::<u64>()).prop_map(|(mut spec, seed)| {
        let mut rng = fastrand::Rng::with_seed(seed);
        let rows = spec.table_rows as i64;
        let wide = [
            i64::MIN,
            -(1 << 32),
            1 << 31,
            1 << 32,
            (1 << 32) + 1,
            i64::MAX,
        ];
        let narrow = [-1, rows, rows + 1, i32::MIN.into(), i32::MAX.into()];
        let positions = (0..spec.tokens)
            .map(|_| match rng.u8(0..4) {
                0 => narrow[rng.usize(..narrow.len())],
                1 if spec.index == DType::I64 => wide[rng.usize(..wide.len())],
                _ => rng.i64(0..rows),
            })
            .collect();
        spec.positions = Some(positions);
        spec
    })
}
