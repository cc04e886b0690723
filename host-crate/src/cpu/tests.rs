use super::element::Kind;
use super::*;
use crate::plan::{Config, Inputs, NormWeight, Output, Outputs, Plan, RopeStyle};
use crate::tensor::{TensorView, TensorViewMut};
use fused_kv_kernels::convert;

/// A small generator of repeatable numbers.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 32) as u32
    }

    /// Mostly ordinary values, now and then a special one.
    fn value(&mut self) -> f32 {
        match self.bits() % 4000 {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => -0.0,
            3 => 1e-42,
            _ => (self.bits() as f32 / u32::MAX as f32 - 0.5) * 8.0,
        }
    }

    fn bytes(&mut self, dtype: DType, len: usize) -> Vec<u8> {
        (0..len).flat_map(|_| encode(dtype, self.value())).collect()
    }
}

fn encode(dtype: DType, value: f32) -> Vec<u8> {
    match dtype {
        DType::Bf16 => convert::bf16_from_f32(value).to_ne_bytes().to_vec(),
        DType::F16 => convert::f16_from_f32(value).to_ne_bytes().to_vec(),
        _ => convert::f32_from_f32(value).to_ne_bytes().to_vec(),
    }
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks(dtype.size())
        .map(|x| match dtype {
            DType::Bf16 => convert::bf16_to_f32(u16::from_ne_bytes(x.try_into().unwrap())),
            DType::F16 => convert::f16_to_f32(u16::from_ne_bytes(x.try_into().unwrap())),
            _ => f32::from_ne_bytes(x.try_into().unwrap()),
        })
        .collect()
}

/// One job's numbers, contiguous.
struct Case {
    config: Config,
    tokens: usize,
    layers: usize,
    dtypes: [DType; 3],
    kv: Vec<u8>,
    weight: Vec<u8>,
    eps: Vec<f32>,
    table: Vec<u8>,
    table_rows: usize,
    positions: Vec<i64>,
    scale: Option<Vec<f32>>,
}

impl Case {
    fn new(seed: u64, config: Config, [tokens, layers]: [usize; 2], dtypes: [DType; 3]) -> Self {
        let mut random = Random(seed);
        let table_rows = 50;
        Self {
            config,
            tokens,
            layers,
            dtypes,
            kv: random.bytes(
                dtypes[0],
                tokens * layers * 2 * config.num_kv_heads * config.head_dim,
            ),
            weight: random.bytes(dtypes[1], layers * config.head_dim),
            eps: (0..layers).map(|_| random.value().abs() * 1e-3).collect(),
            table: random.bytes(dtypes[2], table_rows * config.rotary_dim),
            table_rows,
            positions: (0..tokens).map(|_| i64::from(random.bits() % 50)).collect(),
            scale: seed
                .is_multiple_of(2)
                .then(|| (0..layers).map(|_| random.value()).collect()),
        }
    }

