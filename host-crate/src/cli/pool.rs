//! KV pools of the program: from a file, or made by flags.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use clap::{Args, ValueEnum};
use fused_kv::{Argument, DType, Error, PoolLayout, PoolTarget, TensorView, TensorViewMut};

use super::geometry::{parse_number, resolve, unknown};
use super::run::Job;
use super::{CliError, geometry};
use crate::io::{HostTensor, InputFile, Watch};

/// `--pool-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PoolType {
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "float16")]
    F16,
    #[value(alias = "float32")]
    F32,
    /// float8_e4m3fn; needs --k-descale and --v-descale
    #[value(name = "e4m3fn", alias = "float8_e4m3fn")]
    E4M3,
    /// float8_e5m2; needs --k-descale and --v-descale
    #[value(name = "e5m2", alias = "float8_e5m2")]
    E5M2,
}

impl From<PoolType> for DType {
    fn from(dtype: PoolType) -> Self {
        match dtype {
            PoolType::Bf16 => Self::Bf16,
            PoolType::F16 => Self::F16,
            PoolType::F32 => Self::F32,
            PoolType::E4M3 => Self::F8E4M3Fn,
            PoolType::E5M2 => Self::F8E5M2,
        }
    }
}

/// `--pool-layout` and the metadata key `layout`; the layer is the leading dimension of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Layout {
    /// [layers, slots, heads, head_dim]
    Nhd,
    /// [layers, pages, page_size, heads, head_dim]
    PagedNhd,
    /// [layers, pages, heads, page_size, head_dim]
    Hnd,
}

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Self::Nhd => "nhd",
            Self::PagedNhd => "paged-nhd",
            Self::Hnd => "hnd",
        }
    }

    fn find(name: &str) -> Option<Self> {
        Self::value_variants()
            .iter()
            .copied()
            .find(|layout| layout.name() == name)
    }

    /// The shape of a pool.
    fn shape(
        self,
        layers: usize,
        pages: usize,
        page: usize,
        heads: usize,
        dim: usize,
    ) -> Vec<usize> {
        match self {
            Self::Nhd => vec![layers, pages * page, heads, dim],
            Self::PagedNhd => vec![layers, pages, page, heads, dim],
            Self::Hnd => vec![layers, pages, heads, page, dim],
        }
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl From<Layout> for PoolLayout {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Nhd => Self::Nhd,
            Layout::PagedNhd => Self::PagedNhd,
            Layout::Hnd => Self::PagedHnd,
        }
    }
}

/// What describes a pool.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "KV pool")]
pub(crate) struct PoolFlags {
    /// Slots of a pool that is made, rounded up to whole pages; slots in use of a pool in the file
    #[arg(long, value_name = "N")]
    pub(crate) num_slots: Option<usize>,
    /// Element type of the pool [default: that of kv]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(crate) pool_dtype: Option<PoolType>,
    /// Dimensions of the pool [metadata: layout; default: nhd]
    #[arg(long, value_enum, value_name = "LAYOUT")]
    pub(crate) pool_layout: Option<Layout>,
    /// Tokens of a page [metadata: page_size; default: 16, nhd 1]
    #[arg(long, value_name = "N")]
    pub(crate) page_size: Option<usize>,
    /// A slot that is skipped [metadata: reserved_slot]
    #[arg(long, value_name = "SLOT")]
    pub(crate) reserved_slot: Option<usize>,
    /// Descale of K in an FP8 pool, one for all layers or one for each
    #[arg(long, value_name = "X,...", value_delimiter = ',')]
    pub(crate) k_descale: Option<Vec<f32>>,
    /// Descale of V, likewise
    #[arg(long, value_name = "X,...", value_delimiter = ',')]
    pub(crate) v_descale: Option<Vec<f32>>,
}

