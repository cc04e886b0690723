//! The program `fused-kv` as a process: what it prints, its exit codes, the files it leaves.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::TempDir;

const GOLDEN: [&str; 8] = [
    "tiny",
    "square",
    "partial_rotary",
    "half_precision",
    "single_precision",
    "odd_head_dim",
    "mixed_cache",
    "zeros_and_large",
];

/// The program: a prebuilt one (`FUSED_KV_BIN`), else built here with the features of this test.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(given) = std::env::var_os("FUSED_KV_BIN") {
            return given.into();
        }
        let mut build = escargot::CargoBuild::new()
            .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
            .package("fused-kv")
            .bin("fused-kv");
        if cfg!(feature = "cuda") {
            build = build.features("cuda");
        }
        if !cfg!(debug_assertions) {
            build = build.release();
        }
        let built = build.run().expect("the program builds");
        built.path().to_owned()
    })
}

fn golden(name: &str) -> PathBuf {
    let data = std::env::var_os("FUSED_KV_TEST_DATA").map_or_else(
        || concat!(env!("CARGO_MANIFEST_DIR"), "/data").into(),
        PathBuf::from,
    );
    data.join("golden").join(format!("{name}.safetensors"))
}

fn fused_kv<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Output {
    Command::new(binary())
        .args(arguments)
        .output()
        .expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8 output")
}

/// Runs with success; gives standard output.
#[track_caller]
fn succeed<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> String {
    let output = fused_kv(arguments);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
    assert_eq!(error, "", "nothing on standard error without a terminal");
    text(&output.stdout)
}

/// Checks for exit code 2, nothing on standard output and one line on standard error; gives it.
#[track_caller]
fn refused(output: &Output) -> String {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert_eq!(text(&output.stdout), "");
    assert_eq!(error.lines().count(), 1, "one line: {error:?}");
    assert!(error.starts_with("error: "), "{error:?}");
    error.trim_end().to_owned()
}

#[track_caller]
fn fail<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> String {
    refused(&fused_kv(arguments))
}

/// A safetensors file taken apart: header as JSON, data.
#[derive(Clone)]
struct File {
    header: Value,
    data: Vec<u8>,
}

impl File {
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).expect("the file is there");
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        Self {
            header: serde_json::from_slice(&bytes[8..8 + len]).expect("a JSON header"),
            data: bytes[8 + len..].to_vec(),
        }
    }

    fn write(&self, path: &Path) {
        let header = self.header.to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(&self.data);
        fs::write(path, bytes).expect("the folder can be written");
    }

    fn range(&self, tensor: &str) -> std::ops::Range<usize> {
        let offsets = &self.header[tensor]["data_offsets"];
        let at = |i: usize| offsets[i].as_u64().expect("an offset") as usize;
        at(0)..at(1)
    }

    fn bytes(&self, tensor: &str) -> &[u8] {
        &self.data[self.range(tensor)]
    }

    /// Takes a tensor out of the file, closing the gap.
    fn remove(&mut self, tensor: &str) {
        let gap = self.range(tensor);
        self.data.drain(gap.clone());
        let header = self.header.as_object_mut().unwrap();
        header.remove(tensor);
        for (name, info) in header {
            if name == "__metadata__" {
                continue;
            }
            for offset in info["data_offsets"].as_array_mut().unwrap() {
                let at = offset.as_u64().unwrap() as usize;
                if at >= gap.end {
                    *offset = (at - gap.len()).into();
                }
            }
        }
    }

    /// Adds a tensor at the end.
    fn add(&mut self, tensor: &str, dtype: &str, shape: &[usize], bytes: &[u8]) {
        let start = self.data.len();
        self.data.extend_from_slice(bytes);
        self.header[tensor] = serde_json::json!({
            "dtype": dtype, "shape": shape, "data_offsets": [start, self.data.len()],
        });
    }
}

/// A folder with a copy of a golden file that `change` changed.
fn changed(name: &str, change: impl FnOnce(&mut File)) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("in.safetensors");
    let mut file = File::read(&golden(name));
    change(&mut file);
    file.write(&path);
    (folder, path)
}

fn os<'a>(parts: &'a [&'a str], path: &'a Path) -> Vec<&'a std::ffi::OsStr> {
    let mut all: Vec<_> = parts.iter().map(std::ffi::OsStr::new).collect();
    all.push(path.as_os_str());
    all
}

#[test]
fn golden_files_verify_on_the_cpu() {
    for name in GOLDEN {
        let path = golden(name);
        let table = succeed(os(&["run", "--backend", "cpu", "--verify"], &path));
        assert!(table.contains("within the contract"), "{table}");
        assert!(table.contains(name), "{table}");

        let json = succeed(os(&["run", "--backend=cpu", "--verify", "--json"], &path));
        let json: Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(json["case"], *name);
        assert_eq!(json["backend"]["name"], "cpu");
        let verify = &json["verify"];
        assert_eq!(verify["within_contract"], true);
        assert_eq!(verify["v_out"]["differing"], 0);
        let elements: u64 = json["tensors"]["k_out"]["shape"]
            .as_array()
            .unwrap()
            .iter()
            .map(|extent| extent.as_u64().unwrap())
            .product();
        assert_eq!(verify["k_out"]["elements"], elements);
        if json["tensors"]["kv"]["dtype"] != "float32" {
            assert!(verify["k_out"]["max_ulp"].as_u64().unwrap() <= 1);
        }
        let bytes = json["bytes"].as_u64().unwrap();
        let size = match json["tensors"]["kv"]["dtype"].as_str().unwrap() {
            "float32" => 4,
            _ => 2,
        };
        assert_eq!(
            bytes,
            4 * elements * size,
            "kv read, k_out and v_out written"
        );
    }
}

