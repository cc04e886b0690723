//! Cases: everything that a job needs, in any layout, from a seed.

use fastrand::Rng;
use fused_kv::{Config, DType, NormWeight, RopeStyle};

use crate::element::{encode_all, encode_index};
use crate::tensor::{Layout, Tensor};

/// A job with the memory of its tensors.
#[derive(Clone, Debug)]
pub struct Case {
    /// What failures call it.
    pub name: String,
    /// Geometry and conventions.
    pub config: Config,
    /// `[T, L, 2*H*D]`.
    pub kv: Tensor,
    /// `[L, D]`.
    pub k_norm_weight: Tensor,
    /// `[L]`.
    pub eps: Tensor,
    /// `[P, R]`.
    pub cos_sin_cache: Tensor,
    /// `[T]`.
    pub positions: Tensor,
    /// `[L]`.
    pub value_scale: Option<Tensor>,
    /// `[L, T, H, D]`; `None` leaves the allocation to the plan.
    pub k_out: Option<Tensor>,
    /// `[L, T, H, D]`; `None` leaves the allocation to the plan.
    pub v_out: Option<Tensor>,
}

impl Case {
    /// T.
    pub fn tokens(&self) -> usize {
        self.kv.shape[0]
    }

    /// L.
    pub fn layers(&self) -> usize {
        self.kv.shape[1]
    }

    /// Shape of each output: `[L, T, H, D]`.
    pub fn out_shape(&self) -> [usize; 4] {
        let Config {
            num_kv_heads,
            head_dim,
            ..
        } = self.config;
        [self.layers(), self.tokens(), num_kv_heads, head_dim]
    }

    /// Tokens whose position is in the table.
    pub fn written(&self) -> Vec<bool> {
        let rows = self.cos_sin_cache.shape[0] as i64;
        self.positions
            .indices()
            .into_iter()
            .map(|position| (0..rows).contains(&position))
            .collect()
    }
}

/// What the elements of `kv` are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Values {
    /// K: normal values, with rows of zeros, small and large ones among them. V: the same, with
    /// arbitrary bits (NaN payloads, infinities, subnormals) among them.
    #[default]
    Normal,
    /// Arbitrary bits in K too.
    Wild,
}

/// Where each tensor of a case lies.
#[derive(Clone, Debug, Default)]
pub struct Layouts {
    /// Of `kv`.
    pub kv: Layout,
    /// Of `k_norm_weight`.
    pub weight: Layout,
    /// Of `eps`.
    pub eps: Layout,
    /// Of `cos_sin_cache`.
    pub table: Layout,
    /// Of `positions`.
    pub positions: Layout,
    /// Of `value_scale`.
    pub value_scale: Layout,
    /// Of `k_out`; `None` leaves the allocation to the plan.
    pub k_out: Option<Layout>,
    /// Of `v_out`; `None` leaves the allocation to the plan.
    pub v_out: Option<Layout>,
}

impl Layouts {
    /// The layout of a tensor by number: kv, weight, eps, table, positions, value_scale, k_out,
    /// v_out.
    ///
    /// # Panics
    ///
    /// For an output that the plan allocates.
    pub fn get_mut(&mut self, tensor: usize) -> &mut Layout {
        match tensor {
            0 => &mut self.kv,
            1 => &mut self.weight,
            2 => &mut self.eps,
            3 => &mut self.table,
            4 => &mut self.positions,
            5 => &mut self.value_scale,
            6 => self.k_out.as_mut().expect("a supplied k_out"),
            _ => self.v_out.as_mut().expect("a supplied v_out"),
        }
    }
}

