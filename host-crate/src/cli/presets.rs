//! Geometries of real drafters, each from its published configuration.

use clap::ValueEnum;

/// A drafter whose configuration was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preset {
    /// DFlash drafter for Qwen3-8B: 5 layers, 8 KV heads, head_dim 128
    #[value(name = "qwen3-8b-dflash")]
    Qwen3_8b,
    /// DFlash drafter for Qwen3-4B: 5 layers, 8 KV heads, head_dim 128
    #[value(name = "qwen3-4b-dflash")]
    Qwen3_4b,
    /// DFlash drafter for Qwen3.5-27B: 5 layers, 4 KV heads, head_dim 256
    #[value(name = "qwen3.5-27b-dflash")]
    Qwen35_27b,
    /// DFlash drafter for Qwen3.5-35B-A3B: 5 layers, 2 KV heads, head_dim 256
    #[value(name = "qwen3.5-35b-a3b-dflash")]
    Qwen35_35bA3b,
    /// DFlash drafter for LFM2.5-1.2B-Instruct: 8 layers, 8 KV heads, head_dim 64
    #[value(name = "lfm2.5-1.2b-instruct-dflash")]
    Lfm25,
}

/// Where the configurations were published.
pub(crate) const SOURCE: &str = "Presets follow configs/<preset>.json of \
    https://github.com/sgl-project/SpecForge: num_hidden_layers, num_key_value_heads, head_dim, \
    rms_norm_eps, rope_theta. They name no partial rotary factor, so rotary_dim is head_dim; \
    the model type is qwen3, so the style is neox.";

/// What a preset sets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    /// `num_hidden_layers`
    pub(crate) layers: usize,
    /// `num_key_value_heads`
    pub(crate) heads: usize,
    /// `head_dim`; all of it is rotated, in pairs `(i, i + head_dim/2)`
    pub(crate) head_dim: usize,
    /// `rms_norm_eps`
    pub(crate) eps: f32,
    /// `rope_theta`
    pub(crate) rope_theta: f64,
}

impl Preset {
    /// The published numbers. The commit in each address is the one that was read.
    pub(crate) const fn geometry(self) -> Geometry {
        let (layers, heads, head_dim, eps, rope_theta) = match self {
            // SpecForge b3d2401f34546e1a38dddc1c491af7724276b3cf configs/qwen3-8b-dflash.json
            Self::Qwen3_8b => (5, 8, 128, 1e-6, 1e6),
            // SpecForge 9d63ee8e10973a8145e1276343787c341e7caa5e configs/qwen3-4b-dflash.json
            Self::Qwen3_4b => (5, 8, 128, 1e-6, 1e6),
            // SpecForge 95d22a7cc548d9da4333702e95e5754a11618f77 configs/qwen3.5-27b-dflash.json
            Self::Qwen35_27b => (5, 4, 256, 1e-6, 1e7),
            // SpecForge 3bba1e123a3ddf644b18773e494dceaa95c0fc09
            // configs/qwen3.5-35b-a3b-dflash.json
            Self::Qwen35_35bA3b => (5, 2, 256, 1e-6, 1e7),
            // SpecForge 04b94fc4040ec91348ffa9a5542cf2c123bd34ac
            // configs/lfm2.5-1.2b-instruct-dflash.json
            Self::Lfm25 => (8, 8, 64, 1e-5, 1e6),
        };
        Geometry {
            layers,
            heads,
            head_dim,
            eps,
            rope_theta,
        }
    }
}
