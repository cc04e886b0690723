//! The architecture tiers: one PTX file each.

use anyhow::{Result, bail};

/// One PTX file's target.
#[derive(Debug, PartialEq, Eq)]
pub struct Tier {
    /// PTX target and name of the file.
    pub name: &'static str,
    /// Compute capability, major times ten plus minor.
    pub capability: u32,
    /// PTX version times ten: the oldest that has the instructions of the tier, so that the oldest
    /// drivers read it.
    pub ptx_version: u32,
    /// Conversion to FP8 in hardware (`cfg(fused_kv_fp8)`).
    pub fp8: bool,
    /// Kernels may start before the one in front of them has ended (`cfg(fused_kv_overlap)`).
    pub overlap: bool,
}

/// All tiers, lowest first.
///
/// PTX 7.8 is CUDA 11.8 (driver 520), 8.1 is CUDA 12.1 (driver 530). `L1::no_allocate` asks for 7.4
/// and sm_90 with `griddepcontrol` for 7.8; `cvt.rn.satfinite.e4m3x2.f32` for 7.8 on sm_90, but
/// for 8.1 on sm_89.
pub const TIERS: [Tier; 3] = [
    Tier {
        name: "sm_80",
        capability: 80,
        ptx_version: 78,
        fp8: false,
        overlap: false,
    },
    Tier {
        name: "sm_89",
        capability: 89,
        ptx_version: 81,
        fp8: true,
        overlap: false,
    },
    Tier {
        name: "sm_90",
        capability: 90,
        ptx_version: 78,
        fp8: true,
        overlap: true,
    },
];

/// The tiers of these names, or all where none is named.
pub fn select(names: &[String]) -> Result<Vec<&'static Tier>> {
    if let Some(unknown) = names
        .iter()
        .find(|name| TIERS.iter().all(|tier| tier.name != **name))
    {
        let known: Vec<_> = TIERS.iter().map(|tier| tier.name).collect();
        bail!("no tier `{unknown}`; the tiers are {}", known.join(", "));
    }
    Ok(TIERS
        .iter()
        .filter(|tier| names.is_empty() || names.iter().any(|name| tier.name == name))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_selected_by_name() {
        assert_eq!(select(&[]).unwrap().len(), TIERS.len());
        assert_eq!(select(&["sm_90".into()]).unwrap(), [&TIERS[2]]);
        let error = select(&["sm_70".into()]).unwrap_err().to_string();
        assert_eq!(error, "no tier `sm_70`; the tiers are sm_80, sm_89, sm_90");
    }
}
