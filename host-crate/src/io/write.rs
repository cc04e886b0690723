//! Writing: into a temporary file beside the destination, which replaces it only when complete.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorInfo;
use serde::ser::{Serialize, SerializeMap, Serializer};
use tempfile::NamedTempFile;

use super::{FileError, FileFault, HostTensor, PIECE, Watch, dtype_to_file, kind_of};

/// A file that does not exist under its name yet. Dropped before [`OutputFile::commit`], it
/// leaves nothing behind, and what was there before stays.
#[derive(Debug)]
pub(crate) struct OutputFile {
    /// As given, for messages.
    path: PathBuf,
    /// Where it goes: `path` with symbolic links followed, so that a link stays a link.
    target: PathBuf,
    temporary: NamedTempFile,
}

impl OutputFile {
    /// Makes sure that the destination can be written, before any work is done.
    pub(crate) fn create(path: &Path) -> Result<Self, FileError> {
        let fail = |fault| FileError::new(path, fault);
        let cannot = |error| fail(FileFault::Write(error));
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let existing = match fs::metadata(&target) {
            Ok(found) if !found.is_file() => {
                return Err(fail(FileFault::Kind(kind_of(found.file_type()))));
            }
            Ok(found) if found.permissions().readonly() => return Err(fail(FileFault::ReadOnly)),
            Ok(found) => Some(found.permissions()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(cannot(error)),
        };
        if target.file_name().is_none() {
            return Err(cannot(io::ErrorKind::InvalidFilename.into()));
        }
        let folder = match target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let mut builder = tempfile::Builder::new();
        builder.prefix(".fused-kv-").suffix(".partial");
        #[cfg(unix)]
        {
            // What `File::create` would ask for; the umask applies.
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        // The operating system's own words: the name of the temporary file helps nobody.
        let temporary = builder
            .tempfile_in(folder)
            .map_err(|error| match error.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::from(error.kind()),
            })
            .map_err(cannot)?;
        if let Some(permissions) = existing {
            temporary
                .as_file()
                .set_permissions(permissions)
                .map_err(cannot)?;
        }
        Ok(Self {
            path: path.to_owned(),
            target,
            temporary,
        })
    }

    /// Writes the whole file: `tensors` in this order, behind a header with `metadata`.
    pub(crate) fn write(
        &mut self,
        tensors: &[(&str, &HostTensor)],
        metadata: &BTreeMap<String, String>,
        watch: &impl Watch,
    ) -> Result<(), FileError> {
        let header = header(tensors, metadata).map_err(|error| self.error(error))?;
        let file = self.temporary.as_file_mut();
        let mut write = || {
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(&header)?;
            for (_, tensor) in tensors {
                for piece in tensor.bytes.chunks(PIECE) {
                    file.write_all(piece)?;
                    watch.advance(piece.len() as u64);
                }
            }
            // The rename must not reach the disk before the data does.
            file.sync_all()
        };
        write().map_err(|error| self.error(error))
    }

    /// Puts the complete file under its name, in one step.
    pub(crate) fn commit(self) -> Result<(), FileError> {
        let path = self.path;
        self.temporary
            .persist(&self.target)
            .map_err(|error| FileError::new(&path, FileFault::Write(error.error)))?;
        Ok(())
    }

    fn error(&self, error: io::Error) -> FileError {
        FileError::new(&self.path, FileFault::Write(error))
    }
}

/// A header in a fixed order: the same content gives the same bytes.
struct Header<'a> {
    metadata: &'a BTreeMap<String, String>,
    tensors: Vec<(&'a str, TensorInfo)>,
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1 + self.tensors.len()))?;
        map.serialize_entry("__metadata__", self.metadata)?;
        for (name, info) in &self.tensors {
            map.serialize_entry(name, info)?;
        }
        map.end()
    }
}

fn header(
    tensors: &[(&str, &HostTensor)],
    metadata: &BTreeMap<String, String>,
) -> io::Result<Vec<u8>> {
    let mut offset = 0;
    let mut infos = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let dtype = dtype_to_file(tensor.dtype)
            .ok_or_else(|| io::Error::other(format!("no file type for {}", tensor.dtype)))?;
        let start = offset;
        offset += tensor.bytes.len();
        let info = TensorInfo {
            dtype,
            shape: tensor.shape.clone(),
            data_offsets: (start, offset),
        };
        infos.push((*name, info));
    }
    let tensors = infos;
    let mut header = serde_json::to_vec(&Header { metadata, tensors })?;
    // Data that starts at a multiple of 8 can be read in place by others.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::super::InputFile;
    use super::*;
    use fused_kv::DType;

    fn watch(_: u64) {}

    fn sample() -> HostTensor {
        HostTensor {
            dtype: DType::Bf16,
            shape: vec![2, 3],
            bytes: (0..12).collect(),
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let mut output = OutputFile::create(&path).unwrap();
        let metadata = BTreeMap::from([("case".to_owned(), "sample".to_owned())]);
        output
            .write(&[("kv", &sample())], &metadata, &watch)
            .unwrap();
        assert!(!path.exists(), "nothing under the name before the commit");
        output.commit().unwrap();
        let mut input = InputFile::open(&path).unwrap();
        assert_eq!(input.metadata("case"), Some("sample"));
        let kv = input.required("kv", &watch).unwrap();
        assert_eq!(
            (kv.dtype, &kv.shape, &kv.bytes),
            (DType::Bf16, &vec![2, 3], &sample().bytes)
        );
        assert!(input.optional("eps", &watch).unwrap().is_none());
        // The reference implementation of the format agrees.
        let bytes = fs::read(&path).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(reference.tensor("kv").unwrap().data(), sample().bytes);
    }

    #[test]
    fn without_a_commit_nothing_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        fs::write(&path, "before").unwrap();
        let mut output = OutputFile::create(&path).unwrap();
        output
            .write(&[("kv", &sample())], &BTreeMap::new(), &watch)
            .unwrap();
        drop(output);
        assert_eq!(fs::read_to_string(&path).unwrap(), "before");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_directory_or_a_missing_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let error = OutputFile::create(folder.path()).unwrap_err();
        assert!(matches!(error.fault, FileFault::Kind("a directory")));
        let error = OutputFile::create(&folder.path().join("no/such/file")).unwrap_err();
        assert!(matches!(error.fault, FileFault::Write(_)), "{error}");
        #[cfg(unix)]
        {
            let error = OutputFile::create(Path::new("/dev/null")).unwrap_err();
            assert!(matches!(error.fault, FileFault::Kind("a special file")));
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_and_permissions_stay() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::write(&real, "before").unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
        symlink(&real, &link).unwrap();
        let mut output = OutputFile::create(&link).unwrap();
        output
            .write(&[("kv", &sample())], &BTreeMap::new(), &watch)
            .unwrap();
        output.commit().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        let mode = fs::metadata(&real).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        assert!(InputFile::open(&real).is_ok());
    }
}
