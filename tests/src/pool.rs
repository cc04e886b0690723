//! Cases whose results go into a KV pool: layouts, what must be in the pool afterwards, and runs on
//! every backend.

use std::collections::HashMap;

use fastrand::Rng;
use fused_kv::{
    DType, Dispatch, Error, Inputs, Path, Plan, PoolLayout, PoolTarget, PoolTensors, TensorView,
    TensorViewMut,
};

use crate::case::{Case, Spec, Values};
use crate::cases::{FLOATS, STYLES};
use crate::element::{decode, encode, encode_index};
use crate::reference;
use crate::runner::{Placed, Runner};
use crate::tensor::{Layout, Tensor};

/// The dtypes that a pool can have.
pub const POOL_TYPES: [DType; 5] = [
    DType::Bf16,
    DType::F16,
    DType::F32,
    DType::F8E4M3Fn,
    DType::F8E5M2,
];

/// The layouts of a layer's tensor.
pub const LAYOUTS: [PoolLayout; 3] = [PoolLayout::Nhd, PoolLayout::PagedNhd, PoolLayout::PagedHnd];

/// How the pool is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// K and V of each layer on their own.
    Layers,
    /// K of all layers, and V of all layers.
    Stacked,
    /// Everything of a token together: `[slots, L, 2, H, D]`. Of layout NHD.
    TokenMajor,
    /// One `[pages, H, page, 2*D]` for each layer, K and V side by side in the rows, seen as pages
    /// of tokens. Of layout paged NHD.
    SideBySide,
}

/// The description that a [`PoolCase`] is built from.
#[derive(Clone, Debug)]
pub struct PoolSpec {
    /// The job; its outputs do not matter.
    pub job: Spec,
    /// Dimensions of the pool tensors.
    pub layout: PoolLayout,
    /// Allocation.
    pub form: Form,
    /// Type of the pool.
    pub dtype: DType,
    /// Pages; with the layout NHD these are the slots.
    pub pages: usize,
    /// Tokens of a page; 1 with the layout NHD.
    pub page_size: usize,
    /// Where K lies: paddings between pages, tokens and heads are canaries.
    pub k: Layout,
    /// Where V lies.
    pub v: Layout,
    /// Elements by which K and V of a layer are shifted on top, with [`Form::Layers`]; none for
    /// layers that are not named.
    pub per_layer: Vec<[usize; 2]>,
    /// Slots in place of random ones.
    pub slots: Option<Vec<i64>>,
    /// Type of the slots.
    pub index: DType,
    /// Where the slots lie.
    pub slots_layout: Layout,
    /// Fewer slots than the pool holds.
    pub num_slots: Option<usize>,
    /// A slot that is skipped.
    pub reserved_slot: Option<usize>,
}

impl Default for PoolSpec {
    fn default() -> Self {
        Self {
            job: Spec::default(),
            layout: PoolLayout::PagedNhd,
            form: Form::Layers,
            dtype: DType::Bf16,
            pages: 4,
            page_size: 4,
            k: Layout::default(),
            v: Layout::default(),
            per_layer: Vec::new(),
            slots: None,
            index: DType::I64,
            slots_layout: Layout::default(),
            num_slots: None,
            reserved_slot: None,
        }
    }
}

/// A tensor of the pool within one of its allocations.
#[derive(Clone, Debug)]
struct Part {
    allocation: usize,
    /// The tensor, without its memory.
    tensor: Tensor,
}

/// A job with the memory of its tensors and of its pool.
#[derive(Clone, Debug)]
pub struct PoolCase {
    /// What failures call it.
    pub name: String,
    /// The job.
    pub case: Case,
    /// Dimensions of the pool tensors.
    pub layout: PoolLayout,
    /// Allocation.
    pub form: Form,
    /// Type of the pool.
    pub dtype: DType,
    /// The memory of the pool, canaries everywhere.
    pub allocations: Vec<Tensor>,
    k: Vec<Part>,
    v: Vec<Part>,
    /// `[T]`.
    pub slots: Tensor,
    /// Slots in use.
    pub num_slots: Option<usize>,
    /// A slot that is skipped.
    pub reserved_slot: Option<usize>,
    /// Descales of K and V.
    pub descales: Option<[Vec<f32>; 2]>,
    page_size: usize,
    capacity: usize,
}

