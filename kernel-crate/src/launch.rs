//! Which kernel serves a job, and with which grid.

use crate::abi::{Code, FastDivisor, Params, flags};

/// A dispatch path. All of them give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// 16 bytes at a time: aligned rows, whole chunks, at most 512 elements a head.
    Vector,
    /// Two elements at a time: rows aligned to two elements.
    Pairs,
    /// Two elements at a time: rows that all start one element behind a pair. Elements 1 and 2 are
    /// a pair, 3 and 4, ...; one lane moves the first and the last one, of the rotated elements and
    /// of the others.
    ShiftedPairs,
    /// One element at a time: everything.
    Elements,
}

impl Path {
    /// All paths, fastest first.
    pub const ALL: [Self; 4] = [
        Self::Vector,
        Self::Pairs,
        Self::ShiftedPairs,
        Self::Elements,
    ];

    /// The name that options and messages use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vector => "vector",
            Self::Pairs => "pairs",
            Self::ShiftedPairs => "shifted-pairs",
            Self::Elements => "elements",
        }
    }
}

/// Up to this many threads a launch takes small blocks, which start and end sooner.
const SMALL: u64 = 64 * 1024;

/// Up to this many bytes of `kv` a launch starts to read before the kernel in front of it ends.
const EARLY: u64 = 32 << 20;
/// Threads that do so: about three quarters of what a large device holds at a time. More only repeat
/// what their own loads do.
const EARLY_THREADS: u32 = 96 * 1024;

/// What decides about the path: geometry, dtypes, and the alignment of everything.
///
/// The `_bits` fields are the bitwise or of all addresses and byte strides that lead to a row:
/// their lowest set bit is the alignment of the rows.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// KV heads (H), at least 1.
    pub heads: u32,
    /// Elements of a head (D), even, 2 to 1024.
    pub head_dim: u32,
    /// Rotated elements of a head (R), even, 2 to D.
    pub rotary_dim: u32,
    /// Pairs `(2i, 2i+1)` instead of `(i, i + R/2)`.
    pub interleaved: bool,
    /// Dtype of `kv`.
    pub kv: Code,
    /// Dtype of the norm weights.
    pub weight: Code,
    /// Dtype of the table.
    pub table: Code,
    /// Dtype of the outputs.
    pub out: Code,
    /// The outputs are a pool.
    pub pool: bool,
    /// Of `kv`.
    pub kv_bits: u64,
    /// Of both outputs.
    pub out_bits: u64,
    /// Of the norm weights.
    pub weight_bits: u64,
    /// Of the table.
    pub table_bits: u64,
    /// As `kv_bits`, with every address taken one element lower: whether the rows' second elements
    /// start pairs.
    pub kv_shifted_bits: u64,
    /// As `out_bits`, likewise.
    pub out_shifted_bits: u64,
}

const fn size(code: Code) -> u64 {
    match code {
        Code::F32 => 4,
        Code::Bf16 | Code::F16 => 2,
        Code::E4M3 | Code::E5M2 => 1,
    }
}

const fn aligned(bits: u64, to: u64) -> bool {
    bits.is_multiple_of(to)
}

