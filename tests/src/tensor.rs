//! A tensor of a case: its memory with canaries around and between its elements, and its layout.

use fused_kv::DType;

use crate::element;

/// Bytes of guard before and after the elements. A multiple of every alignment that a dispatch
/// path could look for, so that the guard does not disturb it.
const GUARD: usize = 256;

/// What the memory that is no element of the tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// All bits set: NaN for floats, -1 for integers. For inputs: what is read by mistake shows.
    Ones,
    /// Bytes that depend on their place. For outputs: what is written by mistake shows, moved
    /// bytes too.
    Canary,
}

impl Fill {
    fn bytes(self, len: usize) -> Vec<u8> {
        match self {
            Self::Ones => vec![0xff; len],
            Self::Canary => (0..len)
                .map(|i| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] | 1)
                .collect(),
        }
    }
}

/// Where the rows of a tensor start, if its innermost axis has a suitable extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// At any element.
    Anywhere,
    /// One element behind a pair.
    Shifted,
    /// At a pair.
    Pairs,
    /// At 8 elements.
    Chunks,
}

/// How a tensor lies in its memory. The default is contiguous and aligned to 256 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Elements by which the whole tensor is shifted from an aligned address.
    pub offset: usize,
    /// Bytes by which it is shifted on top; not a whole number of elements breaks their alignment.
    pub byte_offset: usize,
    /// Extra elements between neighbours of each axis.
    pub pads: Vec<usize>,
    /// Axes from the outermost in memory to the innermost; empty means in order.
    pub order: Vec<usize>,
    /// Axes whose stride is negative.
    pub reversed: Vec<usize>,
}

impl Layout {
    /// Contiguous, shifted by `offset` elements.
    pub fn shifted(offset: usize) -> Self {
        Self {
            offset,
            ..Self::default()
        }
    }

    /// The same with every row where `rows` says.
    pub fn aligned(mut self, rows: Rows) -> Self {
        let (unit, shift) = match rows {
            Rows::Anywhere => return self,
            Rows::Shifted => (2, 1),
            Rows::Pairs => (2, 0),
            Rows::Chunks => (8, 0),
        };
        self.offset = self.offset / unit * unit + shift;
        for pad in &mut self.pads {
            *pad = *pad / unit * unit;
        }
        self
    }

    /// Where rows start.
    pub fn rows(&self) -> Rows {
        let padded = |unit: usize| self.pads.iter().all(|pad| pad % unit == 0);
        match self.offset {
            offset if offset % 8 == 0 && padded(8) => Rows::Chunks,
            offset if offset % 2 == 0 && padded(2) => Rows::Pairs,
            _ if padded(2) => Rows::Shifted,
            _ => Rows::Anywhere,
        }
    }

    /// In order, with extra elements between neighbours of each axis.
    pub fn padded(pads: &[usize]) -> Self {
        Self {
            pads: pads.to_vec(),
            ..Self::default()
        }
    }
}

/// A tensor in host memory that a case owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Type of the elements.
    pub dtype: DType,
    /// Extents.
    pub shape: Vec<usize>,
    /// Strides in elements.
    pub strides: Vec<isize>,
    /// Byte offset of element `[0, 0, ...]` in the memory.
    pub first: usize,
    /// The memory, guards included.
    pub memory: Vec<u8>,
}

impl Tensor {
    /// Memory for a tensor, all of it (the elements too) holding `fill`.
    pub fn filled(dtype: DType, shape: &[usize], layout: &Layout, fill: Fill) -> Self {
        let rank = shape.len();
        let order = if layout.order.is_empty() {
            (0..rank).collect()
        } else {
            layout.order.clone()
        };
        assert_eq!(order.len(), rank, "the order of every axis");
        let mut strides = vec![0isize; rank];
        let mut step = 1usize;
        for &axis in order.iter().rev() {
            step += layout.pads.get(axis).copied().unwrap_or(0);
            strides[axis] = step as isize;
            step *= shape[axis].max(1);
        }
        let mut below = 0usize;
        for &axis in &layout.reversed {
            below += shape[axis].saturating_sub(1) * strides[axis] as usize;
            strides[axis] = -strides[axis];
        }
        let size = dtype.size();
        let first = GUARD + (layout.offset + below) * size + layout.byte_offset;
        let len = GUARD + (layout.offset + step) * size + layout.byte_offset + GUARD;
        Self {
            dtype,
            shape: shape.to_vec(),
            strides,
            first,
            memory: fill.bytes(len.next_multiple_of(GUARD)),
        }
    }

