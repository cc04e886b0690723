//! The pool kernels on the emulated device against the dense ones: the same rows, in the slots of
//! pages, in every type.

mod common;

use common::{Memory, Random, encode, size};
use fused_kv_kernels::abi::{Code, FastDivisor, Params, Status, flags};
use fused_kv_kernels::arith::Reciprocal;
use fused_kv_kernels::launch::{Facts, Path};

const TOKENS: usize = 6;
const LAYERS: usize = 2;
const HEADS: usize = 3;
const TABLE_ROWS: usize = 5;
const SLOTS: i64 = 10;
const RESERVED: i64 = 2;

struct Case {
    head_dim: usize,
    rotary_dim: usize,
    interleaved: bool,
    kv: Code,
    pool: Code,
    /// Heads of a page before its tokens.
    hnd: bool,
    page_size: usize,
    /// Elements by which kv and the pool are shifted from alignment.
    shift: [usize; 2],
}

/// A page's strides in elements: page, token, head.
fn strides(case: &Case) -> [usize; 3] {
    let d = case.head_dim;
    let (token, head) = if case.hnd {
        (d, case.page_size * d)
    } else {
        (HEADS * d, d)
    };
    // Room between the pages.
    [case.page_size * HEADS * d + 16, token, head]
}

/// Runs the case on every path that serves it; returns which did.
fn check(case: &Case) -> Vec<Path> {
    let mut random = Random(case.head_dim as u64);
    let (d, r) = (case.head_dim, case.rotary_dim);
    let kv_elements = TOKENS * LAYERS * 2 * HEADS * d;
    let kv_shift = case.shift[0] * size(case.kv);
    let kv = Memory::random(case.kv, kv_elements, kv_shift, &mut random);
    let weight = Memory::random(case.kv, LAYERS * d, 0, &mut random);
    let table = Memory::random(case.kv, TABLE_ROWS * r, 0, &mut random);
    let eps = [1e-6f32, 1e-2];
    let scale = [1.0f32, 0.612];
    let descales = [[0.5f32, 3.0], [0.17, 1.0]];
    let reciprocals = descales.map(|descales| descales.map(Reciprocal::new));
    let positions: [i64; TOKENS] = [0, 4, 1, TABLE_ROWS as i64, 2, -1];
    // Written, past the end, reserved, bad position, skipped, past the end again.
    let slots: [i32; TOKENS] = [9, SLOTS as i32, RESERVED as i32, 1, i32::MIN, i32::MAX];
    let fp8 = matches!(case.pool, Code::E4M3 | Code::E5M2);

    let bytes = |elements: usize, code: Code| (elements * size(code)) as i64;
    let mut status = Status::CLEAR;
    let mut params = Params {
        kv: kv.address(),
        k_norm_weight: weight.address(),
        eps: eps.as_ptr() as u64,
        cos_sin_cache: table.address(),
        positions: positions.as_ptr() as u64,
        value_scale: scale.as_ptr() as u64,
        status: &raw mut status as u64,
        kv_token: bytes(LAYERS * 2 * HEADS * d, case.kv),
        kv_layer: bytes(2 * HEADS * d, case.kv),
        kv_value: bytes(HEADS * d, case.kv),
        weight_layer: bytes(d, case.kv),
        table_row: bytes(r, case.kv),
        table_rows: TABLE_ROWS as i64,
        position: 8,
        k_outer: bytes(TOKENS * HEADS * d, case.kv),
        k_token: bytes(HEADS * d, case.kv),
        k_head: bytes(d, case.kv),
        v_outer: bytes(TOKENS * HEADS * d, case.kv),
        v_token: bytes(HEADS * d, case.kv),
        v_head: bytes(d, case.kv),
        reserved_slot: -1,
        heads: HEADS as u32,
        head_dim: d as u32,
        rotary_dim: r as u32,
        kv_dtype: case.kv as u32,
        weight_dtype: case.kv as u32,
        table_dtype: case.kv as u32,
        out_dtype: case.kv as u32,
        flags: flags::POSITIONS_I64
            | flags::REPORT
            | if case.interleaved {
                flags::INTERLEAVED
            } else {
                0
            },
        ..Params::default()
    };
    let mut facts = Facts {
        heads: HEADS as u32,
        head_dim: d as u32,
        rotary_dim: r as u32,
        interleaved: case.interleaved,
        kv: case.kv,
        weight: case.kv,
        table: case.kv,
        out: case.kv,
        pool: false,
        kv_bits: kv.address() | (d * size(case.kv)) as u64,
        out_bits: (d * size(case.kv)) as u64,
        weight_bits: (d * size(case.kv)) as u64,
        table_bits: (r * size(case.kv)) as u64,
        kv_shifted_bits: (kv.address() - size(case.kv) as u64) | (d * size(case.kv)) as u64,
        // Of the pool, below: the dense result takes no part in this.
        out_shifted_bits: 1,
    };
    let run = |facts: &Facts, path: Path, mut params: Params, outputs: &[Memory]| {
        let launch = facts.launch(path, (TOKENS * LAYERS) as u64, Some(64));
        launch.apply(&mut params);
        let grid = launch.grid(&mut params, TOKENS as u32, LAYERS as u32);
        let mut reads = vec![
            kv.range(),
            weight.range(),
            table.range(),
            (params.eps, 4 * LAYERS),
            (params.positions, 8 * TOKENS),
            (params.value_scale, 4 * LAYERS),
        ];
        if facts.pool {
            reads.push((params.slots, 4 * TOKENS));
            reads.extend([params.k_out, params.v_out].map(|bases| (bases, 8 * LAYERS)));
        }
        if params.k_descale != 0 {
            reads.extend([params.k_descale, params.v_descale].map(|table| (table, 16 * LAYERS)));
        }
        let writes: Vec<_> = outputs.iter().map(Memory::range).collect();
        // SAFETY: the parameters describe the memory of this test.
        unsafe { common::run(&launch, grid, &params, &reads, &writes) };
    };

    // The dense result, for comparison.
    let dense = [(); 2].map(|()| Memory::new(case.kv, LAYERS * TOKENS * HEADS * d, 0));
    (params.k_out, params.v_out) = (dense[0].address(), dense[1].address());
    run(&facts, Path::Elements, params, &dense);

    let [page, token, head] = strides(case).map(|stride| bytes(stride, case.pool));
    params.slots = slots.as_ptr() as u64;
    params.slot = 4;
    params.num_slots = SLOTS;
    params.reserved_slot = RESERVED;
    if case.page_size.is_power_of_two() {
        params.page_shift = case.page_size.trailing_zeros();
    } else {
        params.page_shift = u32::MAX;
        params.page_divisor = FastDivisor::new(case.page_size as u32);
    }
    if fp8 {
        (params.k_descale, params.v_descale) = (
            reciprocals[0].as_ptr() as u64,
            reciprocals[1].as_ptr() as u64,
        );
    }
    params.out_dtype = case.pool as u32;
    (params.k_outer, params.k_token, params.k_head) = (page, token, head);
    (params.v_outer, params.v_token, params.v_head) = (page, token, head);
    (facts.pool, facts.out) = (true, case.pool);

    let mut ran = Vec::new();
    for path in Path::ALL {
        let shift = case.shift[1] * size(case.pool);
        let elements = (SLOTS as usize).div_ceil(case.page_size) * strides(case)[0];
        let pool = [(); 4].map(|()| Memory::new(case.pool, elements, shift));
        let bases = pool.each_ref().map(Memory::address);
        let steps = (page | token | head) as u64;
        facts.out_bits = bases.iter().fold(steps, |a, b| a | b);
        let second = |base: &u64| base - size(case.pool) as u64;
        facts.out_shifted_bits = bases.iter().map(second).fold(steps, |a, b| a | b);
        if facts.obstacle(path).is_some() {
            continue;
        }
        ran.push(path);
        (params.k_out, params.v_out) = (bases.as_ptr() as u64, bases[2..].as_ptr() as u64);
        // SAFETY: the record is this function's, and no kernel runs.
        unsafe { (&raw mut status).write(Status::CLEAR) };
        run(&facts, path, params, &pool);
        // SAFETY: as above.
        let status = unsafe { (&raw const status).read() };
        let past = status
            .slots()
            .map(|found| (found.count, found.token, found.value));
        assert_eq!(past, Some((2, 1, SLOTS)));
        let outside = status
            .positions()
            .map(|found| (found.count, found.token, found.value));
        assert_eq!(outside, Some((1, 3, TABLE_ROWS as i64)));
        for half in 0..2 {
            for layer in 0..LAYERS {
                let memory = &pool[2 * half + layer];
                let mut expected = Memory::new(case.pool, elements, shift);
                let slot = slots[0] as usize;
                let (in_page, page) = (slot % case.page_size, slot / case.page_size);
                for (index, element) in (0..HEADS * d).enumerate() {
                    let value = dense[half].get(layer * TOKENS * HEADS * d + element);
                    let value = if fp8 {
                        value / descales[half][layer]
                    } else {
                        value
                    };
                    let [page_stride, token_stride, head_stride] = strides(case);
                    let to = page * page_stride
                        + in_page * token_stride
                        + index / d * head_stride
                        + index % d;
                    let at = shift + to * size(case.pool);
                    let raw = encode(case.pool, value);
                    expected.bytes_mut()[at..at + raw.len()].copy_from_slice(&raw);
                }
                assert!(
                    memory.bytes() == expected.bytes(),
                    "{path:?}, half {half}, layer {layer}, D={d}, {:?} to {:?}, page of {}",
                    case.kv,
                    case.pool,
                    case.page_size
                );
            }
        }
    }
    ran
}

