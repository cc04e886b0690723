//! The specs of those known faults that every backend runs; `tests/cases.rs` says what each is.
//! All addresses are multiples of their elements' size, as devices need them.

use fused_kv::{DType, NormWeight, RopeStyle};

use crate::case::{Layouts, Spec};
use crate::tensor::Layout;

/// The three types of `kv`.
pub const FLOATS: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
/// Both rotation styles.
pub const STYLES: [RopeStyle; 2] = [RopeStyle::Neox, RopeStyle::Interleaved];

/// Each count above what a grid's second and third dimensions hold.
pub fn counts_above_65535() -> Vec<Spec> {
    let small = Spec {
        tokens: 1,
        layers: 1,
        heads: 1,
        head_dim: 4,
        rotary_dim: 2,
        ..Spec::default()
    };
    let mut specs: Vec<Spec> = [65_535, 65_536, 70_001]
        .into_iter()
        .map(|tokens| Spec {
            tokens,
            ..small.clone()
        })
        .collect();
    specs.push(Spec {
        layers: 70_001,
        ..small.clone()
    });
    specs.push(Spec {
        heads: 70_001,
        ..small
    });
    specs
}

/// No tokens, with outputs of either kind.
pub fn no_tokens() -> Vec<Spec> {
    let spec = Spec {
        tokens: 0,
        ..Spec::default()
    };
    vec![spec.clone(), spec.allocated()]
}

/// Positions at and past the ends of a table of 64 rows, with and without room between its rows.
pub fn ends_of_the_table() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (index, positions) in [
        (DType::I64, vec![63, 64, -1, 1 << 31, 0, i64::MIN, i64::MAX]),
        // Low halves that would be valid rows.
        (DType::I64, vec![1 << 32, (1 << 32) + 5, -(1 << 32), 7]),
        (
            DType::I32,
            vec![63, 64, -1, i32::MAX.into(), i32::MIN.into()],
        ),
    ] {
        for table in [Layout::default(), Layout::padded(&[3])] {
            let mut spec = Spec {
                tokens: positions.len(),
                table_rows: 64,
                index,
                positions: Some(positions.clone()),
                ..Spec::default()
            };
            spec.layouts.table = table;
            specs.push(spec);
        }
    }
    specs
}

/// A table of no rows.
pub fn an_empty_table() -> Spec {
    Spec {
        table_rows: 0,
        positions: Some(vec![0; 5]),
        ..Spec::default()
    }
}

/// Half of 128 elements rotated.
pub fn half_rotated() -> Vec<Spec> {
    let spec = |style| Spec {
        rotary_dim: 64,
        style,
        ..Spec::default()
    };
    STYLES.map(spec).to_vec()
}

/// Every type of the table, and of the weight, with every type of kv.
pub fn pairs_of_types() -> Vec<Spec> {
    let mut specs = Vec::new();
    for kv in FLOATS {
        for other in FLOATS {
            for style in STYLES {
                specs.push(Spec {
                    kv,
                    table: other,
                    style,
                    ..Spec::default()
                });
            }
            for norm_weight in [NormWeight::Plain, NormWeight::Offset] {
                specs.push(Spec {
                    kv,
                    weight: other,
                    norm_weight,
                    ..Spec::default()
                });
            }
        }
    }
    specs
}

/// Many heads, half rotated.
pub fn many_heads() -> Vec<Spec> {
    let mut specs = Vec::new();
    for heads in [1, 2, 7, 31, 64, 96] {
        for spec in half_rotated() {
            specs.push(Spec { heads, ..spec });
        }
    }
    specs
}

/// Rotary dims that are no power of two.
pub fn odd_rotary_dims() -> Vec<Spec> {
    let mut specs = Vec::new();
    for rotary_dim in [24, 80, 96, 192] {
        for head_dim in [rotary_dim, 192, 256] {
            for style in STYLES {
                for dtype in FLOATS {
                    specs.push(Spec {
                        head_dim,
                        rotary_dim,
                        style,
                        ..Spec::default().dtype(dtype)
                    });
                }
            }
        }
    }
    specs
}

