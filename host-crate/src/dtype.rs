//! Element types of tensors.

use std::fmt;

/// The type of a tensor's elements.
///
/// [`Display`](fmt::Display) gives the names that Python frameworks use (`bfloat16`, `float32`,
/// ...), since those are the names people search their logs for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 16-bit brain float: 8 exponent bits, 7 mantissa bits.
    Bf16,
    /// IEEE 754 half precision.
    F16,
    /// IEEE 754 single precision.
    F32,
    /// 8-bit float with 4 exponent and 3 mantissa bits, no infinities, largest value 448
    /// (`float8_e4m3fn`). A pool type only.
    F8E4M3Fn,
    /// 8-bit float with 5 exponent and 2 mantissa bits, largest finite value 57344
    /// (`float8_e5m2`). A pool type only.
    F8E5M2,
    /// 32-bit signed integer: positions and slots.
    I32,
    /// 64-bit signed integer: positions and slots.
    I64,
}

impl DType {
    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            Self::F8E4M3Fn | Self::F8E5M2 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Whether this is one of the three types that `kv`, weights and tables may have.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::Bf16 | Self::F16 | Self::F32)
    }

    /// Whether this is one of the two 8-bit float types.
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::F8E4M3Fn | Self::F8E5M2)
    }

    /// Whether this is a type that positions and slots may have.
    pub const fn is_index(self) -> bool {
        matches!(self, Self::I32 | Self::I64)
    }

    /// The name that messages use, for example `bfloat16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::F32 => "float32",
            Self::F8E4M3Fn => "float8_e4m3fn",
            Self::F8E5M2 => "float8_e5m2",
            Self::I32 => "int32",
            Self::I64 => "int64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that a tensor can have as its element. Sealed: a view's memory is reinterpreted by
/// this mapping.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The matching element type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
element!(
    half::bf16 => Bf16, half::f16 => F16, f32 => F32, i32 => I32, i64 => I64,
    crate::F8E4M3Fn => F8E4M3Fn, crate::F8E5M2 => F8E5M2
);
