//! The program `fused-kv`: runs jobs from files, makes inputs, tells what the machine offers.

mod cli;
mod io;

fn main() -> std::process::ExitCode {
    cli::main()
}