impl PoolFlags {
    /// The first flag that was given, if one was.
    fn given(&self) -> Option<&'static str> {
        [
            ("--num-slots", self.num_slots.is_some()),
            ("--pool-dtype", self.pool_dtype.is_some()),
            ("--pool-layout", self.pool_layout.is_some()),
            ("--page-size", self.page_size.is_some()),
            ("--reserved-slot", self.reserved_slot.is_some()),
            ("--k-descale", self.k_descale.is_some()),
            ("--v-descale", self.v_descale.is_some()),
        ]
        .into_iter()
        .find_map(|(flag, given)| given.then_some(flag))
    }

    /// Zeros for a pool that holds at least `slots` slots.
    fn zeros(&self, layout: Layout, slots: usize, job: &Job) -> Result<HostTensor, CliError> {
        let page = match (layout, self.page_size) {
            (Layout::Nhd, None | Some(1)) => 1,
            (Layout::Nhd, Some(size)) => {
                return Err(CliError::Usage(format!(
                    "--page-size {size} needs --pool-layout paged-nhd or hnd"
                )));
            }
            (_, Some(0)) => {
                let text = "the page size is 0, expected at least 1".to_owned();
                return Err(CliError::Usage(text));
            }
            (_, size) => size.unwrap_or(16),
        };
        let dtype = self.pool_dtype.map_or(job.kv.dtype, DType::from);
        let layers = job.kv.shape.get(1).copied().unwrap_or(0);
        let pages = slots.div_ceil(page);
        if pages.checked_mul(page).is_none() {
            return Err(CliError::Usage(format!(
                "{slots} slots in pages of {page} are more than 64 bits can count"
            )));
        }
        let (heads, dim) = (job.config.num_kv_heads, job.config.head_dim);
        Ok(HostTensor::zeros(
            dtype,
            &layout.shape(layers, pages, page, heads, dim),
        )?)
    }

    /// The pool of a new file: random distinct slots, memory in which untouched bytes show.
    pub(crate) fn generate(
        &self,
        job: &Job,
        mut random: impl FnMut() -> u64,
    ) -> Result<Option<PoolJob>, CliError> {
        let Some(num_slots) = self.num_slots else {
            return match self.given() {
                None => Ok(None),
                Some(flag) => Err(CliError::Usage(format!("{flag} needs --num-slots"))),
            };
        };
        let tokens = job.kv.shape.first().copied().unwrap_or(0);
        if num_slots < tokens {
            return Err(CliError::Usage(format!(
                "--num-slots {num_slots} has no slot for each of {tokens} tokens"
            )));
        }
        let layout = self.pool_layout.unwrap_or(Layout::Nhd);
        let mut k = self.zeros(layout, num_slots, job)?;
        k.bytes.fill(0x2a);
        let v = k.try_clone()?;
        // The first `tokens` places of a shuffle, of which only those that are not where they were
        // are kept; the reserved slot may be among them.
        let mut moved = HashMap::new();
        let mut order = Vec::with_capacity(tokens);
        for place in 0..tokens {
            let other = place + (random() % (num_slots - place) as u64) as usize;
            let here = moved.get(&place).copied().unwrap_or(place);
            order.push(moved.insert(other, here).unwrap_or(other));
        }
        let slots = HostTensor {
            dtype: DType::I64,
            shape: vec![tokens],
            bytes: order
                .iter()
                .flat_map(|&slot| (slot as i64).to_le_bytes())
                .collect(),
        };
        let layers = job.kv.shape.get(1).copied().unwrap_or(0);
        let descale = |flag, given: &Option<Vec<f32>>| {
            given
                .as_deref()
                .map(|given| super::synth::per_layer(flag, given, layers))
                .transpose()
        };
        Ok(Some(PoolJob {
            layout,
            num_slots: None,
            reserved_slot: self.reserved_slot,
            k: Some(k),
            v: Some(v),
            slots,
            k_descale: descale("--k-descale", &self.k_descale)?,
            v_descale: descale("--v-descale", &self.v_descale)?,
        }))
    }
}

/// A pool with the slots of a job.
#[derive(Debug)]
pub(crate) struct PoolJob {
    pub(crate) layout: Layout,
    /// Slots in use, where those are not all.
    pub(crate) num_slots: Option<usize>,
    pub(crate) reserved_slot: Option<usize>,
    pub(crate) k: Option<HostTensor>,
    pub(crate) v: Option<HostTensor>,
    pub(crate) slots: HostTensor,
    pub(crate) k_descale: Option<Vec<f32>>,
    pub(crate) v_descale: Option<Vec<f32>>,
}

/// Tensors of a file that a pool comes from.
pub(crate) const NAMES: [&str; 5] = ["slots", "k_pool", "v_pool", "k_descale", "v_descale"];