    fn inputs(&self) -> Inputs<'_> {
        let Config {
            num_kv_heads,
            head_dim,
            rotary_dim,
            ..
        } = self.config;
        let bytes = |data, dtype, shape: &[usize]| TensorView::from_bytes(data, dtype, shape);
        let kv = [self.tokens, self.layers, 2 * num_kv_heads * head_dim];
        Inputs {
            kv: bytes(&self.kv, self.dtypes[0], &kv).unwrap(),
            k_norm_weight: bytes(&self.weight, self.dtypes[1], &[self.layers, head_dim]).unwrap(),
            eps: TensorView::from_slice(&self.eps, &[self.layers]).unwrap(),
            cos_sin_cache: bytes(&self.table, self.dtypes[2], &[self.table_rows, rotary_dim])
                .unwrap(),
            positions: TensorView::from_slice(&self.positions, &[self.tokens]).unwrap(),
            value_scale: self
                .scale
                .as_ref()
                .map(|scale| TensorView::from_slice(scale, &[self.layers]).unwrap()),
        }
    }

    fn run(&self, isa: Isa, stream_bytes: usize, threads: usize) -> (Vec<u8>, Vec<u8>) {
        let mut plan = Plan::new(self.config, self.inputs(), Outputs::default()).unwrap();
        plan.force_cpu(isa, stream_bytes);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| plan.run()).unwrap();
        plan.check().unwrap();
        let bytes = |view: TensorView<'_>| view.as_bytes().unwrap().to_vec();
        (bytes(plan.k()), bytes(plan.v()))
    }

    /// The contract, one element at a time, in an order of its own.
    fn reference(&self) -> (Vec<u8>, Vec<u8>) {
        let Config {
            num_kv_heads: heads,
            head_dim,
            rotary_dim,
            rope_style,
            norm_weight,
        } = self.config;
        let [dtype, weight_dtype, table_dtype] = self.dtypes;
        let (kv, weight, table) = (
            decode(dtype, &self.kv),
            decode(weight_dtype, &self.weight),
            decode(table_dtype, &self.table),
        );
        let size = dtype.size();
        let (mut k_out, mut v_out) = (Vec::new(), Vec::new());
        for layer in 0..self.layers {
            for token in 0..self.tokens {
                for head in 0..heads {
                    let row = ((token * self.layers + layer) * 2 * heads + head) * head_dim;
                    let x = &kv[row..row + head_dim];
                    let mut sums: Vec<f32> = (0..head_dim.div_ceil(8).next_power_of_two())
                        .map(|chunk| {
                            let mut sum = None;
                            for &x in x.iter().skip(8 * chunk).take(8) {
                                sum = Some(match sum {
                                    None => x * x,
                                    Some(sum) => sum + x * x,
                                });
                            }
                            sum.unwrap_or(0.0)
                        })
                        .collect();
                    while sums.len() > 1 {
                        let half = sums.len() / 2;
                        sums = (0..half).map(|i| sums[i] + sums[i + half]).collect();
                    }
                    let inv = 1.0 / (sums[0] / head_dim as f32 + self.eps[layer]).sqrt();
                    let n: Vec<f32> = (0..head_dim)
                        .map(|i| {
                            let w = weight[layer * head_dim + i];
                            let w = match norm_weight {
                                NormWeight::Plain => w,
                                NormWeight::Offset => 1.0 + w,
                            };
                            (x[i] * inv) * w
                        })
                        .collect();
                    let angles = &table[self.positions[token] as usize * rotary_dim..];
                    let half = rotary_dim / 2;
                    for i in 0..head_dim {
                        let (column, partner, is_first) = match rope_style {
                            RopeStyle::Neox => (i % half, (i + half) % rotary_dim, i < half),
                            RopeStyle::Interleaved => (i / 2, i ^ 1, i % 2 == 0),
                        };
                        let out = if i >= rotary_dim {
                            n[i]
                        } else {
                            let (cos, sin) = (angles[column], angles[half + column]);
                            if is_first {
                                n[i] * cos - n[partner] * sin
                            } else {
                                n[i] * cos + n[partner] * sin
                            }
                        };
                        k_out.extend(encode(dtype, out));
                    }
                    for i in 0..head_dim {
                        let at = row + heads * head_dim + i;
                        match &self.scale {
                            Some(scale) => v_out.extend(encode(dtype, kv[at] * scale[layer])),
                            None => v_out.extend(&self.kv[at * size..(at + 1) * size]),
                        }
                    }
                }
            }
        }
        (k_out, v_out)
    }
}

const DTYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

#[cfg(target_arch = "x86_64")]
const ISAS: &[Isa] = &[Isa::Portable, Isa::Avx2];
#[cfg(not(target_arch = "x86_64"))]
const ISAS: &[Isa] = &[Isa::Portable];

/// The instruction sets that can run here.
fn isas() -> impl Iterator<Item = Isa> {
    let best = Isa::detect();
    ISAS.iter().copied().filter(move |&isa| {
        let runs = isa == Isa::Portable || isa == best;
        if !runs {
            println!("skipped: this CPU has no {isa:?}");
        }
        runs
    })
}

