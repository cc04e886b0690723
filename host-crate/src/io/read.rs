//! Reading: the header is checked against the size of the file before any data is read, and only
//! the tensors that are asked for are read.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::{FileError, FileFault, HostTensor, PIECE, Watch, dtype_from_file, kind_of, zeroed};

/// Bytes of the length field before the header.
const LENGTH_FIELD: u64 = 8;
/// The limit of the safetensors crate, which its writer keeps as well.
const HEADER_LIMIT: u64 = 100_000_000;

/// A safetensors file whose header was read and whose size fits it.
#[derive(Debug)]
pub(crate) struct InputFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// Where the data begins.
    data: u64,
}

impl InputFile {
    pub(crate) fn open(path: &Path) -> Result<Self, FileError> {
        let fail = |fault| FileError::new(path, fault);
        let open = |error| fail(FileFault::Open(error));
        // Before opening: a pipe would wait for its other end.
        let kind = std::fs::metadata(path).map_err(open)?.file_type();
        if !kind.is_file() {
            return Err(fail(FileFault::Kind(kind_of(kind))));
        }
        let mut file = File::open(path).map_err(open)?;
        let found = file.metadata().map_err(open)?;
        let (metadata, data) = header(&mut file, found.len()).map_err(fail)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            metadata,
            data,
        })
    }

    /// An error about this file.
    pub(crate) fn error(&self, fault: FileFault) -> FileError {
        FileError::new(&self.path, fault)
    }

    /// The metadata string of this key.
    pub(crate) fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata
            .metadata()
            .as_ref()?
            .get(key)
            .map(String::as_str)
    }

    /// Bytes of a tensor; 0 when the file does not have it.
    pub(crate) fn tensor_len(&self, name: &str) -> u64 {
        self.metadata
            .info(name)
            .map_or(0, |info| (info.data_offsets.1 - info.data_offsets.0) as u64)
    }

    /// Reads a tensor that must be there.
    pub(crate) fn required(
        &mut self,
        name: &'static str,
        watch: &impl Watch,
    ) -> Result<HostTensor, FileError> {
        self.optional(name, watch)?
            .ok_or_else(|| self.error(FileFault::MissingTensor { name }))
    }

    /// Reads a tensor that may be there.
    pub(crate) fn optional(
        &mut self,
        name: &'static str,
        watch: &impl Watch,
    ) -> Result<Option<HostTensor>, FileError> {
        let Some(info) = self.metadata.info(name) else {
            return Ok(None);
        };
        let dtype = dtype_from_file(info.dtype).ok_or_else(|| {
            self.error(FileFault::TensorDtype {
                name,
                found: info.dtype,
            })
        })?;
        let shape = info.shape.clone();
        // Offsets were checked against each other, the shape and the size of the file.
        let (start, end) = info.data_offsets;
        let mut bytes = zeroed(end - start)
            .map_err(|fault| self.error(FileFault::TensorMemory { name, fault }))?;
        let (path, start) = (&self.path, self.data + start as u64);
        let fail = |error| FileError::new(path, FileFault::Read(error));
        self.file.seek(SeekFrom::Start(start)).map_err(fail)?;
        for piece in bytes.chunks_mut(PIECE) {
            self.file.read_exact(piece).map_err(fail)?;
            watch.advance(piece.len() as u64);
        }
        Ok(Some(HostTensor {
            dtype,
            shape,
            bytes,
        }))
    }
}

