//! The figures: what the measuring programs leave, and all of it together in one file.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::manifest::Manifest;
use crate::project;

/// Microseconds a call over the replays of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// One case of fused-kv-bench.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// `headline`, `geometry`, `odd` or `pool`.
    pub group: String,
    /// What is special about the case.
    pub name: String,
    /// Tokens.
    pub tokens: u64,
    /// Half of the bytes that are read and written.
    pub kv_bytes: u64,
    /// The pool that rows go to, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
    /// This project's kernel.
    pub ours: Spread,
    /// `cuMemcpyDtoDAsync` of as many bytes.
    pub memcpy: Spread,
    /// A copy kernel over as many bytes.
    pub copy_kernel: Spread,
    /// Everything else that the program tells of a case.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl Figure {
    /// Microseconds of the better of both copies.
    pub fn copy(&self) -> f64 {
        self.memcpy.median.min(self.copy_kernel.median)
    }

    /// Rate as a part of the better copy's rate.
    pub fn of_copy(&self) -> f64 {
        self.copy() / self.ours.median
    }

    /// Bytes that are read and written.
    pub fn moved(&self) -> f64 {
        2.0 * self.kv_bytes as f64
    }

    /// A launch whose dispatch was forced: an experiment, not what a caller gets.
    pub fn forced(&self) -> bool {
        ["path", "threads", "shared_bytes", "overlap", "layers_first"]
            .iter()
            .any(|key| self.rest.get(*key).is_some_and(|value| !value.is_null()))
    }

    /// The rows go to a pool of FP8.
    pub fn fp8(&self) -> bool {
        self.pool
            .as_ref()
            .is_some_and(|pool| pool.dtype.contains("e4m3") || pool.dtype.contains("e5m2"))
    }

    /// The rows go to a pool with pages that hold their heads before their tokens.
    pub fn hnd(&self) -> bool {
        self.pool.as_ref().is_some_and(|pool| pool.hnd)
    }
}

/// Where rows go in place of a workspace.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pool {
    pub dtype: String,
    /// Pages hold their heads before their tokens.
    pub hnd: bool,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// What `fused-kv-bench dense` writes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Bench {
    /// Name of the device.
    pub device: String,
    /// Version of CUDA that the driver speaks, as it tells it: 13000 is 13.0.
    #[serde(default)]
    pub driver: i32,
    /// Host time of one run of a plan, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_cost_us: Option<f64>,
    /// The cases.
    pub figures: Vec<Figure>,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// Times of a peer by its token counts.
pub type ByTokens = BTreeMap<u64, Spread>;

/// What tests/peers/peers.py writes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Peers {
    /// `fused-kv-peers`.
    pub kind: String,
    #[serde(default)]
    pub date: String,
    #[serde(default)]
    pub command: String,
    #[serde(default)]
    pub device: Option<String>,
    #[serde(default)]
    pub torch: Option<String>,
    #[serde(default)]
    pub triton: Option<String>,
    /// The upstream files by peer.
    #[serde(default)]
    pub files: BTreeMap<String, PeerFile>,
    /// Workspace outputs.
    #[serde(default)]
    pub dense: BTreeMap<String, ByTokens>,
    /// Pool outputs.
    #[serde(default)]
    pub pool: BTreeMap<String, ByTokens>,
    /// Peers that could not be measured, and why.
    #[serde(default)]
    pub errors: BTreeMap<String, String>,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// The upstream file that was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PeerFile {
    pub name: String,
    pub bytes: u64,
    pub sha256: String,
}

/// Where and how it was measured; run.sh writes it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    /// UTC.
    pub date: String,
    #[serde(default)]
    pub gpu: String,
    /// Version of the driver.
    #[serde(default)]
    pub driver: String,
    /// Name of the folder whose PTX replaced the embedded one; empty where none did.
    #[serde(default)]
    pub ptx_dir: String,
    pub commands: Vec<String>,
}

/// A process of `fused-kv-bench load`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Load {
    /// `cold` or `cached`.
    pub label: String,
    /// Milliseconds until the first plan, module load included.
    pub first_plan_ms: f64,
    /// Milliseconds of the second plan.
    pub second_plan_ms: f64,
}

/// All figures of one run of the benchmark.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
    /// Manifests of the PTX that was measured.
    #[serde(default)]
    pub ptx: Vec<Manifest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense: Option<Bench>,
    /// The headline with the other code generator's PTX.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense_rust_cuda: Option<Bench>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peers: Option<Peers>,
    #[serde(default)]
    pub loads: Vec<Load>,
}

/// The parts of a [`Report`], by which a merged file is known.
const PARTS: [&str; 6] = [
    "machine",
    "ptx",
    "dense",
    "dense_rust_cuda",
    "peers",
    "loads",
];