#[test]
fn a_wrong_reference_is_noticed() {
    // One element of each output, moved by more than the contract allows.
    for tensor in ["k_out", "v_out"] {
        let (_folder, path) = changed("square", |file| {
            let at = file.range(tensor).start + 2 * 1234;
            file.data[at] = file.data[at].wrapping_add(4);
        });
        let output = fused_kv(os(&["run", "--backend=cpu", "--verify"], &path));
        assert_eq!(output.status.code(), Some(1));
        let table = text(&output.stdout);
        assert!(table.contains("BEYOND THE CONTRACT"), "{table}");

        let output = fused_kv(os(&["run", "--backend=cpu", "--verify", "--json"], &path));
        assert_eq!(output.status.code(), Some(1));
        let json: Value = serde_json::from_str(&text(&output.stdout)).expect("JSON");
        assert_eq!(json["verify"]["within_contract"], false);
        assert_eq!(json["verify"][tensor]["beyond_contract"], 1);
        // Without --verify the reference says nothing.
        succeed(os(&["run", "--backend=cpu"], &path));
    }
    // One bit of V is too much already; one unit of K is not.
    let flip = |tensor: &'static str| {
        changed("odd_head_dim", move |file| {
            let at = file.range(tensor).start;
            file.data[at] ^= 1;
        })
    };
    let (_folder, path) = flip("v_out");
    let output = fused_kv(os(&["run", "--backend=cpu", "--verify"], &path));
    assert_eq!(output.status.code(), Some(1));
    let (_folder, path) = flip("k_out");
    succeed(os(&["run", "--backend=cpu", "--verify"], &path));
}

#[test]
fn only_one_output_can_be_verified() {
    let (_folder, path) = changed("tiny", |file| file.remove("k_out"));
    let table = succeed(os(&["run", "--backend=cpu", "--verify"], &path));
    assert!(table.contains("not in the file"), "{table}");

    let (_folder, path) = changed("tiny", |file| {
        file.remove("k_out");
        file.remove("v_out");
    });
    let error = fail(os(&["run", "--backend=cpu", "--verify"], &path));
    assert!(error.contains("has neither"), "{error}");
}

#[test]
fn the_output_file_holds_the_result() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.safetensors");
    let input = golden("odd_head_dim");
    let (input, out) = (input.to_str().unwrap(), path.to_str().unwrap());
    succeed(["run", "--backend=cpu", input, "-o", out]);
    let (result, expected) = (File::read(&path), File::read(Path::new(input)));
    // This golden file agrees in every bit.
    for tensor in ["k_out", "v_out"] {
        assert!(result.bytes(tensor) == expected.bytes(tensor), "{tensor}");
        assert_eq!(
            result.header[tensor]["shape"],
            expected.header[tensor]["shape"]
        );
        assert_eq!(result.header[tensor]["dtype"], "BF16");
    }
    let metadata = &result.header["__metadata__"];
    assert_eq!(metadata["head_dim"], "80");
    assert_eq!(metadata["rope_style"], "neox");
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        1,
        "no temporary file is left"
    );
}

