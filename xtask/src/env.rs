//! What the look-ups ask of the machine, so that tests can answer in its place.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A machine to look at.
pub trait Env {
    /// An environment variable, where it is set and not empty.
    fn var(&self, name: &str) -> Option<String>;
    /// Whether this is a file, links followed.
    fn is_file(&self, path: &Path) -> bool;
    /// Names of what lies in a folder, sorted; empty where there is none.
    fn list(&self, folder: &Path) -> Vec<String>;
    /// Text of a file.
    fn read(&self, path: &Path) -> Option<String>;
    /// Standard output of a program that ended well. `toolchain` is a rustup toolchain for it.
    fn output(&self, program: &str, arguments: &[&str], toolchain: Option<&str>) -> Option<String>;

    /// A program in the folders of PATH.
    fn on_path(&self, program: &str) -> Option<PathBuf> {
        let path = self.var("PATH")?;
        std::env::split_paths(&path)
            .map(|folder| folder.join(program))
            .find(|candidate| self.is_file(candidate))
    }
}

/// This machine.
#[derive(Debug)]
pub struct Machine<'a> {
    /// For programs' environment.
    pub project: &'a crate::project::Project,
}

impl Env for Machine<'_> {
    fn var(&self, name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    fn is_file(&self, path: &Path) -> bool {
        path.is_file()
    }

    fn list(&self, folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    fn read(&self, path: &Path) -> Option<String> {
        std::fs::read_to_string(path).ok()
    }

    fn output(&self, program: &str, arguments: &[&str], toolchain: Option<&str>) -> Option<String> {
        let mut command = match toolchain {
            Some(_) => self.project.in_toolchain(program, toolchain),
            None => Command::new(program),
        };
        let output = command
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .ok()?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(text)
    }
}

#[cfg(test)]
pub mod fake {
    //! A machine that is made up.

    use std::collections::BTreeMap;

    use super::*;

    /// Answers with what it was given, and "not there" to everything else.
    #[derive(Clone, Debug, Default)]
    pub struct Fake {
        pub vars: BTreeMap<String, String>,
        pub files: BTreeMap<PathBuf, String>,
        /// Keyed by the command line, with `+toolchain` behind the program where one is asked for.
        pub outputs: BTreeMap<String, String>,
    }

    impl Fake {
        pub fn var(mut self, name: &str, value: &str) -> Self {
            self.vars.insert(name.into(), value.into());
            self
        }

        pub fn file(mut self, path: &str, text: &str) -> Self {
            self.files.insert(path.into(), text.into());
            self
        }

        pub fn output(mut self, command: &str, text: &str) -> Self {
            self.outputs.insert(command.into(), text.into());
            self
        }
    }

    impl Env for Fake {
        fn var(&self, name: &str) -> Option<String> {
            self.vars.get(name).cloned()
        }

        fn is_file(&self, path: &Path) -> bool {
            self.files.contains_key(path)
        }

        fn list(&self, folder: &Path) -> Vec<String> {
            let names: std::collections::BTreeSet<_> = self
                .files
                .keys()
                .filter_map(|path| path.strip_prefix(folder).ok()?.iter().next())
                .map(|name| name.to_string_lossy().into_owned())
                .collect();
            names.into_iter().collect()
        }

        fn read(&self, path: &Path) -> Option<String> {
            self.files.get(path).cloned()
        }

        fn output(
            &self,
            program: &str,
            arguments: &[&str],
            toolchain: Option<&str>,
        ) -> Option<String> {
            let toolchain = toolchain.map(|name| format!("+{name}"));
            let words: Vec<_> = [program]
                .into_iter()
                .chain(toolchain.as_deref())
                .chain(arguments.iter().copied())
                .collect();
            self.outputs.get(&words.join(" ")).cloned()
        }
    }
}
