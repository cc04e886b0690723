//! Every kernel on the emulated device against plain loops in the order of the contract.

mod common;

use common::{Memory, Random, encode, size};
use fused_kv_kernels::abi::{Code, Params, Status, flags};
use fused_kv_kernels::arith;
use fused_kv_kernels::launch::{Facts, Path};

struct Case {
    tokens: usize,
    layers: usize,
    heads: usize,
    head_dim: usize,
    rotary_dim: usize,
    interleaved: bool,
    offset: bool,
    scaled: bool,
    kv: Code,
    weight: Code,
    table: Code,
    /// Elements by which kv and the outputs are shifted.
    shift: usize,
    seed: u64,
}

/// Runs the case on every path that serves it; returns which did.
fn check(case: &Case, threads: Option<u32>) -> Vec<Path> {
    let mut random = Random(case.seed);
    let (t, l, h, d, r) = (
        case.tokens,
        case.layers,
        case.heads,
        case.head_dim,
        case.rotary_dim,
    );
    let p = 7;
    let kv = Memory::random(
        case.kv,
        t * l * 2 * h * d,
        case.shift * size(case.kv),
        &mut random,
    );
    let weight = Memory::random(case.weight, l * d, 0, &mut random);
    let table = Memory::random(case.table, p * r, 0, &mut random);
    let eps: Vec<f32> = (0..l).map(|l| 1e-6 * (l + 1) as f32).collect();
    let scale: Vec<f32> = (0..l).map(|l| 0.612 + l as f32).collect();
    // The third token's position is outside the table, its rows must stay as they are.
    let positions: Vec<i64> = (0..t)
        .map(|t| {
            if t == 2 {
                p as i64
            } else {
                random.below(p as u64) as i64
            }
        })
        .collect();

    let facts = Facts {
        heads: h as u32,
        head_dim: d as u32,
        rotary_dim: r as u32,
        interleaved: case.interleaved,
        kv: case.kv,
        weight: case.weight,
        table: case.table,
        out: case.kv,
        pool: false,
        kv_bits: kv.address() | (h * d * size(case.kv)) as u64 | (d * size(case.kv)) as u64,
        out_bits: (case.shift * size(case.kv)) as u64 | (d * size(case.kv)) as u64,
        weight_bits: weight.address() | (d * size(case.weight)) as u64,
        table_bits: table.address() | (r * size(case.table)) as u64,
        kv_shifted_bits: (kv.address() - size(case.kv) as u64) | (d * size(case.kv)) as u64,
        out_shifted_bits: ((case.shift + 15) * size(case.kv)) as u64 | (d * size(case.kv)) as u64,
    };
    let mut ran = Vec::new();
    for path in Path::ALL {
        if facts.obstacle(path).is_some() {
            continue;
        }
        ran.push(path);
        let k_out = Memory::new(case.kv, l * t * h * d, case.shift * size(case.kv));
        let v_out = Memory::new(case.kv, l * t * h * d, case.shift * size(case.kv));
        let mut status = Status::CLEAR;
        let launch = facts.launch(path, t as u64, threads);
        let bytes = |elements: usize, code: Code| (elements * size(code)) as i64;
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        let mut params = Params {
            kv: kv.address(),
            k_out: k_out.address(),
            v_out: v_out.address(),
            k_norm_weight: weight.address(),
            eps: eps.as_ptr() as u64,
            cos_sin_cache: table.address(),
            positions: positions.as_ptr() as u64,
            value_scale: if case.scaled {
                scale.as_ptr() as u64
            } else {
                0
            },
            status: &raw mut status as u64,
            kv_token: bytes(l * 2 * h * d, case.kv),
            kv_layer: bytes(2 * h * d, case.kv),
            kv_value: bytes(h * d, case.kv),
            weight_layer: bytes(d, case.weight),
            table_row: bytes(r, case.table),
            table_rows: p as i64,
            position: 8,
            k_outer: bytes(t * h * d, case.kv),
            k_token: bytes(h * d, case.kv),
            k_head: bytes(d, case.kv),
            v_outer: bytes(t * h * d, case.kv),
            v_token: bytes(h * d, case.kv),
            v_head: bytes(d, case.kv),
            reserved_slot: -1,
            heads: h as u32,
            head_dim: d as u32,
            rotary_dim: r as u32,
            kv_dtype: case.kv as u32,
            weight_dtype: case.weight as u32,
            table_dtype: case.table as u32,
            out_dtype: case.kv as u32,
            flags: flags::POSITIONS_I64
                | flags::REPORT
                | flag(case.interleaved, flags::INTERLEAVED)
                | flag(case.offset, flags::OFFSET_WEIGHT),
            ..Params::default()
        };
        launch.apply(&mut params);
        let grid = launch.grid(&mut params, t as u32, l as u32);
        let reads = [
            kv.range(),
            weight.range(),
            table.range(),
            (params.eps, 4 * l),
            (params.positions, 8 * t),
            (params.value_scale, if case.scaled { 4 * l } else { 0 }),
        ];
        let writes = [k_out.range(), v_out.range()];
        // SAFETY: the parameters describe the memory above.
        unsafe { common::run(&launch, grid, &params, &reads, &writes) };

        let bad = if t > 2 { Some((1, 2, p as i64)) } else { None };
        let found = status
            .positions()
            .map(|found| (found.count, found.token, found.value));
        assert_eq!(found, bad);
        for layer in 0..l {
            for (token, position) in positions.iter().enumerate() {
                for head in 0..h {
                    let context = format!(
                        "{path:?} {:?} D={d} R={r} interleaved={} token {token} layer {layer} head {head}",
                        case.kv, case.interleaved
                    );
                    let out = ((layer * t + token) * h + head) * d;
                    if token == 2 {
                        for i in 0..d {
                            assert!(k_out.raw(out + i).iter().all(|b| *b == 0xA5), "{context}");
                            assert!(v_out.raw(out + i).iter().all(|b| *b == 0xA5), "{context}");
                        }
                        continue;
                    }
                    let source = ((token * l + layer) * 2 * h + head) * d;
                    let x: Vec<f32> = (0..d).map(|i| kv.get(source + i)).collect();
                    let w: Vec<f32> = (0..d)
                        .map(|i| arith::effective_weight(weight.get(layer * d + i), case.offset))
                        .collect();
                    let row = *position as usize * r;
                    let expected = reference(&x, &w, eps[layer], case, |angle| {
                        (table.get(row + angle), table.get(row + r / 2 + angle))
                    });
                    for i in 0..d {
                        assert_eq!(
                            k_out.raw(out + i),
                            encode(case.kv, expected[i]),
                            "K {context} element {i}"
                        );
                        let v = source + h * d + i;
                        let expected = if case.scaled {
                            encode(case.kv, kv.get(v) * scale[layer])
                        } else {
                            kv.raw(v).to_vec()
                        };
                        assert_eq!(v_out.raw(out + i), expected, "V {context} element {i}");
                    }
                }
            }
        }
        let shift = case.shift * size(case.kv);
        let end = shift + l * t * h * d * size(case.kv);
        for memory in [&k_out, &v_out] {
            let canaries = memory.bytes()[..shift].iter().chain(&memory.bytes()[end..]);
            assert!(
                canaries.into_iter().all(|byte| *byte == 0xA5),
                "canary of {path:?}"
            );
        }
    }
    ran
}