/// What a run left behind.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolOutcome {
    /// The memory of each allocation.
    pub memory: Vec<Vec<u8>>,
    /// What `check` returned.
    pub check: Result<(), Error>,
}

impl PoolSpec {
    fn shape(&self) -> Vec<usize> {
        let (heads, dim) = (self.job.heads, self.job.head_dim);
        match self.layout {
            PoolLayout::Nhd => vec![self.pages, heads, dim],
            PoolLayout::PagedNhd => vec![self.pages, self.page_size, heads, dim],
            PoolLayout::PagedHnd => vec![self.pages, heads, self.page_size, dim],
        }
    }

    /// Distinct slots, with a skipped one now and then.
    fn random_slots(&self, capacity: usize) -> Vec<i64> {
        let mut rng = Rng::with_seed(self.job.seed ^ 0x510f);
        let mut free: Vec<i64> = (0..capacity as i64).collect();
        rng.shuffle(&mut free);
        (0..self.job.tokens)
            .map(|_| match rng.u8(0..6) {
                0 => -1,
                _ => free.pop().unwrap_or(-1),
            })
            .collect()
    }

    /// `kv` and the pool shifted by `offset` elements.
    pub fn shifted(mut self, offset: usize) -> Self {
        self.job.layouts.kv.offset = offset;
        (self.k.offset, self.v.offset) = (offset, offset);
        self
    }

    /// Builds the case.
    pub fn build(&self) -> PoolCase {
        let (layers, heads, dim) = (self.job.layers, self.job.heads, self.job.head_dim);
        let page_size = match self.layout {
            PoolLayout::Nhd => 1,
            _ => self.page_size,
        };
        let capacity = self.pages * page_size;
        let shape = self.shape();
        let whole = |tensor: Tensor| {
            let part = Tensor {
                memory: Vec::new(),
                ..tensor.clone()
            };
            (tensor, part)
        };
        let (mut allocations, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        let mut add = |halves: &mut Vec<Part>, tensor: Tensor| {
            let (tensor, part) = whole(tensor);
            halves.push(Part {
                allocation: allocations.len(),
                tensor: part,
            });
            allocations.push(tensor);
        };
        match self.form {
            Form::Layers => {
                for layer in 0..layers {
                    let shifts = self.per_layer.get(layer).copied().unwrap_or_default();
                    let output = |layout: &Layout, shift: usize| {
                        let mut layout = layout.clone();
                        layout.offset += shift;
                        Tensor::output(self.dtype, &shape, &layout)
                    };
                    add(&mut k, output(&self.k, shifts[0]));
                    add(&mut v, output(&self.v, shifts[1]));
                }
            }
            Form::Stacked => {
                let stacked: Vec<usize> = [layers].into_iter().chain(shape).collect();
                add(&mut k, Tensor::output(self.dtype, &stacked, &self.k));
                add(&mut v, Tensor::output(self.dtype, &stacked, &self.v));
            }
            Form::TokenMajor => {
                let shape = [self.pages, layers, 2, heads, dim];
                let tensor = Tensor::output(self.dtype, &shape, &self.k);
                for (half, parts) in [&mut k, &mut v].into_iter().enumerate() {
                    let s = &tensor.strides;
                    let first =
                        tensor.first as isize + half as isize * s[2] * self.dtype.size() as isize;
                    parts.push(Part {
                        allocation: 0,
                        tensor: Tensor {
                            shape: vec![layers, self.pages, heads, dim],
                            strides: vec![s[1], s[0], s[3], s[4]],
                            first: first as usize,
                            memory: Vec::new(),
                            ..tensor.clone()
                        },
                    });
                }
                allocations.push(tensor);
            }
            Form::SideBySide => {
                for layer in 0..layers {
                    let shape = [self.pages, heads, self.page_size, 2 * dim];
                    let tensor = Tensor::output(self.dtype, &shape, &self.k);
                    for (half, parts) in [&mut k, &mut v].into_iter().enumerate() {
                        let s = &tensor.strides;
                        parts.push(Part {
                            allocation: layer,
                            tensor: Tensor {
                                shape: vec![self.pages, self.page_size, heads, dim],
                                strides: vec![s[0], s[2], s[1], s[3]],
                                first: tensor.first + half * dim * self.dtype.size(),
                                memory: Vec::new(),
                                ..tensor.clone()
                            },
                        });
                    }
                    allocations.push(tensor);
                }
            }
        }
        let slots = self
            .slots
            .clone()
            .unwrap_or_else(|| self.random_slots(capacity));
        let descales = matches!(self.dtype, DType::F8E4M3Fn | DType::F8E5M2).then(|| {
            let mut rng = Rng::with_seed(self.job.seed ^ 0xdc);
            [(); 2].map(|()| (0..layers).map(|_| 0.01 + 2.0 * rng.f32()).collect())
        });
        PoolCase {
            name: format!("{self:?}"),
            case: self.job.clone().allocated().build(),
            layout: self.layout,
            form: self.form,
            dtype: self.dtype,
            allocations,
            k,
            v,
            slots: Tensor::input(
                self.index,
                &[slots.len()],
                &self.slots_layout,
                &encode_index(self.index, &slots),
            ),
            num_slots: self.num_slots,
            reserved_slot: self.reserved_slot,
            descales,
            page_size,
            capacity,
        }
    }
}

impl PoolCase {
    fn num_slots(&self) -> usize {
        self.num_slots.unwrap_or(self.capacity)
    }

