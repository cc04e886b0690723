//! The 8-bit floats of KV pools as Rust types.

use fused_kv_kernels::convert;

macro_rules! float8 {
    ($name:ident, $encode:path, $decode:path, $(#[$doc:meta])*) => {
        $(#[$doc])*
        ///
        /// Compared bit by bit: a NaN equals itself, and the two zeros differ.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(
            /// The bits.
            pub u8,
        );

        impl $name {
            /// The nearest value, ties to even; beyond the largest finite value, infinities too,
            /// the largest finite value; NaN for a NaN.
            pub fn from_f32(value: f32) -> Self {
                Self($encode(value))
            }

            /// The value; exact.
            pub fn to_f32(self) -> f32 {
                $decode(self.0)
            }
        }
    };
}

float8!(
    F8E4M3Fn,
    convert::e4m3_from_f32,
    convert::e4m3_to_f32,
    /// `float8_e4m3fn`: 4 exponent and 3 mantissa bits, no infinities, largest value 448.
);
float8!(
    F8E5M2,
    convert::e5m2_from_f32,
    convert::e5m2_to_f32,
    /// `float8_e5m2`: 5 exponent and 2 mantissa bits, largest finite value 57344.
);
