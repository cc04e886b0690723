use super::data::Report;
use super::targets::{Target, targets};
use super::{html, summary};

/// Figures as the programs write them, short: a headline that meets its targets at T = 1 and 512
/// and not at 8192, an experiment that must not count, a geometry that is short, a pool.
const DENSE: &str = r#"{
  "device": "NVIDIA <H200>", "driver": 13000, "host_cost_us": 2.5,
  "figures": [
    {"group": "headline", "name": "D = R = 128, bf16", "tokens": 1, "kv_bytes": 32768, "threads": null,
     "ours": {"median": 1.40, "min": 1.39, "max": 1.41},
     "memcpy": {"median": 1.20, "min": 1.19, "max": 1.21},
     "copy_kernel": {"median": 1.30, "min": 1.29, "max": 1.31}},
    {"group": "headline", "name": "D = R = 128, bf16", "tokens": 8192, "kv_bytes": 268435456, "threads": null,
     "ours": {"median": 130.0, "min": 129.0, "max": 131.0},
     "memcpy": {"median": 127.0, "min": 126.0, "max": 128.0},
     "copy_kernel": {"median": 126.1, "min": 126.0, "max": 126.2}},
    {"group": "headline", "name": "forced", "tokens": 512, "kv_bytes": 16777216, "threads": 1024,
     "ours": {"median": 99.0, "min": 99.0, "max": 99.0},
     "memcpy": {"median": 9.4, "min": 9.3, "max": 9.5},
     "copy_kernel": {"median": 9.6, "min": 9.5, "max": 9.7}},
    {"group": "headline", "name": "forced path", "tokens": 512, "kv_bytes": 16777216, "path": "pairs",
     "ours": {"median": 99.0, "min": 99.0, "max": 99.0},
     "memcpy": {"median": 9.4, "min": 9.3, "max": 9.5},
     "copy_kernel": {"median": 9.6, "min": 9.5, "max": 9.7}},
    {"group": "headline", "name": "D = R = 128, bf16", "tokens": 512, "kv_bytes": 16777216, "threads": null,
     "ours": {"median": 9.5, "min": 9.4, "max": 9.6},
     "memcpy": {"median": 9.4, "min": 9.3, "max": 9.5},
     "copy_kernel": {"median": 9.6, "min": 9.5, "max": 9.7}},
    {"group": "geometry", "name": "D = R = 64", "tokens": 8192, "kv_bytes": 134217728,
     "ours": {"median": 66.0, "min": 66.0, "max": 66.0},
     "memcpy": {"median": 64.0, "min": 64.0, "max": 64.0},
     "copy_kernel": {"median": 64.0, "min": 64.0, "max": 64.0}},
    {"group": "geometry", "name": "f32 <table>", "tokens": 8192, "kv_bytes": 268435456,
     "ours": {"median": 150.0, "min": 150.0, "max": 150.0},
     "memcpy": {"median": 127.0, "min": 127.0, "max": 127.0},
     "copy_kernel": {"median": 126.0, "min": 126.0, "max": 126.0}}
  ]}"#;

const POOL: &str = r#"{
  "device": "NVIDIA <H200>", "driver": 13000,
  "figures": [
    {"group": "pool", "name": "NHD bf16", "pool": {"dtype": "bfloat16", "hnd": false, "page_size": 1}, "tokens": 8192, "kv_bytes": 268435456,
     "ours": {"median": 135.0, "min": 135.0, "max": 135.0},
     "memcpy": {"median": 127.0, "min": 127.0, "max": 127.0},
     "copy_kernel": {"median": 127.0, "min": 127.0, "max": 127.0}},
    {"group": "pool", "name": "NHD e4m3fn", "pool": {"dtype": "float8_e4m3fn", "hnd": false, "page_size": 1}, "tokens": 8192, "kv_bytes": 268435456,
     "ours": {"median": 121.5, "min": 121.5, "max": 121.5},
     "memcpy": {"median": 127.0, "min": 127.0, "max": 127.0},
     "copy_kernel": {"median": 127.0, "min": 127.0, "max": 127.0}},
    {"group": "pool", "name": "HND bf16, page 16", "pool": {"dtype": "bfloat16", "hnd": true, "page_size": 16}, "tokens": 8192, "kv_bytes": 268435456,
     "ours": {"median": 140.0, "min": 140.0, "max": 140.0},
     "memcpy": {"median": 127.0, "min": 127.0, "max": 127.0},
     "copy_kernel": {"median": 127.0, "min": 127.0, "max": 127.0}}
  ]}"#;