impl Facts {
    /// Why `path` cannot serve this job, if it cannot.
    pub fn obstacle(&self, path: Path) -> Option<&'static str> {
        let (kv, out, table) = (size(self.kv), size(self.out), size(self.table));
        match path {
            Path::Elements => None,
            Path::Pairs => {
                if !aligned(self.kv_bits, 2 * kv) || !aligned(self.out_bits, 2 * out) {
                    Some("rows are not aligned to two elements")
                } else {
                    None
                }
            }
            Path::ShiftedPairs => {
                if !aligned(self.kv_shifted_bits, 2 * kv)
                    || !aligned(self.out_shifted_bits, 2 * out)
                {
                    Some("rows do not all start one element behind a pair")
                } else {
                    None
                }
            }
            Path::Vector => {
                // Interleaved chunks take four angles, rotated pairs of neox chunks eight.
                let (rotary_unit, angles) = if self.interleaved { (8, 4) } else { (16, 8) };
                let sines = u64::from(self.rotary_dim) / 2 * table;
                if !self.head_dim.is_multiple_of(8) || self.head_dim > 512 {
                    Some("head_dim is no multiple of 8 up to 512")
                } else if !self.rotary_dim.is_multiple_of(rotary_unit) {
                    Some("rotary_dim does not cut the row at whole chunks")
                } else if !aligned(self.kv_bits, 16) {
                    Some("rows of kv are not aligned to 16 bytes")
                } else if !aligned(self.out_bits, 8 * if out > 2 { 2 } else { out }) {
                    Some("rows of the outputs are not aligned to a vector store")
                } else if !aligned(self.weight_bits, 16) {
                    Some("rows of k_norm_weight are not aligned to 16 bytes")
                } else if !aligned(self.table_bits | sines, core::cmp::min(16, angles * table)) {
                    Some("rows of cos_sin_cache are not aligned to a vector load")
                } else {
                    None
                }
            }
        }
    }

    /// The fastest path that can serve this job.
    pub fn best_path(&self) -> Path {
        let serves = |path: &Path| self.obstacle(*path).is_none();
        Path::ALL.into_iter().find(serves).unwrap_or(Path::Elements)
    }

    /// The launch of `path` for a job of `pairs` pairs of token and layer. `threads`, a multiple of
    /// 64 up to 512, forces the size of a block.
    ///
    /// The path must be able to serve the job: see [`Facts::obstacle`].
    pub fn launch(&self, path: Path, pairs: u64, threads: Option<u32>) -> Launch {
        let lanes = (crate::arith::leaves(self.head_dim) / 2).clamp(1, 32);
        let chunks = self.head_dim / 8;
        let (rotated, rest) = match (path, self.interleaved) {
            (Path::Vector, false) => {
                let rotated = self.rotary_dim / 16;
                (rotated, (chunks - 2 * rotated).div_ceil(2))
            }
            // Nothing crosses a chunk: the two chunks of a lane are those the tree adds first.
            _ => (0, lanes),
        };
        let per_token = match path {
            Path::Vector => self.heads,
            Path::Pairs | Path::ShiftedPairs | Path::Elements => self.heads.div_ceil(32 / lanes),
        };
        let row_threads = if path == Path::Vector { lanes } else { 32 };
        let row_bytes = u64::from(self.head_dim) * size(self.kv);
        let bytes = pairs.saturating_mul(2 * u64::from(self.heads) * row_bytes);
        let early = bytes <= EARLY;
        let threads = threads.unwrap_or_else(|| {
            let wanted = pairs.saturating_mul(u64::from(per_token * row_threads));
            match path {
                _ if wanted <= SMALL => 64,
                // Kernels with more registers fill a multiprocessor better in small blocks; those
                // that write 8-bit floats are faster in them too.
                Path::Vector if self.is_common() && size(self.out) > 1 => {
                    if early {
                        512
                    } else if self.pool {
                        128
                    } else {
                        256
                    }
                }
                _ => 64,
            }
        });
        Launch {
            entry: self.entry(path),
            early_blocks: if early { EARLY_THREADS / threads } else { 0 },
            layers_first: self.has_order(path).then_some(size(self.out) > 1),
            // Rows have at most 1024 elements.
            row_lines: row_bytes.div_ceil(128) as u32,
            threads,
            rows_per_block: threads / row_threads,
            per_token,
            max_tokens: (((1 << 31) - 1) / per_token).max(1),
            lane_shift: lanes.trailing_zeros(),
            rotated,
            rest,
        }
    }

    fn entry(&self, path: Path) -> &'static str {
        let uniform = self.weight == self.kv && self.table == self.kv;
        if self.pool {
            return match (path, self.kv) {
                (Path::Vector, _) if self.is_common() => match self.out {
                    Code::Bf16 => "fused_kv_pool_bf16_d128",
                    Code::E4M3 => "fused_kv_pool_bf16_d128_e4m3",
                    Code::E5M2 => "fused_kv_pool_bf16_d128_e5m2",
                    _ => "fused_kv_pool_bf16_d128_any",
                },
                (Path::Vector, Code::Bf16) => "fused_kv_pool_bf16",
                (Path::Vector, Code::F16) => "fused_kv_pool_f16",
                (Path::Vector, _) => "fused_kv_pool_f32",
                (Path::Pairs, _) => "fused_kv_pool_generic_2",
                (Path::ShiftedPairs, _) => "fused_kv_pool_generic_shifted",
                (Path::Elements, _) => "fused_kv_pool_generic_1",
            };
        }
        match (path, self.kv) {
            (Path::Vector, _) if self.is_common() => "fused_kv_vector_bf16_d128",
            (Path::Vector, Code::Bf16) if uniform => "fused_kv_vector_bf16",
            (Path::Vector, Code::Bf16) => "fused_kv_vector_bf16_any",
            (Path::Vector, Code::F16) if uniform => "fused_kv_vector_f16",
            (Path::Vector, Code::F16) => "fused_kv_vector_f16_any",
            (Path::Vector, _) if uniform => "fused_kv_vector_f32",
            (Path::Vector, _) => "fused_kv_vector_f32_any",
            (Path::Pairs, Code::Bf16) => "fused_kv_generic_2_bf16",
            (Path::Pairs, Code::F16) => "fused_kv_generic_2_f16",
            (Path::Pairs, _) => "fused_kv_generic_2_f32",
            (Path::ShiftedPairs, Code::Bf16) => "fused_kv_generic_shifted_bf16",
            (Path::ShiftedPairs, Code::F16) => "fused_kv_generic_shifted_f16",
            (Path::ShiftedPairs, _) => "fused_kv_generic_shifted_f32",
            (Path::Elements, Code::Bf16) => "fused_kv_generic_1_bf16",
            (Path::Elements, Code::F16) => "fused_kv_generic_1_f16",
            (Path::Elements, _) => "fused_kv_generic_1_f32",
        }
    }

    /// Whether the kernel can go through its blocks in either order. Those into 8-bit pools at D = R = 128
    /// do without, as [`crate::kernels::vector::run`] says: the choice costs them up to 0.16 us.
    fn has_order(&self, path: Path) -> bool {
        self.pool && !(path == Path::Vector && self.is_common() && size(self.out) == 1)
    }

    /// The geometry that has a kernel of its own.
    fn is_common(&self) -> bool {
        self.head_dim == 128
            && self.rotary_dim == 128
            && !self.interleaved
            && self.kv == Code::Bf16
            && self.weight == Code::Bf16
            && self.table == Code::Bf16
    }
}