    /// Byte offset, in its allocation, of an element of K or V of a layer.
    fn offset(
        &self,
        half: usize,
        layer: usize,
        slot: i64,
        head: usize,
        i: usize,
    ) -> (usize, usize) {
        let parts = [&self.k, &self.v][half];
        let (page, token) = (
            slot as isize / self.page_size as isize,
            slot as isize % self.page_size as isize,
        );
        let (head, i) = (head as isize, i as isize);
        let (part, mut index) = match parts.len() {
            _ if matches!(self.form, Form::Stacked | Form::TokenMajor) => {
                (&parts[0], vec![layer as isize])
            }
            _ => (&parts[layer], Vec::new()),
        };
        index.extend(match self.layout {
            PoolLayout::Nhd => vec![page, head, i],
            PoolLayout::PagedNhd => vec![page, token, head, i],
            PoolLayout::PagedHnd => vec![page, head, token, i],
        });
        let elements: isize = index
            .iter()
            .zip(&part.tensor.strides)
            .map(|(a, b)| a * b)
            .sum();
        let size = self.dtype.size() as isize;
        (
            part.allocation,
            (part.tensor.first as isize + elements * size) as usize,
        )
    }

    /// What the pool must hold afterwards, by the scalar reference. Of several tokens with one slot
    /// the last is there.
    pub fn expected(&self) -> PoolOutcome {
        let case = &self.case;
        let [layers, tokens, heads, dim] = case.out_shape();
        let (slots, positions) = (self.slots.indices(), case.positions.indices());
        let table_rows = case.cos_sin_cache.shape[0];
        let (mut bad_slots, mut bad_positions) = (Vec::new(), Vec::new());
        let mut written = vec![false; tokens];
        for token in 0..tokens {
            let slot = slots[token];
            if slot < 0
                || self
                    .reserved_slot
                    .is_some_and(|reserved| slot as usize == reserved)
            {
            } else if slot as usize >= self.num_slots() {
                bad_slots.push(token);
            } else if !(0..table_rows as i64).contains(&positions[token]) {
                bad_positions.push(token);
            } else {
                written[token] = true;
            }
        }
        let check = match (bad_positions.first(), bad_slots.first()) {
            (None, None) => Ok(()),
            (Some(&token), slot) if slot.is_none_or(|&slot| token < slot) => {
                Err(Error::PositionOutOfRange {
                    token: token as u64,
                    position: positions[token],
                    table_rows: table_rows as u64,
                    count: bad_positions.len() as u64,
                })
            }
            (_, slot) => {
                let token = *slot.expect("one of the two");
                Err(Error::SlotOutOfRange {
                    token: token as u64,
                    slot: slots[token],
                    num_slots: self.num_slots() as u64,
                    count: bad_slots.len() as u64,
                })
            }
        };

        let results = reference::unrounded(case, &written);
        let copied = self.dtype == case.kv.dtype && case.value_scale.is_none();
        let mut memory: Vec<Vec<u8>> = self.allocations.iter().map(|t| t.memory.clone()).collect();
        let size = self.dtype.size();
        for token in (0..tokens).filter(|&token| written[token]) {
            for layer in 0..layers {
                for head in 0..heads {
                    for i in 0..dim {
                        let from = ((layer * tokens + token) * heads + head) * dim + i;
                        for half in 0..2 {
                            let value = [&results.k, &results.v][half][from];
                            let descaled = match &self.descales {
                                None => value,
                                Some(descales) => value / descales[half][layer],
                            };
                            let bits = if half == 1 && copied {
                                results.v_bits[from]
                            } else {
                                encode(self.dtype, descaled)
                            };
                            let (allocation, at) = self.offset(half, layer, slots[token], head, i);
                            memory[allocation][at..at + size]
                                .copy_from_slice(&bits.to_le_bytes()[..size]);
                        }
                    }
                }
            }
        }
        PoolOutcome { memory, check }
    }