    /// An input with these elements (contiguous bytes), anything else in its memory all ones.
    pub fn input(dtype: DType, shape: &[usize], layout: &Layout, elements: &[u8]) -> Self {
        let mut tensor = Self::filled(dtype, shape, layout, Fill::Ones);
        tensor.scatter(elements);
        tensor
    }

    /// An output: canaries everywhere.
    pub fn output(dtype: DType, shape: &[usize], layout: &Layout) -> Self {
        Self::filled(dtype, shape, layout, Fill::Canary)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Byte offset of every element, in row-major order of the indices.
    pub fn offsets(&self) -> Vec<usize> {
        let mut offsets = vec![self.first as isize];
        for (&extent, &stride) in self.shape.iter().zip(&self.strides) {
            let step = stride * self.dtype.size() as isize;
            offsets = offsets
                .iter()
                .flat_map(|&offset| (0..extent as isize).map(move |i| offset + i * step))
                .collect();
        }
        offsets.into_iter().map(|offset| offset as usize).collect()
    }

    /// Where the elements lie, given the address of the first: bytes from an address on.
    pub fn ranges(&self, address: u64) -> Vec<(u64, usize)> {
        let size = self.dtype.size();
        let mut ranges: Vec<(u64, usize)> = Vec::new();
        for offset in self.offsets() {
            let at = address
                .wrapping_sub(self.first as u64)
                .wrapping_add(offset as u64);
            match ranges.last_mut() {
                Some((from, bytes)) if *from + *bytes as u64 == at => *bytes += size,
                _ => ranges.push((at, size)),
            }
        }
        ranges
    }

    /// Writes the elements, given as contiguous bytes in row-major order.
    pub fn scatter(&mut self, elements: &[u8]) {
        let size = self.dtype.size();
        assert_eq!(
            elements.len(),
            self.len() * size,
            "elements of {:?}",
            self.shape
        );
        for (offset, element) in self.offsets().into_iter().zip(elements.chunks_exact(size)) {
            self.memory[offset..offset + size].copy_from_slice(element);
        }
    }

    /// The elements as contiguous bytes in row-major order.
    pub fn gather(&self) -> Vec<u8> {
        let size = self.dtype.size();
        self.offsets()
            .into_iter()
            .flat_map(|offset| self.memory[offset..offset + size].iter().copied())
            .collect()
    }

    /// The elements' bits in row-major order (float types).
    pub fn bits(&self) -> Vec<u32> {
        self.gather()
            .chunks_exact(self.dtype.size())
            .map(element::bits_of)
            .collect()
    }

    /// The elements as numbers in row-major order (float types).
    pub fn values(&self) -> Vec<f32> {
        self.bits()
            .into_iter()
            .map(|bits| element::decode(self.dtype, bits))
            .collect()
    }

    /// The elements as integers in row-major order (index types).
    pub fn indices(&self) -> Vec<i64> {
        element::decode_index(self.dtype, &self.gather())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_layout_keeps_the_elements_apart() {
        let layout = Layout {
            offset: 3,
            byte_offset: 1,
            pads: vec![5, 2, 1],
            order: vec![2, 0, 1],
            reversed: vec![0, 2],
        };
        let elements: Vec<u8> = (0..2 * 3 * 4 * 2).collect();
        let tensor = Tensor::input(DType::Bf16, &[2, 3, 4], &layout, &elements);
        assert_eq!(tensor.gather(), elements);
        let mut offsets = tensor.offsets();
        offsets.sort_unstable();
        assert!(offsets.windows(2).all(|pair| pair[1] - pair[0] >= 2));
        assert!(offsets[0] >= GUARD);
        let bytes = |(address, bytes): (u64, usize)| address as usize..address as usize + bytes;
        let mut elements: Vec<usize> = tensor.ranges(1000).into_iter().flat_map(bytes).collect();
        elements.sort_unstable();
        let first = tensor.first as isize;
        let moved = |offset: &usize| (*offset as isize - first + 1000) as usize;
        let expected = offsets.iter().map(moved).flat_map(|at| [at, at + 1]);
        assert!(elements.into_iter().eq(expected));
        assert!(offsets[offsets.len() - 1] + 2 + GUARD <= tensor.memory.len());
    }
}