/// The description that a [`Case`] is built from.
#[derive(Clone, Debug)]
pub struct Spec {
    /// T.
    pub tokens: usize,
    /// L.
    pub layers: usize,
    /// H.
    pub heads: usize,
    /// D.
    pub head_dim: usize,
    /// R.
    pub rotary_dim: usize,
    /// P.
    pub table_rows: usize,
    /// Which elements are rotated together.
    pub style: RopeStyle,
    /// Plain or offset weights.
    pub norm_weight: NormWeight,
    /// Type of `kv` and the outputs.
    pub kv: DType,
    /// Type of the weights.
    pub weight: DType,
    /// Type of the table.
    pub table: DType,
    /// Type of the positions.
    pub index: DType,
    /// Whether V is scaled.
    pub value_scale: bool,
    /// Factor on every value of the table.
    pub attention_factor: f32,
    /// What `kv` holds.
    pub values: Values,
    /// Positions in place of random ones.
    pub positions: Option<Vec<i64>>,
    /// Where the tensors lie.
    pub layouts: Layouts,
    /// Seed of everything random.
    pub seed: u64,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            tokens: 5,
            layers: 2,
            heads: 2,
            head_dim: 128,
            rotary_dim: 128,
            table_rows: 64,
            style: RopeStyle::Neox,
            norm_weight: NormWeight::Plain,
            kv: DType::Bf16,
            weight: DType::Bf16,
            table: DType::Bf16,
            index: DType::I64,
            value_scale: false,
            attention_factor: 1.0,
            values: Values::Normal,
            positions: None,
            layouts: Layouts {
                k_out: Some(Layout::default()),
                v_out: Some(Layout::default()),
                ..Layouts::default()
            },
            seed: 1,
        }
    }
}

/// The seed table: T, L, H, D, R of cases that every backend runs. Round sizes, odd ones, one
/// element more or less than a vector, single rows, the extremes of D.
pub const SHAPES: &[(usize, usize, usize, usize, usize)] = &[
    (1, 1, 1, 2, 2),
    (1, 2, 3, 4, 4),
    (3, 1, 1, 6, 4),
    (2, 2, 2, 8, 8),
    (5, 3, 1, 10, 10),
    (4, 2, 3, 16, 8),
    (3, 2, 2, 24, 24),
    (7, 1, 5, 32, 32),
    (2, 3, 2, 46, 46),
    (5, 2, 2, 46, 22),
    (17, 2, 4, 64, 64),
    (3, 5, 2, 72, 72),
    (11, 2, 3, 80, 32),
    (4, 2, 2, 80, 80),
    (6, 3, 3, 96, 96),
    (3, 2, 2, 112, 56),
    (1, 1, 1, 128, 128),
    (2, 8, 8, 128, 128),
    (33, 3, 4, 128, 128),
    (19, 2, 8, 128, 64),
    (5, 2, 2, 160, 160),
    (3, 2, 2, 192, 96),
    (3, 2, 2, 192, 192),
    (3, 1, 2, 224, 224),
    (9, 2, 2, 256, 256),
    (9, 2, 2, 256, 64),
    (2, 2, 1, 512, 512),
    (2, 1, 2, 576, 64),
    (1, 2, 2, 576, 576),
    (2, 1, 1, 1022, 1022),
    (2, 2, 1, 1024, 1024),
];

fn normal(rng: &mut Rng) -> f32 {
    let (u, v) = (1.0 - rng.f64(), rng.f64());
    ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
}

impl Spec {
    /// A spec of the seed table's form.
    pub fn shape(
        (tokens, layers, heads, head_dim, rotary_dim): (usize, usize, usize, usize, usize),
    ) -> Self {
        Self {
            tokens,
            layers,
            heads,
            head_dim,
            rotary_dim,
            ..Self::default()
        }
    }

    /// All float tensors of one type.
    pub fn dtype(mut self, dtype: DType) -> Self {
        (self.kv, self.weight, self.table) = (dtype, dtype, dtype);
        self
    }

    /// `kv` and both outputs shifted by `offset` elements.
    pub fn shifted(mut self, offset: usize) -> Self {
        self.layouts.kv.offset = offset;
        self.layouts.k_out = Some(Layout::shifted(offset));
        self.layouts.v_out = Some(Layout::shifted(offset));
        self
    }

    /// The plan allocates both outputs.
    pub fn allocated(mut self) -> Self {
        (self.layouts.k_out, self.layouts.v_out) = (None, None);
        self
    }

    fn kv_bytes(&self, rng: &mut Rng) -> Vec<u8> {
        let row = self.heads * self.head_dim;
        let mut bytes = Vec::with_capacity(self.tokens * self.layers * 2 * row * self.kv.size());
        for _ in 0..self.tokens * self.layers {
            for head in 0..2 * self.heads {
                let scale = match rng.u8(0..8) {
                    0 => 0.0,
                    1 => 1e-3,
                    2 => 3e3,
                    _ => 1.0,
                };
                let wild = self.values == Values::Wild || head >= self.heads;
                for _ in 0..self.head_dim {
                    if wild && rng.u8(0..6) == 0 {
                        bytes.extend_from_slice(&rng.u32(..).to_le_bytes()[..self.kv.size()]);
                    } else {
                        bytes.extend(encode_all(self.kv, [scale * normal(rng)]));
                    }
                }
            }
        }
        bytes
    }