    /// Elements of K (half 0) or V (1) of a token in the pool as a run left it, `[L, H, D]`.
    pub fn row(&self, outcome: &PoolOutcome, half: usize, slot: i64) -> Vec<f32> {
        let [layers, _, heads, dim] = self.case.out_shape();
        let mut row = Vec::new();
        for (layer, head) in (0..layers).flat_map(|l| (0..heads).map(move |h| (l, h))) {
            for i in 0..dim {
                let (allocation, at) = self.offset(half, layer, slot, head, i);
                let mut bits = [0; 4];
                bits[..self.dtype.size()]
                    .copy_from_slice(&outcome.memory[allocation][at..at + self.dtype.size()]);
                row.push(decode(self.dtype, u32::from_le_bytes(bits)));
            }
        }
        row
    }

    /// The target over placed memory.
    fn target<'a>(
        &self,
        runner: &Runner,
        placed: &'a mut [Placed],
        slots: TensorView<'a>,
    ) -> Result<PoolTarget<'a>, Error> {
        let addresses: Vec<u64> = placed
            .iter()
            .zip(&self.allocations)
            .map(|(placed, tensor)| placed.address - tensor.first as u64)
            .collect();
        let view = |part: &Part| -> TensorViewMut<'a> {
            let Tensor {
                dtype,
                shape,
                strides,
                first,
                ..
            } = &part.tensor;
            let address = addresses[part.allocation] + *first as u64;
            // SAFETY: the part lies within its allocation, which is borrowed mutably for `'a`, and
            // no two parts share an element.
            unsafe {
                TensorViewMut::from_raw_parts(address, runner.device(), *dtype, shape, strides)
            }
            .expect("a view of a built tensor")
        };
        let half = |parts: &[Part]| match self.form {
            Form::Stacked | Form::TokenMajor => PoolTensors::Stacked(view(&parts[0])),
            _ => PoolTensors::Layers(parts.iter().map(view).collect()),
        };
        let mut target = if self.form == Form::TokenMajor {
            let tensor = Tensor {
                memory: Vec::new(),
                ..self.allocations[0].clone()
            };
            let allocation = Part {
                allocation: 0,
                tensor,
            };
            PoolTarget::token_major(view(&allocation), slots)?
        } else {
            PoolTarget::new(self.layout, half(&self.k), half(&self.v), slots)
        };
        target.num_slots = self.num_slots;
        target.reserved_slot = self.reserved_slot;
        if let Some([k, v]) = &self.descales {
            target = target.with_descales(k, v);
        }
        Ok(target)
    }

    /// Runs the case.
    ///
    /// # Errors
    ///
    /// What validation or the launch returned.
    ///
    /// # Panics
    ///
    /// When the memory of an input changed, or, where the job was refused, that of the pool.
    pub fn run(&self, runner: &Runner) -> Result<PoolOutcome, Error> {
        self.run_with(runner, |_| ())
    }

    /// Runs the case after a change of its target.
    ///
    /// # Errors
    ///
    /// As [`PoolCase::run`].
    ///
    /// # Panics
    ///
    /// As [`PoolCase::run`].
    pub fn run_with(
        &self,
        runner: &Runner,
        change: impl FnOnce(&mut PoolTarget<'_>),
    ) -> Result<PoolOutcome, Error> {
        let case = &self.case;
        let sources: Vec<&Tensor> = [
            Some(&case.kv),
            Some(&case.k_norm_weight),
            Some(&case.eps),
            Some(&case.cos_sin_cache),
            Some(&case.positions),
            Some(&self.slots),
            case.value_scale.as_ref(),
        ]
        .into_iter()
        .flatten()
        .collect();
        let placed: Vec<Placed> = sources.iter().map(|tensor| runner.place(tensor)).collect();
        let mut pool: Vec<Placed> = self.allocations.iter().map(|t| runner.place(t)).collect();
        let written = self.k.iter().chain(&self.v).map(|part| {
            let allocation = part.allocation;
            let base = pool[allocation].address - self.allocations[allocation].first as u64;
            (&part.tensor, base + part.tensor.first as u64)
        });
        let permissions = runner.permissions(sources.iter().copied().zip(&placed), written);
        let view = |index: usize| runner.view(sources[index], &placed[index]);
        let inputs = Inputs {
            kv: view(0),
            k_norm_weight: view(1),
            eps: view(2),
            cos_sin_cache: view(3),
            positions: view(4),
            value_scale: (sources.len() > 6).then(|| view(6)),
        };
        let result = self
            .target(runner, &mut pool, view(5))
            .and_then(|mut target| {
                change(&mut target);
                let mut plan = Plan::paged(case.config, inputs, target)?;
                runner.launch(&mut plan, &permissions)?;
                let check = plan.check();
                assert_eq!(plan.check(), Ok(()), "check() clears the record");
                assert_eq!(plan.k().shape()[1], 0, "a pool plan has no workspace");
                Ok(check)
            });
        for (tensor, placed) in sources.iter().zip(&placed) {
            assert!(
                tensor.memory == placed.to_bytes(),
                "an input of shape {:?} changed in {}",
                tensor.shape,
                self.name
            );
        }
        let memory: Vec<Vec<u8>> = pool.iter().map(Placed::to_bytes).collect();
        match result {
            Ok(check) => Ok(PoolOutcome { memory, check }),
            Err(error) => {
                let before = self.allocations.iter().map(|tensor| &tensor.memory);
                assert!(
                    matches!(error, Error::EmulatedFault { .. }) || memory.iter().eq(before),
                    "refused with {error:?}, yet the pool was written in {}",
                    self.name
                );
                Err(error)
            }
        }
    }

    /// The outcome is the expected one, whole memories with all canaries.
    ///
    /// # Panics
    ///
    /// Where it is not, with the first differing byte.
    pub fn assert(&self, by: &str, outcome: &PoolOutcome, expected: &PoolOutcome) {
        for (allocation, (found, expected)) in
            outcome.memory.iter().zip(&expected.memory).enumerate()
        {
            if found == expected {
                continue;
            }
            let differing: Vec<usize> = (0..found.len())
                .filter(|&at| found[at] != expected[at])
                .collect();
            panic!(
                "{by}: {} bytes of allocation {allocation} differ, the first, {}, is {:#04x}, \
                 expected {:#04x}, before {:#04x}; it belongs to {} in {}",
                differing.len(),
                differing[0],
                found[differing[0]],
                expected[differing[0]],
                self.allocations[allocation].memory[differing[0]],
                self.place_of(allocation, differing[0]),
                self.name
            );
        }
        assert_eq!(
            outcome.check, expected.check,
            "check() of {by} in {}",
            self.name
        );
    }

    /// For messages: which element a byte belongs to.
    fn place_of(&self, allocation: usize, byte: usize) -> String {
        let [layers, _, heads, dim] = self.case.out_shape();
        let mut places = HashMap::new();
        for slot in 0..self.capacity as i64 {
            for (layer, head) in (0..layers).flat_map(|l| (0..heads).map(move |h| (l, h))) {
                for (half, i) in (0..2).flat_map(|half| (0..dim).map(move |i| (half, i))) {
                    let place = self.offset(half, layer, slot, head, i);
                    places.insert(place, (half, layer, slot, head, i));
                }
            }
        }
        (0..self.dtype.size())
            .filter_map(|back| places.get(&(allocation, byte.checked_sub(back)?)))
            .map(|(half, layer, slot, head, i)| {
                let name = ["K", "V"][*half];
                format!("{name} of layer {layer}, slot {slot}, head {head}, element {i}")
            })
            .next()
            .unwrap_or_else(|| "a canary".into())
    }
}