fn reference(
    x: &[f32],
    w: &[f32],
    eps: f32,
    case: &Case,
    angle: impl Fn(usize) -> (f32, f32),
) -> Vec<f32> {
    let mut sums: Vec<f32> = x.chunks(8).map(arith::chunk_sum).collect();
    sums.resize(sums.len().next_power_of_two(), 0.0);
    let inv = 1.0 / (arith::tree_sum(&mut sums) / x.len() as f32 + eps).sqrt();
    let mut y: Vec<f32> = x.iter().zip(w).map(|(x, w)| (x * inv) * w).collect();
    for i in 0..case.rotary_dim / 2 {
        let (first, second) = if case.interleaved {
            (2 * i, 2 * i + 1)
        } else {
            (i, i + case.rotary_dim / 2)
        };
        let (cos, sin) = angle(i);
        let (a, b) = (y[first], y[second]);
        y[first] = a * cos - b * sin;
        y[second] = b * cos + a * sin;
    }
    y
}

/// The paths that serve rows shifted by `shift` elements.
fn paths(shift: usize, vector: bool) -> Vec<Path> {
    let mut paths = Vec::from(match shift {
        0 => &[Path::Pairs, Path::Elements][..],
        1 => &[Path::ShiftedPairs, Path::Elements],
        _ => panic!("a shift of {shift}"),
    });
    if vector && shift == 0 {
        paths.insert(0, Path::Vector);
    }
    paths
}

