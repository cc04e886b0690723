//! Where PTX comes from: embedded, one text an architecture tier, or a folder.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;

use super::CudaError;

/// The committed PTX: lowest compute capability (10 * major + minor), text.
const EMBEDDED: [(u32, &str); 3] = [
    (80, include_str!("../../ptx/sm_80.ptx")),
    (89, include_str!("../../ptx/sm_89.ptx")),
    (90, include_str!("../../ptx/sm_90.ptx")),
];

/// Environment variable that names a folder to load PTX from instead: code, and trusted as code is,
/// see [`set_ptx_folder`].
pub const PTX_FOLDER_VARIABLE: &str = "FUSED_KV_PTX_DIR";

/// A set of PTX texts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    Embedded,
    Folder(Arc<Path>),
}

static CHOSEN: Mutex<Option<Source>> = Mutex::new(None);

/// Loads PTX from `folder` (made by `cargo xtask build-ptx`, with its manifest) for plans that are
/// made from now on; `None` goes back to the embedded PTX. Until this is called, the environment
/// variable [`PTX_FOLDER_VARIABLE`] decides.
///
/// # Safety
///
/// The folder holds what `build-ptx` made of kernels of this library, for as long as plans are made:
/// it is code that the device runs with the addresses of their tensors.
///
/// # Errors
///
/// [`CudaError::PtxFolder`] when the folder has no manifest, or PTX for another version of this
/// library.
pub unsafe fn set_ptx_folder(folder: Option<&Path>) -> Result<(), CudaError> {
    let source = match folder {
        Some(folder) => {
            Manifest::read(folder)?;
            Source::Folder(folder.into())
        }
        None => Source::Embedded,
    };
    *CHOSEN.lock().unwrap_or_else(PoisonError::into_inner) = Some(source);
    Ok(())
}

/// What a manifest must say for its PTX to be loaded.
#[derive(Debug, Deserialize)]
struct Manifest {
    abi_version: u32,
    params_size: usize,
    tiers: Vec<Tier>,
}

#[derive(Debug, Deserialize)]
struct Tier {
    file: PathBuf,
    target: String,
}

impl Manifest {
    fn read(folder: &Path) -> Result<Self, CudaError> {
        let invalid = |reason: String| CudaError::PtxFolder {
            path: folder.display().to_string(),
            reason,
        };
        let text = std::fs::read_to_string(folder.join("manifest.json"))
            .map_err(|error| invalid(format!("manifest.json: {error}")))?;
        let manifest: Self = serde_json::from_str(&text)
            .map_err(|error| invalid(format!("manifest.json: {error}")))?;
        let found = (manifest.abi_version, manifest.params_size);
        let expected = (
            fused_kv_kernels::abi::ABI_VERSION,
            size_of::<fused_kv_kernels::abi::Params>(),
        );
        if found != expected {
            return Err(invalid(format!(
                "its kernels take parameters of version {} with {} bytes, expected version {} \
                 with {} bytes",
                found.0, found.1, expected.0, expected.1
            )));
        }
        Ok(manifest)
    }
}

/// `sm_90`, `compute_90` and their `a` and `f` variants as 90.
fn capability_of(target: &str) -> Option<u32> {
    let number = target.rsplit('_').next()?;
    number
        .trim_end_matches(|c: char| c.is_ascii_lowercase())
        .parse()
        .ok()
}

impl Source {
    /// The set in effect.
    pub(crate) fn current() -> Result<Self, CudaError> {
        let mut chosen = CHOSEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(source) = &*chosen {
            return Ok(source.clone());
        }
        let source = match std::env::var_os(PTX_FOLDER_VARIABLE) {
            Some(folder) => {
                Manifest::read(Path::new(&folder))?;
                Self::Folder(Path::new(&folder).into())
            }
            None => Self::Embedded,
        };
        *chosen = Some(source.clone());
        Ok(source)
    }

    /// The compute capabilities of the tiers, lowest first.
    pub(crate) fn tiers(&self) -> Result<Vec<u32>, CudaError> {
        let mut tiers: Vec<u32> = match self {
            Self::Embedded => EMBEDDED.iter().map(|(tier, _)| *tier).collect(),
            Self::Folder(folder) => {
                let manifest = Manifest::read(folder)?;
                manifest
                    .tiers
                    .iter()
                    .filter_map(|tier| capability_of(&tier.target))
                    .collect()
            }
        };
        tiers.sort_unstable();
        Ok(tiers)
    }