/// A kernel and the shape of its grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Name of the entry point.
    pub entry: &'static str,
    /// Threads of a block.
    pub threads: u32,
    /// Rows that a block takes: heads of tokens, or batches of heads of tokens.
    pub rows_per_block: u32,
    /// Rows of a token.
    pub per_token: u32,
    /// The most tokens that one launch can index.
    pub max_tokens: u32,
    /// See [`Params::lane_shift`].
    pub lane_shift: u32,
    /// See [`Params::early_blocks`].
    pub early_blocks: u32,
    /// Whether the grid goes through the layers of a group of rows first ([`Launch::grid`]), so that
    /// `kv` is read in the order it lies in, where the groups fit along y. Worth it where the writes are
    /// scattered anyway. `None` where the kernel has no choice, for workspaces too: one layer after
    /// another.
    pub layers_first: Option<bool>,
    /// See [`Params::row_lines`].
    pub row_lines: u32,
    /// See [`Params::rotated`].
    pub rotated: u32,
    /// See [`Params::rest`].
    pub rest: u32,
}

/// The most blocks of a grid along y.
const MAX_Y: u32 = 65_535;
/// The most layers that one launch can index.
pub const MAX_LAYERS: u32 = MAX_Y;

impl Launch {
    /// Writes what this launch decides into `params`.
    pub fn apply(&self, params: &mut Params) {
        params.lane_shift = self.lane_shift;
        params.rotated = self.rotated;
        params.rest = self.rest;
        params.early_blocks = self.early_blocks;
        params.row_lines = self.row_lines;
        params.row_divisor = FastDivisor::new(self.per_token);
    }