#[test]
fn every_instruction_set_gives_the_bits_of_the_plain_loops() {
    let mut seed = 0;
    for (head_dim, rotary_dim) in [
        (2, 2),
        (8, 8),
        (46, 24),
        (64, 64),
        (64, 16),
        (72, 72),
        (64, 48),
        (80, 32),
        (96, 96),
        (128, 128),
        (128, 64),
        (192, 192),
        (254, 18),
        (576, 64),
        (1024, 1024),
    ] {
        for kv in DTYPES {
            for weight in DTYPES {
                for table in DTYPES {
                    seed += 1;
                    let config = Config {
                        num_kv_heads: 1 + seed as usize % 3,
                        head_dim,
                        rotary_dim,
                        rope_style: [RopeStyle::Neox, RopeStyle::Interleaved][seed as usize % 2],
                        norm_weight: [NormWeight::Plain, NormWeight::Offset][seed as usize / 2 % 2],
                    };
                    let case = Case::new(seed, config, [5, 2], [kv, weight, table]);
                    let expected = case.reference();
                    for isa in isas() {
                        for stream_bytes in [0, usize::MAX] {
                            let found = case.run(isa, stream_bytes, 1);
                            assert!(
                                found.0 == expected.0,
                                "K {isa:?} {config:?} {kv} {weight} {table}"
                            );
                            assert!(
                                found.1 == expected.1,
                                "V {isa:?} {config:?} {kv} {weight} {table}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn every_split_gives_the_same_bits() {
    let config = Config {
        num_kv_heads: 4,
        head_dim: 64,
        rotary_dim: 64,
        rope_style: RopeStyle::Neox,
        norm_weight: NormWeight::Plain,
    };
    for (seed, tokens) in [(1, 1), (2, 3), (3, 40), (4, 700)] {
        let case = Case::new(seed, config, [tokens, 3], [DType::Bf16; 3]);
        let expected = case.reference();
        for threads in [1, 2, 5] {
            assert!(
                case.run(Isa::detect(), STREAM_BYTES, threads) == expected,
                "{tokens} {threads}"
            );
        }
    }
}

#[test]
fn conversions_agree_between_instruction_sets() {
    for (level, from, into) in [
        (
            Isa::Portable,
            F16::load::<Portable> as unsafe fn(*const u8, &mut [f32]),
            F16::store::<Portable> as unsafe fn(&[f32], *mut u8),
        ),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, F16::load::<Avx2>, F16::store::<Avx2>),
    ] {
        if !isas().any(|isa| isa == level) {
            continue;
        }
        let halves: Vec<u16> = (0..=u16::MAX).collect();
        let mut floats = vec![0f32; halves.len()];
        // SAFETY: as many elements on both sides, and the instruction set is there.
        unsafe { from(halves.as_ptr().cast(), &mut floats) };
        for (half, float) in halves.iter().zip(&floats) {
            let expected = convert::f16_to_f32(*half);
            assert!(float.to_bits() == expected.to_bits() || (float.is_nan() && expected.is_nan()));
        }
        // Around every tie, and specials.
        let mut values: Vec<f32> = floats
            .iter()
            .flat_map(|x| {
                let tie = f32::from_bits(x.to_bits() + 0x1000);
                [*x, tie, tie.next_up(), tie.next_down()]
            })
            .collect();
        values.extend([
            f32::MAX,
            f32::MIN_POSITIVE,
            1e-45,
            -f32::INFINITY,
            65519.9,
            65520.0,
        ]);
        let mut stored = vec![0u16; values.len()];
        // SAFETY: as above.
        unsafe { into(&values, stored.as_mut_ptr().cast()) };
        for (value, stored) in values.iter().zip(stored) {
            assert_eq!(stored, convert::f16_from_f32(*value), "{value:e}");
        }
    }
}

#[test]
fn bad_positions_are_reported_and_their_rows_left_alone() {
    let config = Config {
        num_kv_heads: 2,
        head_dim: 64,
        rotary_dim: 64,
        rope_style: RopeStyle::Neox,
        norm_weight: NormWeight::Plain,
    };
    const CANARY: u8 = 0xa5;
    for tokens in [4, 300] {
        let mut case = Case::new(1, config, [tokens, 3], [DType::Bf16; 3]);
        let (good_k, good_v) = case.reference();
        let bad = [(2, i64::MIN + 5), (1, 1 << 31), (tokens - 1, 50)];
        for (token, position) in bad {
            case.positions[token] = position;
        }
        let (mut k, mut v) = (vec![CANARY; good_k.len()], vec![CANARY; good_v.len()]);
        let shape = [3, tokens, 2, 64];
        let outputs = Outputs {
            k: Output::Into(TensorViewMut::from_bytes(&mut k, DType::Bf16, &shape).unwrap()),
            v: Output::Into(TensorViewMut::from_bytes(&mut v, DType::Bf16, &shape).unwrap()),
        };
        let mut plan = Plan::new(case.config, case.inputs(), outputs).unwrap();
        plan.run().unwrap();
        plan.run().unwrap();
        assert_eq!(
            plan.check(),
            Err(Error::PositionOutOfRange {
                token: 1,
                position: 1 << 31,
                table_rows: 50,
                count: 6,
            })
        );
        assert_eq!(plan.check(), Ok(()));
        drop(plan);
        let row = 2 * 64 * 2;
        for (index, (k, v)) in k.chunks(row).zip(v.chunks(row)).enumerate() {
            let at = index * row..(index + 1) * row;
            if bad.iter().any(|(token, _)| *token == index % tokens) {
                assert!(k.iter().chain(v).all(|&byte| byte == CANARY));
            } else {
                assert!(k == &good_k[at.clone()] && v == &good_v[at]);
            }
        }
    }
}