    /// PTX with the kernel `entry` alone, of the highest tier that the device has.
    ///
    /// One kernel a module: the driver compiles what is used, not what might be.
    pub(super) fn entry(
        &self,
        capability: u32,
        ordinal: u32,
        entry: &str,
    ) -> Result<CString, CudaError> {
        let tiers = self.tiers()?;
        let Some(tier) = tiers.iter().rfind(|tier| **tier <= capability) else {
            return Err(CudaError::UnsupportedDevice {
                ordinal,
                found: capability,
                lowest: tiers.first().copied().unwrap_or(0),
            });
        };
        let invalid = |reason: String| CudaError::PtxFolder {
            path: match self {
                Self::Embedded => "(embedded)".into(),
                Self::Folder(folder) => folder.display().to_string(),
            },
            reason,
        };
        let text = match self {
            Self::Embedded => EMBEDDED
                .iter()
                .find(|(embedded, _)| embedded == tier)
                .map_or(String::new(), |(_, text)| (*text).into()),
            Self::Folder(folder) => {
                let manifest = Manifest::read(folder)?;
                let file = manifest
                    .tiers
                    .into_iter()
                    .find(|found| capability_of(&found.target) == Some(*tier))
                    .map(|found| folder.join(found.file))
                    .unwrap_or_default();
                std::fs::read_to_string(&file)
                    .map_err(|error| invalid(format!("{}: {error}", file.display())))?
            }
        };
        let alone = only_entry(&text, entry)
            .ok_or_else(|| invalid(format!("no kernel {entry} for sm_{tier}")))?;
        CString::new(alone).map_err(|_| invalid("a zero byte in the PTX".into()))
    }
}

/// `ptx` without the kernels other than `entry`; `None` where there is no such kernel.
fn only_entry(ptx: &str, entry: &str) -> Option<String> {
    let mut kept = String::with_capacity(ptx.len() / 4);
    let (mut found, mut skipping, mut depth) = (false, false, 0u32);
    for line in ptx.lines() {
        if depth == 0
            && let Some(rest) = line.trim_start().strip_prefix(".visible .entry ")
        {
            let name = rest
                .split(|c: char| !c.is_ascii_alphanumeric() && !"_$".contains(c))
                .next();
            skipping = name != Some(entry);
            found |= !skipping;
        }
        if !skipping {
            kept.push_str(line);
            kept.push('\n');
        }
        let before = depth;
        for byte in line.split("//").next().unwrap_or_default().bytes() {
            match byte {
                b'{' => depth += 1,
                b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
        // The brace that closes the body.
        skipping &= !(before > 0 && depth == 0);
    }
    found.then_some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_name_a_capability() {
        for (target, expected) in [
            ("sm_80", Some(80)),
            ("sm_90a", Some(90)),
            ("compute_100", Some(100)),
            ("x", None),
        ] {
            assert_eq!(capability_of(target), expected, "{target}");
        }
    }

    #[test]
    fn one_kernel_is_cut_out_with_what_all_share() {
        let ptx = ".version 7.8\n.target sm_80\n.global .b8 table[4];\n\
                   .visible .entry first(\n\t.param .b64 p\n)\n{\n\t{\n.reg .pred %p;\n}\n\tret;\n}\n\
                   \t// .globl second\n.visible .entry second(\n)\n{\n\tst.v2 [a], {%r1, %r2};\n}\n\
                   .visible .entry second_too(\n)\n{\n}\n";
        let second = only_entry(ptx, "second").unwrap();
        assert!(second.contains(".version 7.8") && second.contains("table[4]"));
        assert!(second.contains("entry second(") && second.contains("%r1"));
        assert!(!second.contains("first(") && !second.contains("second_too"));
        assert_eq!(only_entry(ptx, "third"), None);
    }

    #[test]
    fn every_embedded_tier_has_every_kernel() {
        macro_rules! names {
            ($($name:ident => $body:expr;)*) => { [$(stringify!($name)),*] };
        }
        for (tier, text) in EMBEDDED {
            for name in fused_kv_kernels::kernels::for_each_entry!(names) {
                assert!(only_entry(text, name).is_some(), "sm_{tier}: {name}");
            }
        }
    }
}
