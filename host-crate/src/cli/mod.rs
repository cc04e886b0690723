//! Command line.

mod geometry;
mod info;
mod pool;
mod presets;
mod progress;
mod report;
mod run;
mod synth;
mod verify;

#[cfg(feature = "cuda")]
mod cuda;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use fused_kv::RopeStyle;
use thiserror::Error as ThisError;

use crate::io::{FileError, TooMuchMemory};

/// Bad input, a path that cannot be written, or a backend that is not there.
const BAD_INPUT: u8 = 2;
/// The result is beyond what the contract allows.
const BEYOND_CONTRACT: u8 = 1;

/// Fused KV materialization: RMSNorm and RoPE on K, a copy of V, for all layers of a block
/// drafter in one pass.
#[derive(Debug, Parser)]
#[command(name = "fused-kv", version)]
#[command(
    after_help = "Exit codes: 0 success; 1 --verify found a result beyond the contract; \
                        2 bad input, a path that cannot be written, or a missing backend."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a job from a safetensors file
    Run(Box<run::Options>),
    /// Make an input file of any geometry
    Synth(Box<synth::Options>),
    /// Show backends, devices and compiled kernels
    Info(info::Options),
}

/// `--style` and the metadata key `rope_style`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Style {
    /// Pairs (i, i + rotary_dim/2), as in Llama and Qwen
    Neox,
    /// Pairs (2i, 2i + 1), as in GPT-J
    Interleaved,
}

impl Style {
    fn name(self) -> &'static str {
        match self {
            Self::Neox => "neox",
            Self::Interleaved => "interleaved",
        }
    }
}

impl From<Style> for RopeStyle {
    fn from(style: Style) -> Self {
        match style {
            Style::Neox => Self::Neox,
            Style::Interleaved => Self::Interleaved,
        }
    }
}

/// Why the program stops with exit code 2.
#[derive(Debug, ThisError)]
enum CliError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{}: {source}", path.display())]
    Job {
        path: PathBuf,
        source: fused_kv::Error,
    },
    #[error("{}: tensor {tensor}: {source}", path.display())]
    Tensor {
        path: PathBuf,
        tensor: &'static str,
        source: fused_kv::Error,
    },
    #[error(
        "{}: metadata {key} is missing; give it in the file or as {flag}", path.display()
    )]
    MissingGeometry {
        path: PathBuf,
        key: &'static str,
        flag: &'static str,
    },
    #[error(
        "{}: {flag} {given} contradicts {key}={found} in the file's {place}", path.display()
    )]
    Contradiction {
        path: PathBuf,
        key: &'static str,
        found: String,
        place: &'static str,
        flag: &'static str,
        given: String,
    },
    #[error(
        "{}: {tensor} is {found}, expected {expected}, like the result that it is compared with",
        path.display()
    )]
    Reference {
        path: PathBuf,
        tensor: &'static str,
        found: String,
        expected: String,
    },
    #[error(
        "{}: --verify needs {} or {} in the file, it has neither",
        path.display(), names[0], names[1]
    )]
    NothingToVerify {
        path: PathBuf,
        names: [&'static str; 2],
    },
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Memory(#[from] TooMuchMemory),
    #[error(transparent)]
    Library(#[from] fused_kv::Error),
    #[error("cannot write to standard output: {0}")]
    Stdout(std::io::Error),
}

pub(crate) fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Run(options) => run::run(&options),
        Command::Synth(options) => synth::run(&options),
        Command::Info(options) => info::run(&options),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            // A closed standard error must not turn bad input into a panic.
            let _ = writeln!(std::io::stderr(), "error: {}", one_line(&error.to_string()));
            ExitCode::from(BAD_INPUT)
        }
    }
}

/// Text on one line, whatever a file or a path put into it.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    line
}

/// Prints to standard output. A reader that went away (`| head`) is no error.
fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = std::io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(CliError::Stdout(error))
        }
        _ => Ok(()),
    }
}

/// Prints a report as JSON.
fn print_json(report: &impl serde::Serialize) -> Result<(), CliError> {
    let mut text = serde_json::to_string_pretty(report)
        .map_err(|error| CliError::Stdout(std::io::Error::other(error)))?;
    text.push('\n');
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }

    #[test]
    fn messages_stay_on_one_line() {
        assert_eq!(one_line("a\nb\u{1b}[0m"), "a\\nb\\u{1b}[0m");
    }
}
