//! The golden files: inputs and outputs of sglang's own Triton kernel.

use std::collections::HashMap;
use std::path::PathBuf;

use fused_kv::{Config, DType, NormWeight, RopeStyle};
use safetensors::{Dtype, SafeTensors};

use crate::case::Case;
use crate::tensor::{Layout, Tensor};

/// Names of all golden files.
pub const NAMES: &[&str] = &[
    "half_precision",
    "mixed_cache",
    "odd_head_dim",
    "partial_rotary",
    "single_precision",
    "square",
    "tiny",
    "zeros_and_large",
];

/// A golden file: a case and what Triton made of it.
pub struct Golden {
    /// The inputs, with outputs to be filled.
    pub case: Case,
    /// `k_out` of the file.
    pub k: Tensor,
    /// `v_out` of the file.
    pub v: Tensor,
}

/// Folder of the test data: `FUSED_KV_TEST_DATA`, else that of this package's source.
pub fn data_dir() -> PathBuf {
    std::env::var_os("FUSED_KV_TEST_DATA").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data"),
        PathBuf::from,
    )
}

/// The bytes of a golden file.
pub fn read(name: &str) -> Vec<u8> {
    let path = data_dir()
        .join("golden")
        .join(format!("{name}.safetensors"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The library's type of a tensor of a file.
pub fn dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::BF16 => DType::Bf16,
        Dtype::F16 => DType::F16,
        Dtype::F32 => DType::F32,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        other => panic!("golden files hold no {other:?}"),
    }
}

/// Geometry from a file's metadata.
pub fn config(bytes: &[u8]) -> Config {
    let (_, metadata) = SafeTensors::read_metadata(bytes).expect("a header");
    let metadata: &HashMap<String, String> = metadata.metadata().as_ref().expect("metadata");
    let number = |key: &str| metadata[key].parse().expect("a number");
    Config {
        num_kv_heads: number("num_kv_heads"),
        head_dim: number("head_dim"),
        rotary_dim: number("rotary_dim"),
        rope_style: match metadata["rope_style"].as_str() {
            "neox" => RopeStyle::Neox,
            "interleaved" => RopeStyle::Interleaved,
            other => panic!("rope_style {other}"),
        },
        norm_weight: NormWeight::Plain,
    }
}

/// Loads a golden file.
pub fn load(name: &str) -> Golden {
    let bytes = read(name);
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let tensor = |key: &str| {
        let view = file.tensor(key).expect(key);
        Tensor::input(
            dtype(view.dtype()),
            view.shape(),
            &Layout::default(),
            view.data(),
        )
    };
    let k = tensor("k_out");
    let output = || Tensor::output(k.dtype, &k.shape, &Layout::default());
    Golden {
        case: Case {
            name: name.to_owned(),
            config: config(&bytes),
            kv: tensor("kv"),
            k_norm_weight: tensor("k_norm_weight"),
            eps: tensor("eps"),
            cos_sin_cache: tensor("cos_sin_cache"),
            positions: tensor("positions"),
            value_scale: None,
            k_out: Some(output()),
            v_out: Some(output()),
        },
        v: tensor("v_out"),
        k,
    }
}