#[test]
fn a_failed_run_leaves_the_old_output_alone() {
    let (folder, input) = changed("tiny", |file| {
        let positions = file.range("positions");
        file.data[positions].copy_from_slice(&512i64.to_le_bytes());
    });
    let path = folder.path().join("out.safetensors");
    fs::write(&path, "before").unwrap();
    let error = fail([
        "run".as_ref(),
        "--backend=cpu".as_ref(),
        input.as_os_str(),
        "-o".as_ref(),
        path.as_os_str(),
    ]);
    assert!(error.contains("positions[0] is 512"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "before");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn outputs_that_cannot_be_written_are_refused() {
    let input = golden("tiny");
    let input = input.to_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("no/such/folder/out.safetensors");
    let error = fail([
        "run",
        "--backend=cpu",
        input,
        "-o",
        missing.to_str().unwrap(),
    ]);
    assert!(error.contains("cannot write"), "{error}");
    let error = fail([
        "run",
        "--backend=cpu",
        input,
        "-o",
        folder.path().to_str().unwrap(),
    ]);
    assert!(error.contains("is a directory"), "{error}");
    let read_only = folder.path().join("kept.safetensors");
    fs::write(&read_only, "kept").unwrap();
    let mut permissions = fs::metadata(&read_only).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&read_only, permissions).unwrap();
    let error = fail([
        "run",
        "--backend=cpu",
        input,
        "-o",
        read_only.to_str().unwrap(),
    ]);
    assert!(error.contains("read-only"), "{error}");
    assert_eq!(fs::read_to_string(&read_only).unwrap(), "kept");
}

#[test]
fn missing_tensors_are_named() {
    for tensor in ["kv", "k_norm_weight", "eps", "cos_sin_cache", "positions"] {
        let (_folder, path) = changed("tiny", |file| file.remove(tensor));
        let error = fail(os(&["run", "--backend=cpu"], &path));
        assert!(
            error.ends_with(&format!("tensor {tensor} is missing")),
            "{error}"
        );
    }
}

#[test]
fn wrong_shapes_and_types_are_refused() {
    type Change = fn(&mut File);
    let cases: [(&str, Change); 9] = [
        ("Invalid kv rank", |file| {
            file.header["kv"]["shape"] = [2, 256].as_slice().into()
        }),
        ("Invalid positions rank", |file| {
            file.header["positions"]["shape"] = [1, 1].as_slice().into();
        }),
        ("Invalid k_norm_weight shape", |file| {
            file.header["k_norm_weight"]["shape"] = [4, 32].as_slice().into();
        }),
        ("Invalid eps shape", |file| {
            file.header["eps"]["shape"] = [2, 1].as_slice().into()
        }),
        ("Invalid cos_sin_cache shape", |file| {
            file.header["cos_sin_cache"]["shape"] = [1024, 32].as_slice().into();
        }),
        ("Invalid k_norm_weight shape", |file| {
            file.header["kv"]["shape"] = [2, 1, 256].as_slice().into()
        }),
        ("tensor eps has dtype F64", |file| {
            file.header["eps"] = serde_json::json!({
                "dtype": "F64", "shape": [1], "data_offsets": file.header["eps"]["data_offsets"],
            });
        }),
        ("Invalid positions shape", |file| {
            file.header["positions"]["dtype"] = "F32".into();
            file.header["positions"]["shape"] = [2].as_slice().into();
        }),
        ("tensor eps: Invalid tensor view", |file| {
            file.header["eps"]["shape"] = [1, 1, 1, 1, 1, 1, 2].as_slice().into();
        }),
    ];
    for (message, change) in cases {
        let (_folder, path) = changed("tiny", change);
        let error = fail(os(&["run", "--backend=cpu"], &path));
        assert!(error.contains(message), "{message}: {error}");
    }
}

#[test]
fn outputs_in_the_file_are_checked_like_a_callers() {
    // The device, dtype and shape messages are the ones people search their logs for.
    let (_folder, path) = changed("tiny", |file| {
        file.remove("v_out");
        file.add("v_out", "F32", &[2, 1, 2, 64], &[0; 1024]);
    });
    let error = fail(os(&["run", "--backend=cpu"], &path));
    let expected = "Invalid v_out device/dtype for fused KV materialization: got device=cpu, \
                    dtype=float32, expected device=cpu, dtype=bfloat16.";
    assert!(error.ends_with(expected), "{error}");

    let (_folder, path) = changed("tiny", |file| {
        file.remove("v_out");
        file.add("v_out", "BF16", &[2, 2, 2, 64], &[0; 1024]);
    });
    let error = fail(os(&["run", "--backend=cpu"], &path));
    let expected = "Invalid v_out shape for fused KV materialization: got (2, 2, 2, 64), \
                    expected (2, 1, 2, 64).";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn metadata_and_flags_must_agree() {
    let path = golden("tiny");
    let error = fail(os(&["run", "--backend=cpu", "--heads", "4"], &path));
    let expected = "--heads 4 contradicts num_kv_heads=2 in the file's metadata";
    assert!(error.ends_with(expected), "{error}");
    let error = fail(os(&["run", "--backend=cpu", "--style=interleaved"], &path));
    let expected = "--style interleaved contradicts rope_style=neox in the file's metadata";
    assert!(error.ends_with(expected), "{error}");
    // Flags that say the same are fine.
    succeed(os(
        &["run", "--backend=cpu", "--heads=2", "--style=neox"],
        &path,
    ));

    // Metadata that contradicts the shapes.
    let (_folder, path) = changed("tiny", |file| {
        file.header["__metadata__"]["num_kv_heads"] = "4".into();
    });
    let error = fail(os(&["run", "--backend=cpu"], &path));
    let expected = "got last dimension 256, expected 512 (2 * 4 heads * head_dim 64).";
    assert!(error.ends_with(expected), "{error}");

    for (key, value, expected) in [
        (
            "head_dim",
            "x\ny",
            r#"metadata head_dim is "x\ny", expected a whole number"#,
        ),
        (
            "rope_style",
            "gptj",
            r#"metadata rope_style is "gptj", expected neox or interleaved"#,
        ),
        (
            "norm_weight",
            "1",
            r#"metadata norm_weight is "1", expected plain or offset"#,
        ),
    ] {
        let (_folder, path) = changed("tiny", |file| {
            file.header["__metadata__"][key] = value.into();
        });
        let error = fail(os(&["run", "--backend=cpu"], &path));
        assert!(error.ends_with(expected), "{error}");
    }
}

#[test]
fn flags_fill_in_what_the_metadata_lacks() {
    let (_folder, path) = changed("tiny", |file| {
        file.header.as_object_mut().unwrap().remove("__metadata__");
    });
    let error = fail(os(&["run", "--backend=cpu"], &path));
    assert!(
        error.contains("metadata num_kv_heads is missing"),
        "{error}"
    );
    assert!(error.contains("--heads"), "{error}");
    let all = [
        "run",
        "--backend=cpu",
        "--verify",
        "--heads=2",
        "--head-dim=64",
        "--rotary-dim=64",
    ];
    let error = fail(os(&all, &path));
    assert!(error.contains("metadata rope_style is missing"), "{error}");
    succeed(os(&[&all[..], &["--style=neox"]].concat(), &path));
    // The other style is another result.
    let output = fused_kv(os(&[&all[..], &["--style=interleaved"]].concat(), &path));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_value_scale_in_the_file_is_used() {
    let (_folder, path) = changed("tiny", |file| {
        let scales: Vec<u8> = [0.5f32, 1.0].iter().flat_map(|s| s.to_le_bytes()).collect();
        file.add("value_scale", "F32", &[2], &scales);
    });
    // The file's v_out is not scaled: half of it is now wrong (zeros excepted).
    let output = fused_kv(os(&["run", "--backend=cpu", "--verify", "--json"], &path));
    assert_eq!(output.status.code(), Some(1));
    let json: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    assert_eq!(json["verify"]["v_out"]["beyond_contract"], 128);
    assert_eq!(json["verify"]["k_out"]["beyond_contract"], 0);
}

#[test]
fn files_that_are_no_safetensors_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.safetensors");
    let good = fs::read(golden("tiny")).unwrap();
    let mut huge = good.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let cases: [(&str, &[u8]); 6] = [
        ("expected at least 8", b""),
        ("header of", b"not a safetensors file at all"),
        ("header of", &huge),
        ("is truncated", &good[..good.len() - 1]),
        ("is oversized", &[&good[..], b"\n"].concat()),
        (
            "invalid safetensors header",
            &[&2u64.to_le_bytes()[..], b"[]"].concat(),
        ),
    ];
    for (message, bytes) in cases {
        fs::write(&path, bytes).unwrap();
        let error = fail(os(&["run", "--backend=cpu"], &path));
        assert!(error.contains(message), "{message}: {error}");
        assert!(error.contains("in.safetensors"), "{error}");
    }
    let error = fail(os(&["run"], folder.path()));
    assert!(error.contains("is a directory"), "{error}");
    let error = fail(os(&["run"], &folder.path().join("nothing")));
    assert!(error.contains("cannot open"), "{error}");
}

/// Truncations and flipped bits of the header: an answer or one line, never a crash.
#[test]
fn damaged_files_never_crash() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.safetensors");
    let good = fs::read(golden("tiny")).unwrap();
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = |limit: usize| {
        // xorshift64: the same damage on every run.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as usize % limit
    };
    for round in 0..150 {
        let mut bytes = good.clone();
        match round % 3 {
            0 => bytes.truncate(draw(good.len())),
            1 => bytes[draw(header)] ^= 1 << draw(8),
            _ => {
                for _ in 0..4 {
                    bytes[draw(header)] = draw(256) as u8;
                }
            }
        }
        fs::write(&path, &bytes).unwrap();
        let output = fused_kv(os(
            &["run", "--backend=cpu", "--verify", "--repeat=1"],
            &path,
        ));
        match output.status.code() {
            Some(0 | 1) => assert_eq!(text(&output.stderr), ""),
            _ => drop(refused(&output)),
        }
    }
}

#[test]
fn synth_makes_what_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (a, b, c) = (path("a"), path("b"), path("c"));
    let geometry = [
        "synth",
        "--tokens=6",
        "--layers=3",
        "--heads=2",
        "--head-dim=46",
        "--rotary-dim=24",
        "--style=interleaved",
        "--dtype=f16",
        "--table-dtype=f32",
        "--weight-dtype=bf16",
        "--positions=i32",
        "--table-rows=100",
        "--eps=1e-5,1e-6,1e-7",
        "--value-scale=0.612",
        "--offset-weights",
        "--with-output",
    ];
    let make = |seed: &str, path: &str| succeed(geometry.iter().copied().chain([seed, "-o", path]));
    make("--seed=7", &a);
    make("--seed=7", &b);
    make("--seed=8", &c);
    let same = |x: &str, y: &str| fs::read(x).unwrap() == fs::read(y).unwrap();
    assert!(same(&a, &b), "the seed decides");
    assert!(!same(&a, &c), "the seed decides");

    let file = File::read(Path::new(&a));
    let shape = |tensor: &str| file.header[tensor]["shape"].to_string();
    let dtype = |tensor: &str| file.header[tensor]["dtype"].as_str().unwrap().to_owned();
    for (tensor, its_shape, its_dtype) in [
        ("kv", "[6,3,184]", "F16"),
        ("k_norm_weight", "[3,46]", "BF16"),
        ("eps", "[3]", "F32"),
        ("cos_sin_cache", "[100,24]", "F32"),
        ("positions", "[6]", "I32"),
        ("value_scale", "[3]", "F32"),
        ("k_out", "[3,6,2,46]", "F16"),
        ("v_out", "[3,6,2,46]", "F16"),
    ] {
        assert_eq!(shape(tensor), its_shape, "{tensor}");
        assert_eq!(dtype(tensor), its_dtype, "{tensor}");
    }
    let positions: Vec<i32> = file
        .bytes("positions")
        .chunks_exact(4)
        .map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap()))
        .collect();
    assert_eq!(
        (positions[0], positions[5]),
        (0, 99),
        "first and last row of the table"
    );
    assert!(positions.iter().all(|position| (0..100).contains(position)));
    let verify = succeed(["run", "--backend=cpu", "--verify", "--json", &a]);
    let json: Value = serde_json::from_str(&verify).unwrap();
    assert_eq!(json["verify"]["k_out"]["differing"], 0);
    assert_eq!(json["verify"]["v_out"]["differing"], 0);
    assert_eq!(json["geometry"]["norm_weight"], "offset");
    assert_eq!(json["geometry"]["rope_style"], "interleaved");
}