/// Runs a case on every one of `dispatches` that can serve it and compares each with the reference
/// bit for bit. Returns the paths that were forced.
///
/// # Panics
///
/// On any difference; when a dispatch is refused for another reason than its path.
pub fn check_dispatches(
    case: &PoolCase,
    dispatches: &[Dispatch],
    runner: impl Fn(Dispatch) -> Runner,
) -> Vec<Path> {
    let expected = case.expected();
    let mut served = Vec::new();
    for &dispatch in dispatches {
        match case.run(&runner(dispatch)) {
            Ok(outcome) => {
                case.assert(&format!("{dispatch:?}"), &outcome, &expected);
                served.extend(dispatch.path);
            }
            Err(Error::Path { .. }) if dispatch.path.is_some_and(|path| path != Path::Elements) => {
            }
            Err(error) => panic!("{error} by {dispatch:?} in {}", case.name),
        }
    }
    served.dedup();
    served
}

/// The specs of this file's kind that every backend runs: every layout and form, with pages that
/// are and are not powers of two; every pair of types; canaries between pages, tokens and heads;
/// unaligned pools; slots and positions out of range.
pub fn specs() -> Vec<PoolSpec> {
    let mut specs = Vec::new();
    let small = Spec {
        tokens: 4,
        layers: 2,
        heads: 2,
        head_dim: 16,
        rotary_dim: 16,
        ..Spec::default()
    };
    let forms = [
        Form::Layers,
        Form::Stacked,
        Form::TokenMajor,
        Form::SideBySide,
    ];
    for (index, form) in forms.into_iter().enumerate() {
        for layout in LAYOUTS {
            let fits = match form {
                Form::TokenMajor => layout == PoolLayout::Nhd,
                Form::SideBySide => layout == PoolLayout::PagedNhd,
                _ => true,
            };
            for page_size in [1, 3, 4] {
                if fits && (layout != PoolLayout::Nhd || page_size == 1) {
                    specs.push(PoolSpec {
                        job: Spec {
                            seed: (index * 10 + page_size) as u64,
                            value_scale: page_size == 3,
                            ..small.clone()
                        },
                        layout,
                        form,
                        pages: 6,
                        page_size,
                        index: [DType::I64, DType::I32][page_size % 2],
                        ..PoolSpec::default()
                    });
                }
            }
        }
    }
    for kv in FLOATS {
        for dtype in POOL_TYPES {
            for value_scale in [false, true] {
                specs.push(PoolSpec {
                    job: Spec {
                        tokens: 2,
                        layers: 1,
                        value_scale,
                        values: Values::Wild,
                        ..small.clone().dtype(kv)
                    },
                    dtype,
                    ..PoolSpec::default()
                });
            }
        }
    }
    // The common geometry, aligned, and a table and weights of other types.
    for dtype in POOL_TYPES {
        for table in [DType::Bf16, DType::F32] {
            specs.push(PoolSpec {
                job: Spec {
                    tokens: 2,
                    layers: 1,
                    table,
                    ..Spec::default()
                },
                dtype,
                ..PoolSpec::default()
            });
        }
    }
    // Room between pages, tokens and heads, apart for K and V; shifted from alignment.
    for (layout, dtype) in LAYOUTS
        .into_iter()
        .zip([DType::Bf16, DType::F8E4M3Fn, DType::F16])
    {
        for offset in [0, 1, 2, 4] {
            let pads = |pads: [usize; 3]| Layout {
                offset,
                pads: match layout {
                    PoolLayout::Nhd => pads[1..].to_vec(),
                    _ => pads.to_vec(),
                },
                ..Layout::default()
            };
            specs.push(PoolSpec {
                job: Spec {
                    layers: 1,
                    ..small.clone()
                },
                layout,
                dtype,
                page_size: if layout == PoolLayout::Nhd { 1 } else { 4 },
                k: pads([24, 16, 8]),
                v: pads([7, 2, 6]),
                ..PoolSpec::default()
            });
        }
    }
    // Odd heads, and rows that start one element behind a pair.
    for (head_dim, rotary_dim) in [(2, 2), (46, 22), (72, 48), (80, 32), (576, 64)] {
        for dtype in [DType::Bf16, DType::F8E5M2] {
            let spec = PoolSpec {
                job: Spec {
                    tokens: 2,
                    layers: 1,
                    head_dim,
                    rotary_dim,
                    ..small.clone()
                },
                dtype,
                ..PoolSpec::default()
            };
            specs.extend([spec.clone(), spec.shifted(1)]);
        }
    }
    for (index, dtype) in POOL_TYPES.into_iter().enumerate() {
        for (form, layout) in [
            (Form::Stacked, PoolLayout::PagedHnd),
            (Form::TokenMajor, PoolLayout::Nhd),
            (Form::SideBySide, PoolLayout::PagedNhd),
        ] {
            let spec = PoolSpec {
                job: Spec {
                    style: STYLES[index % 2],
                    ..small.clone().dtype(FLOATS[index % 3])
                },
                layout,
                form,
                dtype,
                page_size: if layout == PoolLayout::Nhd { 1 } else { 3 },
                ..PoolSpec::default()
            };
            specs.push(spec.shifted(1));
        }
    }
    specs.extend(skipped_and_reported());
    specs
}

