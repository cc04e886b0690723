//! Which code generator cuda_builder is to use, and whether what it made earlier still holds.

use std::{
    env::{self, consts},
    fs,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use crate::Error;

/// Where cuda_builder looks first.
const LOOKED_AT_FIRST: &str = "DEP_RUSTC_CODEGEN_NVVM_OUT_DIR";

/// Points cuda_builder at the code generator that was built along with this program, where there is
/// one, and empties `build_dir` when what lies there came from another one.
///
/// Left alone, cuda_builder searches relative to the current folder, and cargo does not see that
/// the library behind `-Zcodegen-backend` changed.
///
/// # Errors
///
/// When `build_dir` cannot be emptied or marked.
pub fn select(build_dir: &Path) -> Result<(), Error> {
    let Some(library) = built_along() else {
        // From the library path, or cuda_builder says that there is none.
        return Ok(());
    };
    let folder = library.parent().expect("a library lies in a folder");
    // SAFETY: this runs before any thread is started, so nothing reads the environment meanwhile.
    unsafe { env::set_var(LOOKED_AT_FIRST, folder) };

    let mark = build_dir.join("code-generator");
    let identity = identity(&library)?;
    if fs::read_to_string(&mark).is_ok_and(|marked| marked == identity) {
        return Ok(());
    }
    if mark.exists() {
        println!("the code generator changed: building from scratch");
        fs::remove_dir_all(build_dir).map_err(Error::file("empty", build_dir))?;
    }
    fs::create_dir_all(build_dir).map_err(Error::file("make", build_dir))?;
    fs::write(&mark, identity).map_err(Error::file("write", &mark))
}

/// The code generator's library next to this program, where cargo puts it.
fn built_along() -> Option<PathBuf> {
    let program = env::current_exe().ok()?;
    let name = format!(
        "{}rustc_codegen_nvvm{}",
        consts::DLL_PREFIX,
        consts::DLL_SUFFIX
    );
    let folder = program.parent()?;
    [folder.join(&name), folder.join("deps").join(&name)]
        .into_iter()
        .find(|path| path.is_file())
}

/// What tells one build of the library from another.
fn identity(library: &Path) -> Result<String, Error> {
    let metadata = fs::metadata(library).map_err(Error::file("look at", library))?;
    let changed = metadata
        .modified()
        .map_err(Error::file("read the time of", library))?
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Ok(format!(
        "{}\n{} bytes\n{} ns\n",
        library.display(),
        metadata.len(),
        changed.as_nanos()
    ))
}