impl PoolJob {
    /// The pool of a file; `None` when it has neither slots nor a pool.
    pub(crate) fn read(
        flags: &PoolFlags,
        path: &Path,
        file: &mut InputFile,
        job: &Job,
        watch: &impl Watch,
    ) -> Result<Option<Self>, CliError> {
        let mut k = file.optional("k_pool", watch)?;
        let mut v = file.optional("v_pool", watch)?;
        let slots = match (file.optional("slots", watch)?, k.is_some() || v.is_some()) {
            (Some(slots), _) => slots,
            (None, true) => file.required("slots", watch)?,
            (None, false) => {
                return match flags.given() {
                    None => Ok(None),
                    Some(flag) => Err(CliError::Usage(format!(
                        "{flag} is of a pool, and {} has no slots",
                        path.display()
                    ))),
                };
            }
        };
        let layout = match file.metadata("layout") {
            None => None,
            Some(name) => Some(
                Layout::find(name)
                    .ok_or_else(|| unknown(file, "layout", name, "nhd, paged-nhd or hnd"))?,
            ),
        };
        // A pool of five dimensions may be of either order.
        let ambiguous = [&k, &v]
            .iter()
            .copied()
            .flatten()
            .any(|pool| pool.shape.len() == 5);
        let default = (!ambiguous && flags.pool_layout.is_none()).then_some(Layout::Nhd);
        let layout = resolve(
            path,
            "layout",
            "--pool-layout",
            layout.or(default),
            flags.pool_layout,
        )?;
        let page_size = parse_number(file, "page_size")?;
        let reserved_slot = match (parse_number(file, "reserved_slot")?, flags.reserved_slot) {
            (None, None) => None,
            (found, given) => Some(resolve(
                path,
                "reserved_slot",
                "--reserved-slot",
                found,
                given,
            )?),
        };
        let mut descale = |name: &'static str, argument, flag, given: &Option<Vec<f32>>| {
            let layers = job.kv.shape.get(1).copied().unwrap_or(0);
            match (file.optional(name, watch)?, given) {
                (None, None) => Ok(None),
                (None, Some(given)) => super::synth::per_layer(flag, given, layers).map(Some),
                (Some(_), Some(_)) => Err(CliError::Usage(format!(
                    "{flag} is given, and {} has {name}",
                    path.display()
                ))),
                (Some(tensor), None) => {
                    let view = tensor.view().ok();
                    let fail = |source| CliError::Job {
                        path: path.to_owned(),
                        source,
                    };
                    if tensor.dtype != DType::F32 {
                        return Err(fail(Error::Dtype {
                            argument,
                            found: tensor.dtype,
                            expected: "float32",
                        }));
                    }
                    if tensor.shape != [layers] {
                        return Err(fail(Error::Shape {
                            argument,
                            found: tensor.shape.as_slice().into(),
                            expected: [layers].into(),
                        }));
                    }
                    let values = view.map(|view| fused_kv::dequantize(view, 1.0));
                    values.transpose().map_err(fail)
                }
            }
        };
        let k_descale = descale(
            "k_descale",
            Argument::KDescale,
            "--k-descale",
            &flags.k_descale,
        )?;
        let v_descale = descale(
            "v_descale",
            Argument::VDescale,
            "--v-descale",
            &flags.v_descale,
        )?;