/// Slots that are skipped or past the end, positions outside the table, in all orders.
pub fn skipped_and_reported() -> Vec<PoolSpec> {
    let mut specs = Vec::new();
    let lists: [(&[i64], &[i64]); 6] = [
        (&[0, 5, -1, 3], &[0, 1, 2, 3]),
        (&[16, 5, i64::MAX, 3], &[0, 1, 2, 3]),
        (&[16, 5, -7, 3], &[64, 64, 64, 3]),
        (&[2, 16, 17, i64::MIN], &[-1, 64, 0, -5]),
        (&[15, 1 << 32, (1 << 32) + 3, -(1 << 32)], &[0; 4]),
        (&[-1; 4], &[64; 4]),
    ];
    for (slots, positions) in lists {
        for reserved_slot in [None, Some(0), Some(16)] {
            for layout in LAYOUTS {
                specs.push(PoolSpec {
                    job: Spec {
                        tokens: 4,
                        layers: 1,
                        heads: 1,
                        head_dim: 16,
                        rotary_dim: 16,
                        positions: Some(positions.to_vec()),
                        ..Spec::default()
                    },
                    layout,
                    pages: if layout == PoolLayout::Nhd { 16 } else { 4 },
                    slots: Some(slots.to_vec()),
                    reserved_slot,
                    ..PoolSpec::default()
                });
            }
        }
    }
    specs
}