const FLOATS: [Code; 3] = [Code::Bf16, Code::F16, Code::F32];

#[test]
fn the_common_geometry() {
    let case = |seed, threads, shift| {
        let case = Case {
            tokens: 4,
            layers: 2,
            heads: 3,
            head_dim: 128,
            rotary_dim: 128,
            interleaved: false,
            offset: false,
            scaled: false,
            kv: Code::Bf16,
            weight: Code::Bf16,
            table: Code::Bf16,
            shift,
            seed,
        };
        assert_eq!(check(&case, threads), paths(shift, true));
    };
    case(1, None, 0);
    case(2, Some(256), 0);
    case(3, Some(128), 1);
}

#[test]
fn geometries_that_are_known_to_break_kernels() {
    for (seed, (head_dim, rotary_dim)) in [
        (2, 2),
        (4, 4),
        (6, 6),
        (8, 8),
        (16, 16),
        (46, 46),
        (46, 24),
        (54, 6),
        (64, 24),
        (72, 72),
        (80, 32),
        (96, 96),
        (112, 96),
        (128, 64),
        (128, 96),
        (160, 80),
        (192, 192),
        (224, 24),
        (256, 64),
        (512, 512),
        (576, 64),
        (1024, 1024),
    ]
    .into_iter()
    .enumerate()
    {
        for (interleaved, shift) in [(false, 0), (true, 0), (false, 1), (true, 1)] {
            let case = Case {
                tokens: 3,
                layers: 1,
                // Batches of several groups of heads, and what is left of a group.
                heads: if head_dim <= 80 { 11 } else { 2 },
                head_dim,
                rotary_dim,
                interleaved,
                offset: interleaved,
                scaled: !interleaved && head_dim > 64,
                kv: FLOATS[(seed + shift) % 3],
                weight: Code::Bf16,
                table: Code::F32,
                shift,
                seed: seed as u64,
            };
            let served = check(&case, None);
            let vector = head_dim % 8 == 0
                && head_dim <= 512
                && rotary_dim % if interleaved { 8 } else { 16 } == 0;
            assert_eq!(served, paths(shift, vector), "D={head_dim} R={rotary_dim}");
        }
    }
}

#[test]
fn random_cases() {
    let mut random = Random(20);
    for seed in 0..60 {
        let largest = random.pick(&[20, 80, 128]);
        let head_dim = 2 * (1 + random.below(largest) as usize);
        let head_dim = if random.below(2) == 0 {
            head_dim.next_multiple_of(8)
        } else {
            head_dim
        };
        let rotary_dim = 2 * (1 + random.below(head_dim as u64 / 2) as usize);
        let case = Case {
            tokens: 1 + random.below(4) as usize,
            layers: 1 + random.below(2) as usize,
            heads: 1 + random.below(5) as usize,
            head_dim,
            rotary_dim,
            interleaved: random.below(2) == 0,
            offset: random.below(2) == 0,
            scaled: random.below(3) == 0,
            kv: random.pick(&FLOATS),
            weight: random.pick(&FLOATS),
            table: random.pick(&FLOATS),
            shift: random.pick(&[0, 0, 0, 1, 1, 2, 3, 4]),
            seed,
        };
        let threads = random.pick(&[None, Some(64), Some(192)]);
        let served = check(&case, threads);
        assert_eq!(served.last(), Some(&Path::Elements));
        assert_eq!(served.contains(&Path::ShiftedPairs), case.shift % 2 == 1);
    }
}