impl Report {
    /// Adds a file, or all files of a folder that `run.sh bench` filled.
    pub fn add(&mut self, path: &Path) -> Result<()> {
        if !path.is_dir() {
            return self.add_file(path);
        }
        let mut files: Vec<_> = std::fs::read_dir(path)
            .with_context(|| format!("cannot read the folder {}", path.display()))?
            .collect::<std::io::Result<Vec<_>>>()?
            .into_iter()
            .map(|entry| entry.path())
            .filter(|path| {
                path.extension()
                    .is_some_and(|extension| extension == "json" || extension == "jsonl")
            })
            .collect();
        files.sort();
        // A merged file that an earlier report left beside its parts would double them.
        if files.len() > 1 {
            files.retain(|file| file.file_name().is_none_or(|name| name != super::JSON));
        }
        if files.is_empty() {
            bail!("{}: no JSON in it", path.display());
        }
        files.iter().try_for_each(|file| self.add_file(file))
    }

    fn add_file(&mut self, path: &Path) -> Result<()> {
        let text = project::read(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        self.add_text(&name, &text)
            .with_context(|| path.display().to_string())
    }

    /// Adds what a file's text holds; only the figures of the two code generators are told apart
    /// by the file's name.
    pub fn add_text(&mut self, name: &str, text: &str) -> Result<()> {
        if name.ends_with(".jsonl") {
            for line in text.lines().filter(|line| !line.trim().is_empty()) {
                self.loads.push(serde_json::from_str(line)?);
            }
            return Ok(());
        }
        let value: Value = serde_json::from_str(text)?;
        let has = |key: &str| value.get(key).is_some();
        if has("figures") {
            let bench: Bench = serde_json::from_value(value)?;
            let slot = if name.contains("rust-cuda") {
                &mut self.dense_rust_cuda
            } else {
                &mut self.dense
            };
            match slot {
                Some(known) => known.figures.extend(bench.figures),
                None => *slot = Some(bench),
            }
        } else if value.get("kind").and_then(Value::as_str) == Some("fused-kv-peers") {
            self.peers = Some(serde_json::from_value(value)?);
        } else if has("codegen") {
            self.ptx.push(serde_json::from_value(value)?);
        } else if has("commands") {
            self.machine = Some(serde_json::from_value(value)?);
        } else if PARTS.into_iter().any(has) {
            let merged: Report = serde_json::from_value(value)?;
            self.machine = merged.machine.or(self.machine.take());
            self.dense = merged.dense.or(self.dense.take());
            self.dense_rust_cuda = merged.dense_rust_cuda.or(self.dense_rust_cuda.take());
            self.peers = merged.peers.or(self.peers.take());
            self.ptx.extend(merged.ptx);
            self.loads.extend(merged.loads);
        } else {
            bail!("not a file of this benchmark");
        }
        Ok(())
    }

    /// All cases of a group, in the order of measurement, without experiments.
    pub fn group<'a>(&'a self, group: &'a str) -> impl Iterator<Item = &'a Figure> {
        self.dense
            .iter()
            .flat_map(|bench| &bench.figures)
            .filter(move |figure| figure.group == group && !figure.forced())
    }

    /// The headline cases, fewest tokens first, one for each token count.
    pub fn headline(&self) -> Vec<&Figure> {
        let mut figures: Vec<_> = self.group("headline").collect();
        figures.sort_by_key(|figure| figure.tokens);
        figures.dedup_by_key(|figure| figure.tokens);
        figures
    }

    /// Microseconds of a peer with workspace outputs.
    pub fn dense_peer(&self, peer: &str, tokens: u64) -> Option<f64> {
        let times = self.peers.as_ref()?.dense.get(peer)?;
        Some(times.get(&tokens)?.median)
    }

    /// Microseconds of a peer with pool outputs.
    pub fn pool_peer(&self, peer: &str, tokens: u64) -> Option<f64> {
        let times = self.peers.as_ref()?.pool.get(peer)?;
        Some(times.get(&tokens)?.median)
    }

    /// First loads in milliseconds with this label, sorted.
    pub fn first_loads(&self, label: &str) -> Vec<f64> {
        let mut times: Vec<_> = self
            .loads
            .iter()
            .filter(|load| load.label == label)
            .map(|load| load.first_plan_ms)
            .collect();
        times.sort_by(f64::total_cmp);
        times
    }

    /// Name of the device.
    pub fn device(&self) -> &str {
        let benches = [&self.dense, &self.dense_rust_cuda];
        let named = benches
            .into_iter()
            .flatten()
            .map(|bench| bench.device.as_str())
            .find(|name| !name.is_empty());
        named
            .or_else(|| self.machine.as_ref().map(|machine| machine.gpu.as_str()))
            .filter(|name| !name.is_empty())
            .unwrap_or("unknown device")
    }
}