    /// Sets `params.rows` and [`flags::LAYERS_FIRST`], and gives the blocks along x and y, for a
    /// launch of `tokens` tokens (at most [`Launch::max_tokens`]) and `layers` layers (at most
    /// [`MAX_LAYERS`]). Goes layer after layer where the groups of rows do not fit along y.
    pub fn grid(&self, params: &mut Params, tokens: u32, layers: u32) -> (u32, u32) {
        params.rows = tokens * self.per_token;
        let groups = params.rows.div_ceil(self.rows_per_block);
        // A grid is long along x only.
        if self.layers_first == Some(true) && groups <= MAX_Y {
            params.flags |= flags::LAYERS_FIRST;
            (layers, groups)
        } else {
            params.flags &= !flags::LAYERS_FIRST;
            (groups, layers)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// D = R = 128, 8 heads, everything of one type and aligned.
    fn facts(kv: Code) -> Facts {
        Facts {
            heads: 8,
            head_dim: 128,
            rotary_dim: 128,
            interleaved: false,
            kv,
            weight: kv,
            table: kv,
            out: kv,
            pool: false,
            kv_bits: 256,
            out_bits: 256,
            weight_bits: 256,
            table_bits: 256,
            kv_shifted_bits: 1,
            out_shifted_bits: 1,
        }
    }

    fn launch(facts: &Facts, tokens: u64) -> Launch {
        facts.launch(Path::Vector, 8 * tokens, None)
    }

    #[test]
    fn small_jobs_start_early() {
        let bf16 = facts(Code::Bf16);
        let pool = Facts { pool: true, ..bf16 };
        assert_eq!(launch(&bf16, 16).threads, 64);
        assert_eq!(launch(&bf16, 512).threads, 512);
        assert_eq!(launch(&bf16, 8192).threads, 256);
        assert_eq!(launch(&bf16, 512).early_blocks, EARLY_THREADS / 512);
        assert_eq!(launch(&bf16, 8192).early_blocks, 0);
        assert_eq!(
            launch(&pool, 512),
            Launch {
                entry: "fused_kv_pool_bf16_d128",
                layers_first: Some(true),
                ..launch(&bf16, 512)
            }
        );
        assert_eq!(launch(&pool, 8192).threads, 128);
        assert_eq!(launch(&pool, 8192).early_blocks, 0);
    }

    /// Into a pool one token after another with all its layers, while the groups of rows fit along
    /// y; 8-bit pools and workspaces one layer after another.
    #[test]
    fn the_order_of_the_grid() {
        let workspace = facts(Code::Bf16);
        let pool = Facts {
            pool: true,
            ..workspace
        };
        let fp8 = Facts {
            out: Code::E4M3,
            ..pool
        };
        let grid = |facts: &Facts, tokens: u32| {
            let mut params = Params {
                flags: flags::REPORT | flags::LAYERS_FIRST,
                ..Params::default()
            };
            let grid = facts
                .launch(Path::Vector, 3 * u64::from(tokens), Some(64))
                .grid(&mut params, tokens, 3);
            assert_eq!(params.rows, tokens * 8);
            assert_ne!(params.flags & flags::REPORT, 0);
            (grid, params.flags & flags::LAYERS_FIRST != 0)
        };
        assert_eq!(grid(&pool, 10), ((3, 10), true));
        assert_eq!(grid(&pool, 65_535), ((3, 65_535), true));
        assert_eq!(grid(&pool, 65_536), ((65_536, 3), false));
        assert_eq!(grid(&fp8, 10), ((10, 3), false));
        assert_eq!(
            fp8.launch(Path::Vector, 30, None).layers_first,
            None,
            "no choice"
        );
        assert_eq!(
            fp8.launch(Path::Pairs, 30, None).layers_first,
            Some(false),
            "another kernel"
        );
        assert_eq!(grid(&workspace, 10), ((10, 3), false));
    }

    /// Other kernels need more registers than large blocks have.
    #[test]
    fn large_blocks_are_for_the_common_kernel() {
        let bf16 = facts(Code::Bf16);
        let aux = |kv| Facts {
            weight: Code::Bf16,
            table: Code::Bf16,
            ..facts(kv)
        };
        let fp8 = Facts {
            pool: true,
            out: Code::E4M3,
            ..bf16
        };
        let wide = Facts {
            head_dim: 256,
            rotary_dim: 256,
            ..bf16
        };
        for other in [aux(Code::F16), aux(Code::F32), facts(Code::F16), fp8, wide] {
            for tokens in [1, 512, 8192] {
                assert_eq!(launch(&other, tokens).threads, 64, "{other:?}");
            }
        }
        assert_eq!(launch(&bf16, 512).entry, "fused_kv_vector_bf16_d128");
        assert_eq!(
            launch(&aux(Code::F16), 512).entry,
            "fused_kv_vector_f16_any"
        );
        assert_eq!(launch(&fp8, 512).entry, "fused_kv_pool_bf16_d128_e4m3");
        let e5m2 = Facts {
            out: Code::E5M2,
            ..fp8
        };
        assert_eq!(launch(&e5m2, 512).entry, "fused_kv_pool_bf16_d128_e5m2");
        assert_eq!(launch(&e5m2, 512).layers_first, None);
    }

    #[test]
    fn shifted_rows_have_a_path() {
        let shifted = Facts {
            kv_bits: 256 | 2,
            out_bits: 256 | 2,
            kv_shifted_bits: 256,
            out_shifted_bits: 256,
            ..facts(Code::Bf16)
        };
        assert_eq!(shifted.best_path(), Path::ShiftedPairs);
        // Only one side off by one.
        let source = Facts {
            out_bits: 256,
            out_shifted_bits: 254,
            ..shifted
        };
        assert_eq!(source.best_path(), Path::Elements);
        assert_eq!(facts(Code::Bf16).best_path(), Path::Vector);
    }
}
