//! Geometry and conventions: from the file's metadata, from flags, never from a guess.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;

use clap::Args;
use fused_kv::{Config, NormWeight};

use super::{CliError, Style};
use crate::io::{FileFault, InputFile};

/// Geometry flags of `run`: they fill in what the metadata lacks and must not contradict it.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Geometry (what the file's metadata does not say)")]
pub(crate) struct Flags {
    /// KV heads a layer [metadata: num_kv_heads]
    #[arg(long, visible_alias = "num-kv-heads", value_name = "H")]
    pub(crate) heads: Option<usize>,
    /// Elements of a head [metadata: head_dim]
    #[arg(long, value_name = "D")]
    pub(crate) head_dim: Option<usize>,
    /// Rotated elements of a head [metadata: rotary_dim]
    #[arg(long, value_name = "R")]
    pub(crate) rotary_dim: Option<usize>,
    /// Which elements are rotated together [metadata: rope_style]
    #[arg(long, visible_alias = "rope-style", value_enum)]
    pub(crate) style: Option<Style>,
    /// The effective norm weight is 1 + w [metadata: norm_weight=offset]
    #[arg(long)]
    pub(crate) offset_weights: bool,
}

impl Flags {
    /// The configuration of the job in `file`.
    pub(crate) fn resolve(&self, path: &Path, file: &InputFile) -> Result<Config, CliError> {
        let number = |key, flag, given| resolve(path, key, flag, parse_number(file, key)?, given);
        let style = match file.metadata("rope_style") {
            None => None,
            Some("neox") => Some(Style::Neox),
            Some("interleaved") => Some(Style::Interleaved),
            Some(other) => return Err(unknown(file, "rope_style", other, "neox or interleaved")),
        };
        let norm_weight = match (file.metadata("norm_weight"), self.offset_weights) {
            (None | Some("plain"), false) => NormWeight::Plain,
            (None | Some("offset"), true) | (Some("offset"), false) => NormWeight::Offset,
            (Some("plain"), true) => {
                return Err(CliError::Contradiction {
                    path: path.to_owned(),
                    key: "norm_weight",
                    found: "plain".to_owned(),
                    place: "metadata",
                    flag: "--offset-weights",
                    given: "(effective weight 1 + w)".to_owned(),
                });
            }
            (Some(other), _) => return Err(unknown(file, "norm_weight", other, "plain or offset")),
        };
        Ok(Config {
            num_kv_heads: number("num_kv_heads", "--heads", self.heads)?,
            head_dim: number("head_dim", "--head-dim", self.head_dim)?,
            rotary_dim: number("rotary_dim", "--rotary-dim", self.rotary_dim)?,
            rope_style: resolve(
                path,
                "rope_style",
                "--style",
                style.map(Named),
                self.style.map(Named),
            )?
            .0
            .into(),
            norm_weight,
        })
    }
}

/// A style that shows as its name.
#[derive(PartialEq)]
struct Named(Style);

impl Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.name())
    }
}

pub(super) fn unknown(
    file: &InputFile,
    key: &'static str,
    found: &str,
    expected: &'static str,
) -> CliError {
    let found = found.to_owned();
    file.error(FileFault::Metadata {
        key,
        found,
        expected,
    })
    .into()
}

pub(super) fn parse_number(file: &InputFile, key: &'static str) -> Result<Option<usize>, CliError> {
    file.metadata(key)
        .map(|text| {
            text.trim()
                .parse()
                .map_err(|_| unknown(file, key, text, "a whole number"))
        })
        .transpose()
}

pub(super) fn resolve<T: PartialEq + Display>(
    path: &Path,
    key: &'static str,
    flag: &'static str,
    found: Option<T>,
    given: Option<T>,
) -> Result<T, CliError> {
    match (found, given) {
        (Some(found), Some(given)) if found != given => Err(CliError::Contradiction {
            path: path.to_owned(),
            key,
            found: found.to_string(),
            place: "metadata",
            flag,
            given: given.to_string(),
        }),
        (Some(value), _) | (None, Some(value)) => Ok(value),
        (None, None) => Err(CliError::MissingGeometry {
            path: path.to_owned(),
            key,
            flag,
        }),
    }
}

/// The metadata that describes `config`.
pub(crate) fn metadata(config: &Config) -> BTreeMap<String, String> {
    let style = match config.rope_style {
        fused_kv::RopeStyle::Neox => Style::Neox,
        fused_kv::RopeStyle::Interleaved => Style::Interleaved,
    };
    let norm_weight = match config.norm_weight {
        NormWeight::Plain => "plain",
        NormWeight::Offset => "offset",
    };
    [
        ("num_kv_heads", config.num_kv_heads.to_string()),
        ("head_dim", config.head_dim.to_string()),
        ("rotary_dim", config.rotary_dim.to_string()),
        ("rope_style", style.name().to_owned()),
        ("norm_weight", norm_weight.to_owned()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}