/// From f32, whose dense result is not rounded, to every type; from the others to their own.
#[test]
fn every_type() {
    let pools = [Code::Bf16, Code::F16, Code::F32, Code::E4M3, Code::E5M2];
    let pairs = pools
        .map(|pool| (Code::F32, pool))
        .into_iter()
        .chain([Code::Bf16, Code::F16].map(|code| (code, code)));
    for (kv, pool) in pairs {
        for (head_dim, rotary_dim) in [(128, 128), (48, 16), (46, 46)] {
            for (interleaved, shift) in [
                (false, [0; 2]),
                (true, [0; 2]),
                (false, [1; 2]),
                (true, [1; 2]),
            ] {
                let served = check(&Case {
                    head_dim,
                    rotary_dim,
                    interleaved,
                    kv,
                    pool,
                    hnd: interleaved,
                    page_size: 4,
                    shift,
                });
                let expected = match shift {
                    [1, 1] => &[Path::ShiftedPairs, Path::Elements][..],
                    _ if head_dim % 8 == 0 => &[Path::Vector, Path::Pairs, Path::Elements],
                    _ => &[Path::Pairs, Path::Elements],
                };
                assert_eq!(served, expected, "{kv:?} {pool:?} D={head_dim}");
            }
        }
    }
}

#[test]
fn pages_of_every_size_and_alignment() {
    for page_size in [1, 2, 3, 5, 16] {
        for hnd in [false, true] {
            for (pool, shift) in [
                (Code::F32, [0, 0]),
                (Code::F32, [0, 1]),
                (Code::F32, [1, 1]),
                (Code::F32, [1, 0]),
                (Code::E5M2, [0, 0]),
                (Code::E5M2, [0, 2]),
                (Code::E5M2, [1, 1]),
            ] {
                let served = check(&Case {
                    head_dim: 16,
                    rotary_dim: 16,
                    interleaved: false,
                    kv: Code::F32,
                    pool,
                    hnd,
                    page_size,
                    shift,
                });
                let expected = match shift {
                    [0, 0] => &[Path::Vector, Path::Pairs, Path::Elements][..],
                    [0, 2] => &[Path::Pairs, Path::Elements],
                    [1, 1] => &[Path::ShiftedPairs, Path::Elements],
                    _ => &[Path::Elements],
                };
                assert_eq!(served, expected);
            }
        }
    }
}
