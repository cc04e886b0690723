//! Architecture tiers, by the names that the PTX files bear.

use std::{fmt, str::FromStr};

use cuda_builder::NvvmArch;

/// A tier: a GPU architecture that a PTX file is made for, written `sm_80`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tier(NvvmArch);

impl Tier {
    /// The architecture as cuda_builder knows it.
    pub fn arch(self) -> NvvmArch {
        self.0
    }
}

impl FromStr for Tier {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        name.strip_prefix("sm_")
            .and_then(|number| format!("compute_{number}").parse::<NvvmArch>().ok())
            .filter(|arch| arch.capability_value() >= 80)
            .map(Self)
            .ok_or_else(|| {
                format!(
                    "no tier {name:?}: expected sm_ and a compute capability of 8.0 or above that \
                     this revision of rust-cuda knows, such as sm_80 or sm_90"
                )
            })
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let feature = self.0.target_feature();
        write!(
            f,
            "sm_{}",
            feature.strip_prefix("compute_").unwrap_or(feature)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        for name in ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"] {
            assert_eq!(name.parse::<Tier>().unwrap().to_string(), name);
        }
        assert_eq!("sm_90".parse::<Tier>().unwrap().arch(), NvvmArch::Compute90);
    }

    #[test]
    fn other_names_are_refused() {
        for name in [
            "",
            "sm_",
            "80",
            "compute_80",
            "sm_75",
            "sm_99",
            "SM_80",
            "sm_80 ",
        ] {
            assert!(name.parse::<Tier>().is_err(), "{name:?} was taken");
        }
    }
}
