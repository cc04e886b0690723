//! Where things are, and how other programs are started.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The checkout and its target directory.
#[derive(Debug)]
pub struct Project {
    /// The workspace root.
    pub root: PathBuf,
    /// The target directory of this run.
    pub target: PathBuf,
}

impl Project {
    /// The checkout that this program was built from.
    pub fn locate() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .expect("xtask lies in the workspace root")
            .to_owned();
        let target = match env::var_os("CARGO_TARGET_DIR") {
            Some(path) => env::current_dir().unwrap_or_default().join(path),
            None => root.join("target"),
        };
        Self { root, target }
    }

    /// A path as a person types it: relative to the workspace root where that is possible.
    pub fn show<'a>(&self, path: &'a Path) -> std::path::Display<'a> {
        path.strip_prefix(&self.root).unwrap_or(path).display()
    }

    /// The host toolchain's version, from `rust-toolchain.toml`.
    pub fn toolchain(&self) -> Result<String> {
        let path = self.root.join("rust-toolchain.toml");
        let text = read(&path)?;
        let file: toml::Table = text.parse().with_context(|| path.display().to_string())?;
        file.get("toolchain")
            .and_then(|toolchain| toolchain.get("channel"))
            .and_then(|channel| channel.as_str())
            .map(str::to_owned)
            .with_context(|| format!("{} names no toolchain.channel", path.display()))
    }

    /// The cargo that runs this task, in the workspace root, with this run's target directory.
    pub fn cargo(&self) -> Command {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command
            .current_dir(&self.root)
            .env("CARGO_TARGET_DIR", &self.target);
        command
    }

    /// `program` of the rustup toolchain `toolchain`, with nothing of the toolchain and the cargo
    /// that run this task left in its environment.
    pub fn in_toolchain(&self, program: &str, toolchain: Option<&str>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        for name in leaking(env::vars_os().map(|(name, _)| name)) {
            command.env_remove(name);
        }
        if let Some(toolchain) = toolchain {
            command.env("RUSTUP_TOOLCHAIN", toolchain);
        }
        command
    }
}

/// The variables through which one toolchain's cargo would change what another builds: all of
/// `CARGO*` and `RUST*` but those that say where crates come from.
fn leaking(names: impl Iterator<Item = OsString>) -> Vec<OsString> {
    const KEPT: [&str; 10] = [
        "CARGO_HOME",
        "CARGO_NET_",
        "CARGO_HTTP_",
        "CARGO_REGISTR",
        "CARGO_SOURCE_",
        "CARGO_TERM_",
        "CARGO_BUILD_JOBS",
        "RUSTUP_HOME",
        "RUSTUP_AUTO_INSTALL",
        "RUST_BACKTRACE",
    ];
    names
        .filter(|name| {
            let Some(name) = name.to_str() else {
                return false;
            };
            (name.starts_with("CARGO") || name.starts_with("RUST"))
                && !KEPT.iter().any(|kept| name.starts_with(kept))
        })
        .collect()
}

/// The text of a file.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes a file and the folders above it.
pub fn write(path: &Path, contents: impl AsRef<[u8]>) -> Result<()> {
    if let Some(parent) = path.parent() {
        create_dir(parent)?;
    }
    std::fs::write(path, contents).with_context(|| format!("cannot write {}", path.display()))
}

/// Makes a folder and those above it.
pub fn create_dir(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))
}

/// Removes a folder with all that is in it, if it is there.
pub fn remove_dir(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// A command as it would be typed.
pub fn show_command(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Runs a command and fails when it does.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = show_command(command);
    let status = command
        .status()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Runs a command, showing what it prints only when it fails.
pub fn run_quietly(command: &mut Command) -> Result<()> {
    let shown = show_command(command);
    let output = command
        .output()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        eprint!("{}", String::from_utf8_lossy(&output.stdout));
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        bail!("`{shown}` failed ({})", output.status);
    }
    Ok(())
}

/// Runs a command and returns its standard output; its standard error goes to the terminal.
pub fn output(command: &mut Command) -> Result<String> {
    let shown = show_command(command);
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` failed ({})", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::leaking;

    #[test]
    fn the_toolchain_in_use_does_not_leak() {
        let names = [
            "RUSTUP_TOOLCHAIN",
            "RUSTC",
            "RUSTC_WRAPPER",
            "RUSTFLAGS",
            "CARGO",
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_TARGET_DIR",
            "CARGO_MANIFEST_DIR",
            "CARGO_HOME",
            "CARGO_NET_GIT_FETCH_WITH_CLI",
            "RUSTUP_HOME",
            "PATH",
            "CUDA_PATH",
        ];
        let left = leaking(names.iter().map(|&name| name.into()));
        assert_eq!(left, names[..8]);
    }
}