        let made = k.is_none() && v.is_none();
        if made {
            let flags = &PoolFlags {
                page_size: match (page_size, flags.page_size) {
                    (None, None) => None,
                    (found, given) => {
                        Some(resolve(path, "page_size", "--page-size", found, given)?)
                    }
                },
                pool_dtype: flags.pool_dtype,
                num_slots: flags.num_slots,
                ..PoolFlags::default()
            };
            let needed = highest(&slots).map_or(1, |slot| slot as u64 + 1);
            // Beyond the limit a slot is more likely a mistake than a pool.
            let num_slots = match flags.num_slots {
                Some(slots) => slots,
                None if needed <= 1 << 31 => needed as usize,
                None => {
                    return Err(CliError::Usage(format!(
                        "slots of {} reach {}: give --num-slots",
                        path.display(),
                        needed - 1
                    )));
                }
            };
            k = Some(flags.zeros(layout, num_slots, job)?);
            v = Some(flags.zeros(layout, num_slots, job)?);
        }
        let pool = Self {
            layout,
            num_slots: flags.num_slots.filter(|_| !made),
            reserved_slot,
            k,
            v,
            slots,
            k_descale,
            v_descale,
        };
        pool.check_against(path, flags, page_size)?;
        Ok(Some(pool))
    }

    /// The flags and the metadata say nothing else than the tensors do.
    fn check_against(
        &self,
        path: &Path,
        flags: &PoolFlags,
        page_size: Option<usize>,
    ) -> Result<(), CliError> {
        let Some(pool) = self.k.as_ref().or(self.v.as_ref()) else {
            return Ok(());
        };
        let contradiction = |key, found: String, flag, given: String| CliError::Contradiction {
            path: path.to_owned(),
            key,
            found,
            place: "pool",
            flag,
            given,
        };
        if let Some(given) = flags.pool_dtype.map(DType::from)
            && given != pool.dtype
        {
            let (found, given) = (pool.dtype.to_string(), given.to_string());
            return Err(contradiction("dtype", found, "--pool-dtype", given));
        }
        // Tensors of another rank are refused when the plan is made.
        let Some((page, slots)) = self.pages(pool) else {
            return Ok(());
        };
        for (given, flag) in [
            (flags.page_size, "--page-size"),
            (page_size, "metadata page_size"),
        ] {
            if let Some(given) = given
                && given != page
            {
                let (found, given) = (page.to_string(), given.to_string());
                return Err(contradiction("page_size", found, flag, given));
            }
        }
        if let Some(given) = flags.num_slots
            && given > slots
        {
            let (found, given) = (slots.to_string(), given.to_string());
            return Err(contradiction("slots", found, "--num-slots", given));
        }
        Ok(())
    }

    /// Page size and number of slots of a pool tensor of the right rank.
    fn pages(&self, pool: &HostTensor) -> Option<(usize, usize)> {
        let &[_, pages, a, b, ..] = pool.shape.as_slice() else {
            return None;
        };
        let page = match (self.layout, pool.shape.len()) {
            (Layout::Nhd, 4) => 1,
            (Layout::PagedNhd, 5) => a,
            (Layout::Hnd, 5) => b,
            _ => return None,
        };
        Some((page, pages.saturating_mul(page)))
    }

    /// The descales as tensors of a file.
    pub(crate) fn descales(&self) -> Vec<(&'static str, HostTensor)> {
        [
            ("k_descale", &self.k_descale),
            ("v_descale", &self.v_descale),
        ]
        .into_iter()
        .filter_map(|(name, values)| Some((name, super::synth::floats(values.as_deref()?))))
        .collect()
    }

    /// The metadata that describes this pool.
    pub(crate) fn metadata(&self, job: &Job) -> BTreeMap<String, String> {
        let mut metadata = geometry::metadata(&job.config);
        metadata.insert("layout".to_owned(), self.layout.name().to_owned());
        if let Some((page, _)) = self.k.as_ref().and_then(|pool| self.pages(pool)) {
            metadata.insert("page_size".to_owned(), page.to_string());
        }
        if let Some(slot) = self.reserved_slot {
            metadata.insert("reserved_slot".to_owned(), slot.to_string());
        }
        metadata
    }

    /// The target, over views of the pool and the slots.
    pub(crate) fn target<'a>(
        &self,
        k: Option<TensorViewMut<'a>>,
        v: Option<TensorViewMut<'a>>,
        slots: TensorView<'a>,
    ) -> PoolTarget<'a> {
        let none = || Vec::<TensorViewMut<'a>>::new();
        PoolTarget {
            k: k.map(Into::into),
            v: v.map(Into::into),
            num_slots: self.num_slots,
            reserved_slot: self.reserved_slot,
            k_descale: self.k_descale.clone(),
            v_descale: self.v_descale.clone(),
            ..PoolTarget::new(self.layout.into(), none(), none(), slots)
        }
    }

    /// Number of slots, and for each the token whose rows it gets: the last of those that have it,
    /// a position of the table, and no reason to be skipped.
    pub(crate) fn writers(&self, job: &Job) -> BTreeMap<usize, usize> {
        let capacity = self
            .k
            .as_ref()
            .and_then(|pool| self.pages(pool))
            .map_or(0, |(_, n)| self.num_slots.unwrap_or(n).min(n));
        let table_rows = job.cos_sin_cache.shape.first().copied().unwrap_or(0);
        let mut writers = BTreeMap::new();
        for token in 0..job.kv.shape.first().copied().unwrap_or(0) {
            let slot = index(&self.slots, token).and_then(|slot| usize::try_from(slot).ok());
            let position = index(&job.positions, token);
            if let Some(slot) = slot
                && slot < capacity
                && Some(slot) != self.reserved_slot
                && position
                    .is_some_and(|row| usize::try_from(row).is_ok_and(|row| row < table_rows))
            {
                writers.insert(slot, token);
            }
        }
        writers
    }

    /// Index of the first element of a row of a pool tensor, whose rank was checked.
    pub(crate) fn row(&self, pool: &HostTensor, layer: usize, slot: usize, head: usize) -> usize {
        let Some((page, slots)) = self.pages(pool) else {
            return 0;
        };
        let (heads, dim) = match (self.layout, pool.shape.as_slice()) {
            (Layout::Hnd, &[_, _, heads, _, dim]) => (heads, dim),
            (_, &[.., heads, dim]) => (heads, dim),
            _ => return 0,
        };
        let (page_index, inside) = (slot / page, slot % page);
        let row = match self.layout {
            Layout::Hnd => (page_index * heads + head) * page + inside,
            _ => slot * heads + head,
        };
        (layer * slots * heads + row) * dim
    }
}

/// An element of a tensor of integers.
pub(crate) fn index(tensor: &HostTensor, token: usize) -> Option<i64> {
    let size = tensor.dtype.size();
    let bytes = tensor.bytes.get(token * size..(token + 1) * size)?;
    match tensor.dtype {
        DType::I32 => Some(i32::from_le_bytes(bytes.try_into().ok()?).into()),
        DType::I64 => Some(i64::from_le_bytes(bytes.try_into().ok()?)),
        _ => None,
    }
}

/// The largest slot that is not negative.
fn highest(slots: &HostTensor) -> Option<i64> {
    (0..slots.elements())
        .filter_map(|token| index(slots, token))
        .filter(|&slot| slot >= 0)
        .max()
}