const PEERS: &str = r#"{
  "kind": "fused-kv-peers", "date": "2026-12-01", "command": "peers.py", "torch": "2.11.0", "triton": "3.6.0",
  "files": {"sglang": {"name": "a.py", "bytes": 10, "sha256": "0123456789abcdef"}},
  "dense": {
    "sglang": {"1": {"median": 1.9, "min": 1.9, "max": 1.9},
               "512": {"median": 26.6, "min": 26.6, "max": 26.6},
               "8192": {"median": 384.0, "min": 384.0, "max": 384.0}},
    "flaggems": {"1": {"median": 1.3, "min": 1.3, "max": 1.3}}},
  "pool": {"tokenspeed bf16": {"8192": {"median": 405.0, "min": 405.0, "max": 405.0}}},
  "errors": {"tokenspeed e4m3fn": "ValueError: <no>"}}"#;

const LOADS: &str = r#"{"label":"cold","first_plan_ms":250.0,"second_plan_ms":0.01}
{"label":"cached","first_plan_ms":31.0,"second_plan_ms":0.01}
{"label":"cold","first_plan_ms":310.0,"second_plan_ms":0.01}
{"label":"cold","first_plan_ms":240.0,"second_plan_ms":0.01}
"#;

const MACHINE: &str = r#"{"date": "2026-12-01T00:00:00Z", "gpu": "NVIDIA H200", "driver": "580.1",
  "ptx_dir": "", "commands": ["bin/fused-kv-bench dense --out dense.json"]}"#;

const MANIFEST: &str = r#"{"generated_by": "cargo xtask build-ptx", "codegen": "llvm",
  "compiler": "rustc 1.95.0", "source_sha256": "aaaaaaaaaaaaaaaa", "abi_version": 1, "params_size": 304,
  "tiers": [{"file": "sm_90.ptx", "target": "sm_90", "ptx_version": "7.8",
             "sha256": "bbbbbbbbbbbbbbbb", "entries": ["k"]}]}"#;

fn report() -> Report {
    let mut report = Report::default();
    for (name, text) in [
        ("dense.json", DENSE),
        ("pool.json", POOL),
        ("peers.json", PEERS),
        ("load.jsonl", LOADS),
        ("machine.json", MACHINE),
        ("ptx-llvm.json", MANIFEST),
    ] {
        report.add_text(name, text).unwrap();
    }
    report
}

fn find<'a>(targets: &'a [Target], what: &str) -> &'a Target {
    let found = targets.iter().find(|target| target.what == what);
    found.unwrap_or_else(|| panic!("no target {what}: {targets:#?}"))
}

#[test]
fn targets_follow_the_figures() {
    let targets = targets(&report());
    for (what, measured, met) in [
        ("above the better copy, T = 1", "+0.20 µs", Some(true)),
        ("above the better copy, T = 16", "", None),
        (
            "rate against the better copy, T = 512",
            "0.989 (T = 512)",
            Some(true),
        ),
        (
            "rate against the better copy, T = 8192",
            "0.970 (T = 8192)",
            Some(false),
        ),
        ("times sglang's rate, every T", "1.357 (T = 1)", Some(true)),
        (
            "times sglang's rate, T ≥ 512",
            "2.800 (T = 512)",
            Some(true),
        ),
        (
            "times FlagGems' rate, every T",
            "0.929 (T = 1)",
            Some(false),
        ),
        (
            "other geometries against the copy, T = 8192",
            "0.840 (f32 <table>)",
            Some(false),
        ),
        ("odd geometries against the copy, T = 8192", "", None),
        ("host time of one run, no graph", "2.50 µs", Some(true)),
        (
            "first plan, empty cache of the driver",
            "250.0 ms (median of 3, at most 310.0)",
            Some(true),
        ),
        (
            "first plan, from the driver's cache",
            "31.0 ms (median of 1, at most 31.0)",
            Some(false),
        ),
        (
            "pool, bf16: rate against the copy, T ≥ 2048",
            "0.941 (T = 8192)",
            Some(true),
        ),
        (
            "pool, bf16: times the Triton scatter's rate, T ≥ 512",
            "3.000 (T = 8192)",
            Some(true),
        ),
        (
            "pool, FP8: time as a part of bf16's, T = 8192",
            "0.900 (121.5 of 135.0 µs)",
            Some(false),
        ),
        (
            "pool, FP8: times the Triton scatter's rate, T ≥ 512",
            "",
            None,
        ),
        (
            "pool, HND pages: rate against the copy, T ≥ 2048",
            "0.907 (HND bf16, page 16, T = 8192)",
            Some(true),
        ),
    ] {
        let target = find(&targets, what);
        assert_eq!(target.measured, measured, "{what}");
        assert_eq!(target.met, met, "{what}");
    }
}

