//! Which bytes a view touches, and whether it touches any of them twice, or some that another does.

use crate::error::ViewError;
use crate::tensor::{MAX_RANK, Raw};

/// Whether the elements of a view are known to share no byte with each other.
pub(crate) fn is_injective(raw: &Raw) -> Result<bool, ViewError> {
    Ok(Footprint::of(raw)?.is_none_or(|footprint| footprint.is_injective()))
}

/// Whether two views are known to share no byte.
pub(crate) fn are_separate(a: &Raw, b: &Raw) -> Result<bool, ViewError> {
    if a.device != b.device {
        return Ok(true);
    }
    Ok(match (Footprint::of(a)?, Footprint::of(b)?) {
        (Some(a), Some(b)) => a.is_separate(&b),
        _ => true,
    })
}

/// The bytes that a view touches: blocks of `size` bytes at
/// `start + sum(step_i * stride_i)` for `0 <= step_i <= last_i`, all strides positive or zero.
///
/// 128 bits hold every sum: each term is at most 2^63.
#[derive(Clone, Copy, Debug)]
struct Footprint {
    start: i128,
    end: i128,
    size: i128,
    rank: usize,
    /// `(stride, last)` of each dimension with more than one index, in the order of the strides.
    /// One more than a view has: see [`Footprint::is_separate`].
    steps: [(i128, i128); MAX_RANK + 1],
}

impl Footprint {
    /// `None` when the view touches nothing.
    fn of(raw: &Raw) -> Result<Option<Self>, ViewError> {
        let Some((start, end)) = raw.byte_range()? else {
            return Ok(None);
        };
        let size = raw.dtype.size() as i128;
        let mut steps = [(0, 0); MAX_RANK + 1];
        let mut rank = 0;
        for (&extent, &stride) in raw.layout.shape().iter().zip(raw.layout.strides()) {
            if extent > 1 {
                steps[rank] = ((stride as i128 * size).abs(), extent as i128 - 1);
                rank += 1;
            }
        }
        steps[..rank].sort_unstable();
        Ok(Some(Self {
            start: start as i128,
            end: end as i128,
            size,
            rank,
            steps,
        }))
    }

    fn steps(&self) -> &[(i128, i128)] {
        &self.steps[..self.rank]
    }

    /// Whether no two indices meet in memory, shown by nesting: ordered by stride, each dimension
    /// steps over everything that the ones before it span. Every layout that comes from slicing
    /// and permuting an allocation nests; exotic ones that do not (strides 2 and 3, say) are
    /// refused even where their elements happen not to meet.
    fn is_injective(&self) -> bool {
        let mut span = self.size;
        self.steps().iter().all(|&(stride, last)| {
            let nested = stride >= span;
            span += stride * last;
            nested
        })
    }

    /// Whether two footprints are known to be disjoint: their ranges are, or they are the two
    /// indices of one more dimension of a view that is injective, or they interleave with a common
    /// period, as parts of the last dimension of one allocation do.
    ///
    /// For a period m, dimensions whose stride is a multiple of m vanish modulo m, the others
    /// keep each footprint within one block of residues; disjoint blocks on the circle of
    /// residues are disjoint memory. Every stride of either view is tried as the period.
    fn is_separate(&self, other: &Self) -> bool {
        if self.end <= other.start || other.end <= self.start {
            return true;
        }
        if (self.size, self.steps()) == (other.size, other.steps()) {
            let mut both = *self;
            both.steps[both.rank] = ((other.start - self.start).abs(), 1);
            both.rank += 1;
            both.steps[..both.rank].sort_unstable();
            if both.is_injective() {
                return true;
            }
        }
        let block = |footprint: &Self, period: i128| {
            footprint
                .steps()
                .iter()
                .filter(|(stride, _)| stride % period != 0)
                .map(|(stride, last)| stride * last)
                .sum::<i128>()
                + footprint.size
        };
        self.steps()
            .iter()
            .chain(other.steps())
            .map(|&(stride, _)| stride)
            .filter(|&period| period > 0)
            .any(|period| {
                let distance = (other.start - self.start).rem_euclid(period);
                block(self, period) <= distance && distance + block(other, period) <= period
            })
    }
}