    /// The table: cosines, then sines, of base 10000, in f64 and rounded once.
    fn table_bytes(&self) -> Vec<u8> {
        let half = self.rotary_dim / 2;
        encode_all(
            self.table,
            (0..self.table_rows).flat_map(|position| {
                (0..self.rotary_dim).map(move |column| {
                    let exponent = -2.0 * (column % half) as f64 / self.rotary_dim as f64;
                    let angle = position as f64 * 10_000f64.powf(exponent);
                    let value = if column < half {
                        angle.cos()
                    } else {
                        angle.sin()
                    };
                    (value * f64::from(self.attention_factor)) as f32
                })
            }),
        )
    }

    /// Builds the case.
    pub fn build(&self) -> Case {
        let Self {
            tokens,
            layers,
            heads,
            head_dim,
            rotary_dim,
            table_rows,
            ..
        } = *self;
        let at = &self.layouts;
        let mut rng = Rng::with_seed(self.seed);
        let kv = self.kv_bytes(&mut rng);
        let center = match self.norm_weight {
            NormWeight::Plain => 1.0,
            NormWeight::Offset => 0.0,
        };
        let weight = encode_all(
            self.weight,
            (0..layers * head_dim).map(|_| center + 0.25 * normal(&mut rng)),
        );
        let eps: Vec<f32> = (0..layers)
            .map(|layer| [1e-6, 1e-5, 3e-2][layer % 3])
            .collect();
        let positions = self.positions.clone().unwrap_or_else(|| {
            let last = table_rows as i64 - 1;
            (0..tokens)
                .map(|token| match token {
                    0 => last,
                    1 => 0,
                    _ => rng.i64(0..=last),
                })
                .collect()
        });
        let scales: Vec<f32> = (0..layers).map(|_| 0.5 + rng.f32()).collect();
        let out_shape = [layers, tokens, heads, head_dim];
        let output = |layout: &Layout| Tensor::output(self.kv, &out_shape, layout);
        Case {
            name: format!("{self:?}"),
            config: Config {
                num_kv_heads: heads,
                head_dim,
                rotary_dim,
                rope_style: self.style,
                norm_weight: self.norm_weight,
            },
            kv: Tensor::input(
                self.kv,
                &[tokens, layers, 2 * heads * head_dim],
                &at.kv,
                &kv,
            ),
            k_norm_weight: Tensor::input(self.weight, &[layers, head_dim], &at.weight, &weight),
            eps: Tensor::input(DType::F32, &[layers], &at.eps, &encode_all(DType::F32, eps)),
            cos_sin_cache: Tensor::input(
                self.table,
                &[table_rows, rotary_dim],
                &at.table,
                &self.table_bytes(),
            ),
            positions: Tensor::input(
                self.index,
                &[tokens],
                &at.positions,
                &encode_index(self.index, &positions),
            ),
            value_scale: self.value_scale.then(|| {
                let scales = encode_all(DType::F32, scales);
                Tensor::input(DType::F32, &[layers], &at.value_scale, &scales)
            }),
            k_out: at.k_out.as_ref().map(output),
            v_out: at.v_out.as_ref().map(output),
        }
    }
}

/// All 65536 values of a 16-bit type as K and as V, each V once: heads of two elements.
pub fn every_value(dtype: DType, value_scale: bool) -> Case {
    assert_eq!(dtype.size(), 2, "a 16-bit type");
    let mut case = Spec {
        tokens: 1024,
        layers: 1,
        heads: 32,
        head_dim: 2,
        rotary_dim: 2,
        value_scale,
        ..Spec::default().dtype(dtype)
    }
    .build();
    let values: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    // Rows of 64 K elements, then the same as V.
    let rows: Vec<u8> = values
        .chunks(128)
        .flat_map(|row| [row, row].concat())
        .collect();
    case.kv.scatter(&rows);
    case
}