#[test]
fn the_page_stands_alone_and_shows_everything() {
    let page = html::page(&report()).unwrap();
    for part in [
        "NVIDIA &lt;H200&gt;",
        "driver 580.1",
        "CUDA 13.0",
        "f32 &lt;table&gt;",
        "ValueError: &lt;no&gt;",
        "bin/fused-kv-bench dense --out dense.json",
        "aaaaaaaaaaaaaaaa",
        "0123456789abcdef",
        "rustc 1.95.0",
        "10 of 15 targets met, 5 short",
        "The peers were measured in a run of their own (unknown device, 2026-12-01).",
    ] {
        assert!(page.contains(part), "{part} is missing");
    }
    assert_eq!(page.matches("<svg ").count(), 3, "rate, peers, pool");
    assert_eq!(
        page.matches("<svg ").count(),
        page.matches("</svg>").count()
    );
    // Nothing to load, and nothing of the figures that became markup.
    for foreign in [
        "<H200>",
        "<table>\"",
        "src=",
        "url(",
        "@import",
        "<script",
        "<link",
    ] {
        assert!(!page.contains(foreign), "{foreign} is in the page");
    }
    for address in page.match_indices("http") {
        let rest = &page[address.0..];
        assert!(
            rest.starts_with("http://www.w3.org/2000/svg"),
            "{:.60}",
            rest
        );
    }
    // The experiment.
    assert!(!page.contains("99.0"));
}

#[test]
fn all_figures_in_one_file_make_the_same_page() {
    let report = report();
    let merged = serde_json::to_string(&report).unwrap();
    let mut again = Report::default();
    again.add_text("report.json", &merged).unwrap();
    assert_eq!(serde_json::to_string(&again).unwrap(), merged);
    assert_eq!(html::page(&again).unwrap(), html::page(&report).unwrap());
}

#[test]
fn a_folder_is_read_whole_and_a_merged_file_in_it_once() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("dense.json", DENSE);
    write("dense-rust-cuda.json", DENSE);
    write("load.jsonl", LOADS);
    write("report.json", &serde_json::to_string(&report()).unwrap());
    write("notes.txt", "no figures");
    let mut read = Report::default();
    read.add(folder.path()).unwrap();
    assert_eq!(read.headline().len(), 3);
    assert_eq!(read.loads.len(), 4);
    assert!(read.dense_rust_cuda.is_some());
    assert!(html::page(&read).unwrap().contains("with PTX of rust-cuda"));
    assert!(summary(&read).contains("SHORT rate against the better copy, T = 8192"));
}

#[test]
fn what_is_no_figure_is_refused() {
    for text in [
        "{}",
        "[1]",
        "{\"figures\": [{\"group\": \"headline\"}]}",
        "no JSON",
    ] {
        assert!(
            Report::default().add_text("a.json", text).is_err(),
            "{text}"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let error = Report::default()
        .add(folder.path())
        .unwrap_err()
        .to_string();
    assert!(error.ends_with("no JSON in it"), "{error}");
    // Nothing measured is a page too, with every target open.
    let page = html::page(&Report::default()).unwrap();
    assert!(page.contains("0 of 0 targets met"));
}