/// Head sizes off the beaten track, rotated in full and in part.
pub fn uncommon_head_dims() -> Vec<Spec> {
    let mut specs = Vec::new();
    for head_dim in [72, 80, 96, 112, 160, 192, 224, 512, 576] {
        for rotary_dim in [head_dim, head_dim / 2, 64, 2, head_dim - 2] {
            for style in STYLES {
                specs.push(Spec {
                    head_dim,
                    rotary_dim,
                    style,
                    tokens: 3,
                    ..Spec::default()
                });
            }
        }
    }
    specs
}

/// Slices of larger buffers: kv in the middle of wider rows, every second position, padded weight
/// and table rows, outputs as the first tokens of a workspace, in both orders of tokens and layers.
pub fn slices() -> Vec<Spec> {
    let mut specs = Vec::new();
    for dtype in FLOATS {
        for style in STYLES {
            for (order, value_scale) in [(vec![], false), (vec![1, 0, 2, 3], true)] {
                specs.push(Spec {
                    tokens: 6,
                    style,
                    value_scale,
                    layouts: Layouts {
                        kv: Layout {
                            offset: 192,
                            ..Layout::padded(&[640, 96])
                        },
                        weight: Layout::padded(&[24]),
                        eps: Layout::default(),
                        table: Layout::padded(&[40]),
                        positions: Layout::padded(&[1]),
                        value_scale: Layout::default(),
                        // Ten more tokens of room in each layer.
                        k_out: Some(Layout {
                            order: order.clone(),
                            ..Layout::padded(&[10 * 256, 0, 0])
                        }),
                        v_out: Some(Layout {
                            order,
                            ..Layout::padded(&[10 * 256, 64, 8])
                        }),
                    },
                    ..Spec::default().dtype(dtype)
                });
            }
        }
    }
    specs
}

/// Tokens, layers and heads from the last to the first.
pub fn negative_strides() -> Spec {
    let reversed = |axes: &[usize]| Layout {
        reversed: axes.to_vec(),
        ..Layout::default()
    };
    Spec {
        layouts: Layouts {
            kv: reversed(&[0, 1]),
            weight: reversed(&[0]),
            table: reversed(&[0]),
            positions: reversed(&[0]),
            k_out: Some(reversed(&[1])),
            v_out: Some(reversed(&[0, 2])),
            ..Layouts::default()
        },
        ..Spec::default()
    }
}

/// Rows whose length is no multiple of 16 bytes, sources and destinations aligned or not.
pub fn unaligned_rows() -> Vec<Spec> {
    let mut specs = Vec::new();
    for head_dim in [46, 2, 6, 14, 34, 74] {
        for offset in [0, 1, 2, 4, 7] {
            for output in [0, 1, 2, 4, 7] {
                specs.push(Spec {
                    tokens: 2,
                    head_dim,
                    rotary_dim: head_dim,
                    layouts: Layouts {
                        kv: Layout::shifted(offset),
                        k_out: Some(Layout::shifted(output)),
                        v_out: Some(Layout::shifted(output + 1)),
                        ..Layouts::default()
                    },
                    ..Spec::default()
                });
            }
        }
    }
    specs
}

/// An aligned spec, and the same with one tensor after another shifted by 1, 2 and 4 elements.
pub fn shifted_in_turn(dtype: DType) -> (Spec, Vec<Spec>) {
    let aligned = Spec {
        value_scale: true,
        ..Spec::default().dtype(dtype)
    };
    let mut shifted = Vec::new();
    for tensor in 0..8 {
        for offset in [1, 2, 4] {
            let mut spec = aligned.clone();
            spec.layouts.get_mut(tensor).offset = offset;
            shifted.push(spec);
        }
    }
    (aligned, shifted)
}

/// Everything above.
pub fn all() -> Vec<Spec> {
    let mut specs = [
        counts_above_65535(),
        no_tokens(),
        ends_of_the_table(),
        vec![an_empty_table(), negative_strides()],
        half_rotated(),
        pairs_of_types(),
        many_heads(),
        odd_rotary_dims(),
        uncommon_head_dims(),
        slices(),
        unaligned_rows(),
    ]
    .concat();
    for dtype in FLOATS {
        specs.extend(shifted_in_turn(dtype).1);
    }
    specs
}
