//! The device crate as rust-cuda's builder wants it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::Error;

/// The line of the device crate's Cargo.toml that is replaced.
const LIBRARY: &str = "path = \"src/lib.rs\"";

/// Makes a package with the sources of `device_crate`, in `folder`, whose library is a `cdylib`
/// too: rust-cuda's code generator writes PTX when it links one. Returns `folder`.
///
/// # Errors
///
/// When a file cannot be read or written, or the Cargo.toml has not the line that is replaced.
pub fn stage(device_crate: &Path, folder: &Path) -> Result<PathBuf, Error> {
    fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
    let from = device_crate.join("Cargo.toml");
    let text = fs::read_to_string(&from).map_err(Error::file("read", &from))?;
    let Some(text) = with_cdylib(&text, &device_crate.join("src/lib.rs")) else {
        return Err(Error::Manifest {
            path: from,
            line: LIBRARY,
        });
    };
    let to = folder.join("Cargo.toml");
    // An unchanged file keeps its time, or cargo would compile everything again.
    if !fs::read_to_string(&to).is_ok_and(|old| old == text) {
        fs::write(&to, text).map_err(Error::file("write", &to))?;
    }
    for name in ["Cargo.lock", "rust-toolchain.toml"] {
        let to = folder.join(name);
        fs::copy(device_crate.join(name), &to).map_err(Error::file("write", &to))?;
    }
    Ok(folder.to_owned())
}

/// `manifest` for another folder, as a workspace of its own; `None` without the line.
fn with_cdylib(manifest: &str, library: &Path) -> Option<String> {
    let (before, after) = manifest.split_once(LIBRARY)?;
    Some(format!(
        "{before}path = {:?}\ncrate-type = [\"cdylib\", \"rlib\"]{after}\n[workspace]\n",
        library.display().to_string()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_crate_can_be_staged() {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let device_crate = package.parent().expect("the device crate");
        let manifest = fs::read_to_string(device_crate.join("Cargo.toml")).expect("its manifest");
        let staged = with_cdylib(&manifest, &device_crate.join("src/lib.rs")).expect("the line");
        let lines: Vec<_> = staged.lines().collect();
        let library = lines
            .iter()
            .position(|line| *line == "[lib]")
            .expect("[lib]");
        let rest = &lines[library..];
        let found = rest.iter().position(|line| line.starts_with("path = \"/"));
        let path = found.expect("an absolute path");
        assert_eq!(rest[path + 1], "crate-type = [\"cdylib\", \"rlib\"]");
        assert_eq!(lines.last(), Some(&"[workspace]"));
    }

    #[test]
    fn another_manifest_is_refused() {
        assert_eq!(with_cdylib("[lib]\n", Path::new("/src/lib.rs")), None);
    }
}