/// Reads and checks the header of a file of `len` bytes; also gives the offset of the data.
fn header(file: &mut impl Read, len: u64) -> Result<(Metadata, u64), FileFault> {
    if len < LENGTH_FIELD {
        return Err(FileFault::TooShort { len });
    }
    let mut field = [0; LENGTH_FIELD as usize];
    file.read_exact(&mut field).map_err(FileFault::Read)?;
    let header = u64::from_le_bytes(field);
    if header > len - LENGTH_FIELD {
        return Err(FileFault::HeaderTruncated { header, len });
    }
    if header > HEADER_LIMIT {
        let limit = HEADER_LIMIT;
        return Err(FileFault::HeaderTooLarge { header, limit });
    }
    let mut text = vec![0; header as usize];
    file.read_exact(&mut text).map_err(FileFault::Read)?;
    // This also checks that the tensors follow each other without gap and that each has as many
    // bytes as its shape and dtype say. The sum below can overflow all the same.
    let metadata: Metadata = serde_json::from_slice(&text).map_err(FileFault::Header)?;
    let data = LENGTH_FIELD + header;
    let expected = u64::try_from(metadata.data_len())
        .ok()
        .and_then(|bytes| bytes.checked_add(data))
        .ok_or(FileFault::Overflow)?;
    match len {
        found if found < expected => Err(FileFault::Truncated { found, expected }),
        found if found > expected => Err(FileFault::Oversized { found, expected }),
        _ => Ok((metadata, data)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8]) -> Result<(Metadata, u64), FileFault> {
        header(&mut &bytes[..], bytes.len() as u64)
    }

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    const GOOD: &str = r#"{"__metadata__":{"case":"x"},
        "kv":{"dtype":"BF16","shape":[2,1,4],"data_offsets":[0,16]},
        "eps":{"dtype":"F32","shape":[1],"data_offsets":[16,20]}}"#;

    #[test]
    fn a_good_header_is_read() {
        let (metadata, data) = parse(&file(GOOD, 20)).unwrap();
        assert_eq!(data, 8 + GOOD.len() as u64);
        assert_eq!(metadata.info("kv").unwrap().shape, [2, 1, 4]);
    }

    #[test]
    fn sizes_must_fit() {
        let good = file(GOOD, 20);
        for len in 0..good.len() {
            let fault = parse(&good[..len]).unwrap_err();
            match len {
                0..8 => assert!(matches!(fault, FileFault::TooShort { .. })),
                _ if len < 8 + GOOD.len() => {
                    assert!(matches!(fault, FileFault::HeaderTruncated { .. }));
                }
                _ => assert!(matches!(fault, FileFault::Truncated { .. })),
            }
        }
        let fault = parse(&file(GOOD, 21)).unwrap_err();
        assert!(matches!(fault, FileFault::Oversized { .. }), "{fault}");
    }

    #[test]
    fn huge_headers_and_overflowing_sizes_are_refused() {
        let mut bytes = u64::MAX.to_le_bytes().to_vec();
        bytes.extend([b'{'; 100]);
        assert!(matches!(
            parse(&bytes),
            Err(FileFault::HeaderTruncated { .. })
        ));
        let mut claimed = 200_000_000u64.to_le_bytes().to_vec();
        claimed.push(b'{');
        let fault = header(&mut &claimed[..], 300_000_000).unwrap_err();
        assert!(matches!(fault, FileFault::HeaderTooLarge { .. }), "{fault}");

        // Eight tensors of 2^61 - 1 bytes: each passes on its own, the end of the data does not
        // fit 64 bits any more once the header is added.
        let size = (1u64 << 61) - 1;
        let mut tensors: Vec<String> = (0..8u64)
            .map(|i| {
                let (start, end) = (i * size, (i + 1) * size);
                format!(
                    r#""t{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{end}]}}"#
                )
            })
            .collect();
        let start = 8 * size;
        let end = u64::MAX;
        tensors.push(format!(
            r#""last":{{"dtype":"U8","shape":[{}],"data_offsets":[{start},{end}]}}"#,
            end - start
        ));
        let fault = parse(&file(&format!("{{{}}}", tensors.join(",")), 0)).unwrap_err();
        assert!(matches!(fault, FileFault::Overflow), "{fault}");
    }

    #[test]
    fn any_damage_to_a_header_gives_an_error_or_a_header_that_fits() {
        let good = file(GOOD, 20);
        for at in 0..8 + GOOD.len() {
            for bit in 0..8 {
                let mut bytes = good.clone();
                bytes[at] ^= 1 << bit;
                if let Ok((metadata, data)) = parse(&bytes) {
                    assert_eq!(metadata.data_len() as u64 + data, bytes.len() as u64);
                }
            }
        }
    }
}