/// A pool around a job: any layout, form, type, paddings, slots of every kind. With `repeated`,
/// tokens may share slots.
pub fn random_pool(job: Spec, seed: u64, repeated: bool) -> PoolSpec {
    let mut rng = Rng::with_seed(seed);
    let layout = LAYOUTS[rng.usize(..3)];
    let form = match (rng.u8(..4), layout) {
        (0, PoolLayout::Nhd) => Form::TokenMajor,
        (0, PoolLayout::PagedNhd) => Form::SideBySide,
        (1, _) => Form::Stacked,
        _ => Form::Layers,
    };
    let page_size = match layout {
        PoolLayout::Nhd => 1,
        _ => rng.usize(1..6),
    };
    let pages = rng.usize(1..9);
    let capacity = (pages * page_size) as i64;
    let rank = match (form, layout) {
        (Form::TokenMajor, _) => 5,
        (Form::SideBySide, _) => 4,
        (Form::Stacked, PoolLayout::Nhd) | (Form::Layers, PoolLayout::PagedNhd) => 4,
        (Form::Layers, PoolLayout::PagedHnd) => 4,
        (Form::Stacked, _) => 5,
        (Form::Layers, PoolLayout::Nhd) => 3,
    };
    let mut lie = || {
        let mut order: Vec<usize> = (0..rank - 1).collect();
        if rng.bool() {
            rng.shuffle(&mut order);
        }
        order.push(rank - 1);
        Layout {
            offset: rng.usize(..9),
            pads: (0..rank - 1)
                .map(|_| rng.usize(..2) * rng.usize(..17))
                .collect(),
            order,
            reversed: (0..rank - 1).filter(|_| rng.u8(..6) == 0).collect(),
            ..Layout::default()
        }
    };
    let (mut k, mut v) = (lie(), lie());
    // Where the rows of kv start as one of the paths needs it, those of the pool often do too; so do
    // they where each layer has an offset of its own.
    let mut unit = 1;
    if rng.bool() {
        let rows = job.layouts.kv.rows();
        (k, v) = (k.aligned(rows), v.aligned(rows));
        unit = 8;
    }
    let per_layer = match rng.u8(..3) {
        0 => (0..job.layers)
            .map(|_| [(); 2].map(|()| unit * rng.usize(..9)))
            .collect(),
        _ => Vec::new(),
    };
    let index = [DType::I64, DType::I32][rng.usize(..2)];
    let mut free: Vec<i64> = (0..capacity).collect();
    rng.shuffle(&mut free);
    let slots = (0..job.tokens)
        .map(|_| match rng.u8(..8) {
            0 => -1,
            1 => -rng.i64(1..1 << 31),
            2 => capacity + rng.i64(0..3),
            3 if index == DType::I64 => rng.i64(capacity..=i64::MAX),
            _ if repeated && rng.bool() => rng.i64(0..capacity),
            _ => free.pop().unwrap_or(-1),
        })
        .collect();
    PoolSpec {
        layout,
        form,
        dtype: POOL_TYPES[rng.usize(..5)],
        pages,
        page_size,
        k,
        v,
        per_layer,
        slots: Some(slots),
        index,
        slots_layout: Layout::padded(&[rng.usize(..3)]),
        num_slots: (rng.u8(..4) == 0).then(|| rng.usize(..=capacity as usize)),
        reserved_slot: (rng.u8(..3) == 0).then(|| rng.usize(..capacity as usize + 2)),
        job,
    }
}

/// Every 16-bit value in V; the first layer's descale is 1, the second's 0.3.
pub fn every_value(kv: DType, dtype: DType) -> PoolCase {
    let spec = PoolSpec {
        job: Spec {
            tokens: 16,
            layers: 2,
            heads: 32,
            head_dim: 128,
            rotary_dim: 64,
            ..Spec::default().dtype(kv)
        },
        dtype,
        layout: PoolLayout::Nhd,
        pages: 16,
        slots: Some((0..16).rev().collect()),
        ..PoolSpec::default()
    };
    let mut case = spec.build();
    case.descales = Some([vec![1.0, 0.3], vec![1.0, 0.3]]);
    let mut bytes = case.case.kv.gather();
    let row = 32 * 128;
    for (index, element) in bytes.chunks_exact_mut(2).enumerate() {
        let (layer_row, column) = (index / (2 * row), index % (2 * row));
        if column >= row {
            let value = (layer_row / 2 * row + column - row) as u16;
            element.copy_from_slice(&value.to_le_bytes());
        }
    }
    case.case.kv.scatter(&bytes);
    case
}