#[test]
fn synth_presets_and_no_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let out = path.to_str().unwrap();
    succeed(["synth", "--tokens=2", "--preset=qwen3-8b-dflash", "-o", out]);
    let file = File::read(&path);
    assert_eq!(file.header["kv"]["shape"].to_string(), "[2,5,2048]");
    assert_eq!(file.header["__metadata__"]["head_dim"], "128");
    // Flags change parts of a preset.
    succeed([
        "synth",
        "--tokens=0",
        "--preset=qwen3-8b-dflash",
        "--layers=2",
        "-o",
        out,
    ]);
    assert_eq!(
        File::read(&path).header["kv"]["shape"].to_string(),
        "[0,2,2048]"
    );
    // No tokens: nothing to do, and no failure.
    let json: Value =
        serde_json::from_str(&succeed(["run", "--backend=cpu", "--json", out])).unwrap();
    assert_eq!(json["bytes"], 0);
    assert_eq!(json["tensors"]["k_out"]["shape"].to_string(), "[2,0,8,128]");
}

#[test]
fn synth_refuses_what_no_job_could_use() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    for (argument, message) in [
        ("--head-dim=47", "--head-dim 47"),
        ("--rotary-dim=130", "--rotary-dim 130"),
        ("--layers=0", "--layers and --heads"),
        ("--eps=1e-6,1e-6", "--eps has 2 values, expected 1 or 8"),
        ("--value-scale=inf", "--value-scale inf, expected finite"),
        ("--table-rows=0", "--table-rows 0"),
        ("--rope-theta=-1", "--rope-theta -1"),
    ] {
        let error = fail([
            "synth",
            "--tokens=1",
            argument,
            "-o",
            path.to_str().unwrap(),
        ]);
        assert!(error.contains(message), "{error}");
        assert!(!path.exists());
    }
    let error = fail([
        "synth",
        "--tokens=9000000000000000000",
        "-o",
        path.to_str().unwrap(),
    ]);
    assert!(error.contains("not enough memory"), "{error}");
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        0,
        "nothing is left behind"
    );
}

/// The whole way through a GPU. Says aloud that it skips where there is none;
/// `FUSED_KV_REQUIRE_GPU=1` makes that a failure.
#[cfg(feature = "cuda")]
#[test]
fn golden_files_verify_on_cuda() {
    let json: Value = serde_json::from_str(&succeed(["info", "--json"])).expect("JSON");
    if json["cuda"]["devices"].as_array().is_none_or(Vec::is_empty) {
        let reason = json["cuda"]["unavailable"].as_str().unwrap_or("no device");
        let required = std::env::var_os("FUSED_KV_REQUIRE_GPU").is_some_and(|value| value == "1");
        assert!(!required, "FUSED_KV_REQUIRE_GPU=1, but {reason}");
        eprintln!("skipped: no CUDA device ({reason})");
        // One line and exit code 2, then.
        fail(os(&["run", "--backend=cuda"], &golden("tiny")));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [on_cpu, on_cuda] = ["cpu", "cuda"].map(|name| folder.path().join(name));
    for name in GOLDEN {
        let path = golden(name);
        for (backend, out) in [("--backend=cpu", &on_cpu), ("--backend=cuda", &on_cuda)] {
            let out = out.to_str().unwrap();
            let json = succeed(os(
                &["run", backend, "--verify", "--json", "-o", out],
                &path,
            ));
            let json: Value = serde_json::from_str(&json).expect("JSON");
            assert_eq!(json["verify"]["within_contract"], true, "{name}");
        }
        // Same bits, same file.
        assert!(
            fs::read(&on_cpu).unwrap() == fs::read(&on_cuda).unwrap(),
            "{name}"
        );
    }
    // What only the device can see is one line as well.
    let (_folder, path) = changed("tiny", |file| {
        let positions = file.range("positions");
        file.data[positions].copy_from_slice(&(-1i64).to_le_bytes());
    });
    let error = fail(os(&["run", "--backend=cuda"], &path));
    assert!(error.contains("positions[0] is -1"), "{error}");
}

#[test]
fn info_names_the_backends() {
    let json: Value = serde_json::from_str(&succeed(["info", "--json"])).expect("JSON");
    assert_eq!(json["backends"][0], "cpu");
    assert!(json["cpu"]["threads"].as_u64().unwrap() > 0);
    assert_eq!(json["cuda"]["compiled_in"], cfg!(feature = "cuda"));
    assert!(succeed(["info"]).contains("backends"));
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_backend_that_is_not_there_is_one_line() {
    let error = fail(os(&["run", "--backend=cuda"], &golden("tiny")));
    assert!(error.contains("not compiled in"), "{error}");
}

/// Standard output that nobody reads (`fused-kv ... | head -0`) is no crash.
#[cfg(unix)]
#[test]
fn a_closed_pipe_is_no_crash() {
    use std::process::Stdio;
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(binary())
        .args(os(&["run", "--backend=cpu"], &golden("tiny")))
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
}

/// A file with a pool of this layout and type, and its result by the CPU backend.
fn pool_file(arguments: &[&str]) -> (TempDir, PathBuf) {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("pool.safetensors");
    let mut all = vec![
        "synth",
        "--tokens",
        "7",
        "--layers",
        "2",
        "--heads",
        "2",
        "--head-dim",
        "16",
        "--num-slots",
        "20",
        "--with-output",
    ];
    all.extend(arguments);
    all.push("-o");
    succeed(os(&all, &path));
    (folder, path)
}

/// A file with slots and without a pool.
fn slots_file() -> (TempDir, PathBuf) {
    let (folder, path) = pool_file(&[]);
    let mut file = File::read(&path);
    for tensor in ["k_pool", "v_pool", "k_pool_out", "v_pool_out"] {
        file.remove(tensor);
    }
    file.write(&path);
    (folder, path)
}

const POOLS: [&[&str]; 6] = [
    &[],
    &["--pool-layout", "paged-nhd", "--page-size", "4"],
    &[
        "--pool-layout",
        "hnd",
        "--page-size",
        "8",
        "--dtype",
        "f32",
        "--pool-dtype",
        "f16",
    ],
    &[
        "--pool-dtype",
        "e4m3fn",
        "--k-descale",
        "0.05",
        "--v-descale",
        "0.1,0.2",
    ],
    &[
        "--pool-layout",
        "hnd",
        "--page-size",
        "5",
        "--pool-dtype",
        "e5m2",
        "--k-descale",
        "0.5",
        "--v-descale",
        "2",
        "--value-scale",
        "0.612",
    ],
    &["--reserved-slot", "3", "--pool-dtype", "f32"],
];

#[test]
fn pools_are_written_back_and_verified() {
    for arguments in POOLS {
        let (folder, path) = pool_file(arguments);
        let input = File::read(&path);
        let output = folder.path().join("out.safetensors");
        let text = succeed([
            "run".as_ref(),
            path.as_os_str(),
            "--backend".as_ref(),
            "cpu".as_ref(),
            "--verify".as_ref(),
            "--json".as_ref(),
            "-o".as_ref(),
            output.as_os_str(),
        ]);
        let report: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(report["verify"]["within_contract"], true, "{text}");
        for name in ["k_pool_out", "v_pool_out"] {
            assert_eq!(report["verify"][name]["differing"], 0, "{text}");
        }
        let written = File::read(&output);
        for (result, expected) in [("k_pool", "k_pool_out"), ("v_pool", "v_pool_out")] {
            assert!(
                written.bytes(result) == input.bytes(expected),
                "{arguments:?}"
            );
            // Rows were written, and there are more slots than tokens.
            let before = input.bytes(result);
            assert!(written.bytes(result) != before);
            let untouched = written
                .bytes(result)
                .iter()
                .filter(|byte| **byte == 0x2a)
                .count();
            assert!(untouched > before.len() / 2, "{arguments:?}");
        }
        // The result is a pool that the next step can take.
        for key in ["layout", "page_size", "num_kv_heads"] {
            assert!(written.header["__metadata__"][key].is_string(), "{key}");
        }
    }
}

#[test]
fn a_wrong_pool_is_noticed() {
    for tensor in ["k_pool_out", "v_pool_out"] {
        // A byte of every row of the tensor: written ones and untouched ones.
        for at in [0, 20 * 2 * 16 * 2] {
            let (_folder, path) = pool_file(&[]);
            let mut file = File::read(&path);
            let range = file.range(tensor);
            let data = &mut file.data[range];
            for row in data[at..].chunks_mut(32) {
                row[1] ^= 0x40;
            }
            file.write(&path);
            let output = fused_kv(os(&["run", "--backend", "cpu", "--verify"], &path));
            assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
            assert!(text(&output.stdout).contains("BEYOND THE CONTRACT"));
        }
    }
}

/// Slots without a pool: one is made, of what the flags say.
#[test]
fn a_pool_is_made_where_the_file_has_none() {
    let (folder, path) = slots_file();
    let output = folder.path().join("out.safetensors");
    let run = |flags: &[&str]| {
        let mut arguments = vec!["run", "--backend", "cpu"];
        arguments.extend(flags);
        let mut arguments: Vec<_> = os(&arguments, &path);
        arguments.extend(["-o".as_ref(), output.as_os_str()]);
        arguments
            .iter()
            .map(|part| part.to_os_string())
            .collect::<Vec<_>>()
    };
    succeed(run(&["--num-slots", "24"]));
    let made = File::read(&output);
    assert_eq!(
        made.header["k_pool"]["shape"],
        serde_json::json!([2, 24, 2, 16])
    );
    let fp8 = [
        "--pool-dtype",
        "e4m3fn",
        "--k-descale",
        "1",
        "--v-descale",
        "1",
        "--num-slots",
        "21",
    ];
    succeed(run(&fp8));
    let made = File::read(&output);
    assert_eq!(made.header["v_pool"]["dtype"], "F8_E4M3");
    assert_eq!(
        made.header["v_pool"]["shape"],
        serde_json::json!([2, 21, 2, 16])
    );
    // Exactly what the slots need.
    succeed(run(&[]));

    let refused = |flags: &[&str], expected: &str| {
        let error = fail(run(flags));
        assert!(error.contains(expected), "{error}");
    };
    refused(&["--pool-dtype", "e5m2"], "Missing k_descale");
    refused(
        &[
            "--pool-dtype",
            "e5m2",
            "--k-descale",
            "0",
            "--v-descale",
            "1",
        ],
        "k_descale[0] is 0",
    );
    refused(&["--k-descale", "1"], "Unexpected k_descale");
    refused(&["--page-size", "4"], "contradicts");
    refused(&["--pool-layout", "hnd"], "contradicts");
    refused(&["--num-slots", "3"], "Slot out of range");
    refused(&["--verify"], "k_pool_out or v_pool_out");
}

#[test]
fn pools_that_do_not_fit_are_refused() {
    let refused = |change: &dyn Fn(&mut File), expected: &str| {
        let (_folder, path) = pool_file(&["--pool-layout", "paged-nhd", "--page-size", "4"]);
        let mut file = File::read(&path);
        change(&mut file);
        file.write(&path);
        let error = fail(os(&["run", "--backend", "cpu"], &path));
        assert!(error.contains(expected), "{error}");
    };
    refused(&|file| file.remove("slots"), "tensor slots is missing");
    refused(
        &|file| file.remove("v_pool"),
        "got no v_pool, expected k_pool and v_pool together",
    );
    refused(
        &|file| {
            file.remove("slots");
            file.add("slots", "I64", &[6], &[0; 48]);
        },
        "Invalid slots shape for fused KV materialization: got (6,), expected (7,)",
    );
    refused(
        &|file| {
            file.remove("k_pool");
            file.add(
                "k_pool",
                "BF16",
                &[2, 5, 4, 2, 8],
                &[0; 2 * 5 * 4 * 2 * 8 * 2],
            );
        },
        "Invalid k_pool shape for fused KV materialization: got (2, 5, 4, 2, 8), expected \
         (2, 5, 4, 2, 16)",
    );
    refused(
        &|file| {
            file.remove("k_pool");
            file.add("k_pool", "BF16", &[2, 20, 2, 16], &[0; 2 * 20 * 2 * 16 * 2]);
        },
        "Invalid k_pool rank for fused KV materialization: got 4 dimensions with shape \
         (2, 20, 2, 16), expected 5 dimensions",
    );
    refused(
        &|file| file.add("k_descale", "F32", &[3], &[0; 12]),
        "Invalid k_descale shape for fused KV materialization: got (3,), expected (2,)",
    );
    refused(
        &|file| file.add("k_descale", "F16", &[2], &[0; 4]),
        "Invalid k_descale dtype",
    );
    refused(
        &|file| file.header["__metadata__"]["layout"] = "diagonal".into(),
        "expected nhd, paged-nhd or hnd",
    );
    refused(
        &|file| file.header["__metadata__"]["page_size"] = "16".into(),
        "metadata page_size 16 contradicts page_size=4 in the file's pool",
    );
    refused(
        &|file| {
            let metadata = file.header["__metadata__"]
                .as_object_mut()
                .expect("metadata");
            metadata.remove("layout");
        },
        "metadata layout is missing",
    );
    // Flags of a pool, and a file without slots.
    let error = fail(os(&["run", "--page-size", "4"], &golden("tiny")));
    assert!(error.contains("has no slots"), "{error}");
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("x.safetensors");
    for (flags, expected) in [
        (&["--page-size=4"][..], "--page-size needs --num-slots"),
        (&["--num-slots=2"], "no slot for each of 3 tokens"),
        // What a plan would refuse.
        (
            &["--num-slots=4", "--pool-dtype=e4m3fn"],
            "Missing k_descale",
        ),
        (
            &[
                "--num-slots=4",
                "--pool-dtype=e5m2",
                "--k-descale=-1",
                "--v-descale=1",
            ],
            "k_descale[0] is -1",
        ),
        (
            &[
                "--num-slots=4",
                "--pool-dtype=e5m2",
                "--k-descale=1",
                "--v-descale=1e39",
            ],
            "--v-descale inf, expected finite",
        ),
        (&["--num-slots=4", "--v-descale=1"], "Unexpected v_descale"),
        (
            &["--num-slots=4", "--pool-layout=hnd", "--page-size=0"],
            "the page size is 0, expected at least 1",
        ),
        (
            &["--num-slots=18446744073709551615", "--pool-layout=hnd"],
            "18446744073709551615 slots in pages of 16 are more than 64 bits can count",
        ),
    ] {
        let mut arguments = vec!["synth", "--tokens", "3"];
        arguments.extend(flags);
        arguments.push("-o");
        let error = fail(os(&arguments, &path));
        assert!(error.contains(expected), "{error}");
    }
    assert!(!path.exists());
}

/// Slots in use of a pool that holds more.
#[test]
fn a_pool_of_the_file_may_be_used_in_part() {
    let (_folder, path) = pool_file(&["--pool-dtype", "f32"]);
    let mut file = File::read(&path);
    let slots = [0i64, 5, 11, 3, -1, 7, 2];
    let range = file.range("slots");
    let bytes: Vec<u8> = slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
    file.data[range].copy_from_slice(&bytes);
    file.write(&path);
    let run = |num_slots| {
        let flags = ["run", "--backend", "cpu", "--num-slots", num_slots];
        fused_kv(os(&flags, &path))
    };
    assert_eq!(run("12").status.code(), Some(0));
    let error = refused(&run("11"));
    assert!(
        error.contains("slots[2] is 11, expected slot < 11"),
        "{error}"
    );
    let error = refused(&run("21"));
    assert!(
        error.contains("--num-slots 21 contradicts slots=20 in the file's pool"),
        "{error}"
    );
}

/// A reference that cannot be one.
#[test]
fn references_are_like_the_pool() {
    let (_folder, path) = pool_file(&["--pool-dtype", "f16"]);
    let bytes = 2 * 20 * 2 * 16 * 2;
    for (dtype, shape, found) in [
        ("BF16", [2, 20, 2, 16], "(2, 20, 2, 16) bfloat16"),
        ("F16", [2, 10, 4, 16], "(2, 10, 4, 16) float16"),
    ] {
        for tensor in ["k_pool_out", "v_pool_out"] {
            let mut file = File::read(&path);
            file.remove(tensor);
            file.add(tensor, dtype, &shape, &vec![0; bytes]);
            let changed = path.with_extension("changed");
            file.write(&changed);
            let output = path.with_extension("out");
            let mut arguments = os(&["run", "--backend", "cpu", "--verify"], &changed);
            arguments.extend(["-o".as_ref(), output.as_os_str()]);
            let error = fail(arguments);
            let expected =
                format!("{tensor} is {found}, expected (2, 20, 2, 16) float16, like the result");
            assert!(error.contains(&expected), "{error}");
            assert!(!output.exists());
            succeed(os(&["run", "--backend", "cpu"], &changed));
        }
    }
}

/// V has one rounding, so that a neighbour is a fault; K may be one code away.
#[test]
fn converted_values_are_compared_exactly() {
    for (flags, allowed_for_k) in [
        (&["--pool-dtype", "f16"][..], true),
        (
            &["--pool-dtype=e4m3fn", "--k-descale=0.5", "--v-descale=0.5"],
            true,
        ),
        // All of it saturates, which an infinity is no neighbour of.
        (
            &["--pool-dtype=e5m2", "--k-descale=1e-9", "--v-descale=1e-9"],
            false,
        ),
    ] {
        for (tensor, allowed) in [("k_pool_out", allowed_for_k), ("v_pool_out", false)] {
            let (_folder, path) = pool_file(flags);
            let mut file = File::read(&path);
            let range = file.range(tensor);
            let size = range.len() / (2 * 20 * 2 * 16);
            let mut changed = 0;
            for element in file.data[range].chunks_mut(size) {
                // Rows that were written, without a carry.
                if element.iter().any(|byte| *byte != 0x2a) && element[0] != 0xff {
                    element[0] += 1;
                    changed += 1;
                }
            }
            assert!(changed > 6 * 2 * 2 * 16, "{changed}");
            file.write(&path);
            let output = fused_kv(os(
                &["run", "--backend", "cpu", "--verify", "--json"],
                &path,
            ));
            assert_eq!(
                output.status.code(),
                Some(if allowed { 0 } else { 1 }),
                "{tensor} {flags:?} {}",
                text(&output.stdout)
            );
            let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
            assert_eq!(report["verify"][tensor]["differing"], changed);
            let beyond = report["verify"][tensor]["beyond_contract"].clone();
            assert_eq!(beyond, if allowed { 0 } else { changed });
        }
    }
}

/// Memory that ends while a pool is made is a refusal like any other.
#[cfg(target_os = "linux")]
#[test]
fn memory_for_half_a_pool() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("x.safetensors");
    let (_slots_folder, slots) = slots_file();
    let path = path.to_str().expect("UTF-8");
    let slots = slots.to_str().expect("UTF-8");
    // 768 MiB each for K and V of 1200 MiB.
    for arguments in [
        &[
            "synth",
            "--tokens=1",
            "--layers=2",
            "--heads=2",
            "--head-dim=16",
            "--num-slots=6291456",
            "-o",
            path,
        ][..],
        &["run", "--backend=cpu", "--num-slots=6291456", slots],
    ] {
        let error = refused(&within_mebibytes(1200, arguments));
        assert!(
            error.contains("not enough memory: 805306368 bytes needed"),
            "{error}"
        );
    }
    // 60 MB each for K and V of very many slots, and not much more.
    let arguments = [
        "synth",
        "--tokens=1",
        "--layers=1",
        "--heads=1",
        "--head-dim=2",
        "--pool-dtype=e4m3fn",
        "--k-descale=1",
        "--v-descale=1",
        "--num-slots=30000000",
        "-o",
        path,
    ];
    let output = within_mebibytes(320, &arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

/// Runs the program in an address space of this size.
#[cfg(target_os = "linux")]
fn within_mebibytes(size: usize, arguments: &[&str]) -> Output {
    Command::new("bash")
        .args(["-c", "ulimit -v $0; exec \"$@\""])
        .arg((size << 10).to_string())
        .arg(binary())
        .args(arguments)
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .expect("bash")
}

#[cfg(feature = "cuda")]
#[test]
fn pools_on_cuda() {
    if fused_kv_tests::gpu::Gpu::get().is_none() {
        return;
    }
    for arguments in POOLS {
        let (_folder, path) = pool_file(arguments);
        let report = succeed(os(
            &["run", "--backend", "cuda", "--verify", "--json"],
            &path,
        ));
        let report: Value = serde_json::from_str(&report).expect("JSON");
        for name in ["k_pool_out", "v_pool_out"] {
            assert_eq!(report["verify"][name]["differing"], 0, "{report}");
        }
    }
}
