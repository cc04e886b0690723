//! Comparison of results: bit for bit with whole memories, or within the bound of the contract.

use approx::abs_diff_eq;
use fused_kv::DType;

use crate::case::Case;
use crate::element::{largest, ulp};
use crate::oracle::Oracle;
use crate::reference::Reference;
use crate::runner::Outcome;
use crate::tensor::Tensor;

/// Factor of `|first*cos| + |second*sin|` in the bound of the contract.
pub const SLACK: f64 = 4e-6;

/// Compares the memory of `found` with `before` in which the rows of written tokens were replaced
/// by `elements`: results, untouched rows, and canaries between and around them, all at once.
///
/// # Panics
///
/// With the first differing place, as index or as canary, and the number of differing bytes.
pub fn assert_memory(
    what: &str,
    before: Option<&Tensor>,
    found: &Tensor,
    elements: &[u8],
    written: &[bool],
) {
    let [layers, tokens, heads, dim] = found.shape[..] else {
        panic!("{what}: rank of {:?}", found.shape);
    };
    let size = found.dtype.size();
    // An output that the plan allocated has no memory from before: unwritten rows are not looked
    // at.
    let mut expected = before.unwrap_or(found).clone();
    let row = heads * dim;
    let offsets = expected.offsets();
    for layer in 0..layers {
        for token in (0..tokens).filter(|&token| written[token]) {
            let first = (layer * tokens + token) * row;
            for index in first..first + row {
                expected.memory[offsets[index]..offsets[index] + size]
                    .copy_from_slice(&elements[index * size..][..size]);
            }
        }
    }
    if expected.memory == found.memory {
        return;
    }
    let differing: Vec<usize> = (0..expected.memory.len())
        .filter(|&i| expected.memory[i] != found.memory[i])
        .collect();
    let byte = differing[0];
    let place = match offsets
        .iter()
        .position(|&offset| (offset..offset + size).contains(&byte))
    {
        None => "a canary".to_owned(),
        Some(index) => {
            let (head, token) = (index / dim % heads, index / row % tokens);
            let (expected, found) = (
                &expected.memory[offsets[index]..][..size],
                &found.memory[offsets[index]..][..size],
            );
            format!(
                "[{}, {token}, {head}, {}] (token written: {}): found {found:02x?}, expected \
                 {expected:02x?} (bytes)",
                index / row / tokens,
                index % dim,
                written[token]
            )
        }
    };
    panic!(
        "{what}: {} bytes differ, the first at byte {byte} of the memory, {place}",
        differing.len()
    );
}

/// The outcome equals the reference bit for bit, everything around it is as before, and `check`
/// reports what it must.
pub fn assert_bits(case: &Case, outcome: &Outcome, reference: &Reference) {
    let written = &reference.written;
    let name = &case.name;
    assert_memory(
        &format!("k_out of {name}"),
        case.k_out.as_ref(),
        &outcome.k,
        &reference.k,
        written,
    );
    assert_memory(
        &format!("v_out of {name}"),
        case.v_out.as_ref(),
        &outcome.v,
        &reference.v,
        written,
    );
    assert_eq!(outcome.check, reference.check, "check() of {name}");
}

/// The outcome has the bits of another backend's, everything around it is as before, and `check`
/// reports the same.
pub fn assert_same(case: &Case, outcome: &Outcome, expected: &Outcome) {
    let reference = Reference {
        k: expected.k.gather(),
        v: expected.v.gather(),
        written: case.written(),
        check: expected.check.clone(),
    };
    assert_bits(case, outcome, &reference);
}

/// Whether `found` of `dtype` is within one unit in the last place plus the slack of `exact`.
pub fn within(dtype: DType, found: f64, exact: f64, terms: f64) -> bool {
    if exact.is_nan() || found.is_nan() {
        return exact.is_nan() && found.is_nan();
    }
    let bound = ulp(dtype, exact) + SLACK * terms;
    if found.is_infinite() {
        return found.signum() == exact.signum() && exact.abs() + bound > largest(dtype);
    }
    abs_diff_eq!(found, exact, epsilon = bound)
}

/// K of the outcome is within the bound of the oracle; V equals it bit for bit.
pub fn assert_oracle(case: &Case, outcome: &Outcome, oracle: &Oracle) {
    let dtype = case.kv.dtype;
    let [_, tokens, heads, dim] = case.out_shape();
    let written = case.written();
    let (k, v) = (outcome.k.values(), outcome.v.bits());
    for index in 0..k.len() {
        let token = index / (heads * dim) % tokens;
        if !written[token] {
            continue;
        }
        let (found, exact) = (f64::from(k[index]), oracle.k[index]);
        assert!(
            within(dtype, found, exact, oracle.terms[index]),
            "K element {index} (token {token}, column {}) of {}: found {found:e}, exact {exact:e}",
            index % dim,
            case.name
        );
        assert_eq!(
            v[index],
            oracle.v[index],
            "V element {index} (token {token}, column {}) of {}",
            index % dim,
            case.name
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Layout;

    #[test]
    fn one_unit_is_within_and_two_are_not() {
        let step = 2f64.powi(-7);
        assert!(within(DType::Bf16, 1.0 + step, 1.0, 0.0));
        assert!(!within(DType::Bf16, 1.0 + 2.0 * step, 1.0, 0.0));
        assert!(within(DType::Bf16, 1.0 + 2.0 * step, 1.0, step / SLACK));
        assert!(!within(DType::Bf16, f64::INFINITY, 1.0, 0.0));
        assert!(within(DType::F16, f64::INFINITY, 65520.0, 0.0));
        assert!(!within(DType::F16, f64::NAN, 1.0, 0.0));
        assert!(within(DType::F16, f64::NAN, f64::NAN, 0.0));
    }

    fn compare(change: impl FnOnce(&mut Tensor)) {
        let before = Tensor::output(DType::F32, &[1, 2, 1, 2], &Layout::padded(&[0, 3]));
        let mut found = before.clone();
        let elements: Vec<u8> = (0..16).collect();
        found.scatter(&elements);
        change(&mut found);
        assert_memory("test", Some(&before), &found, &elements, &[true, true]);
    }

    #[test]
    fn equal_memory_passes() {
        compare(|_| ());
    }

    #[test]
    #[should_panic(expected = "a canary")]
    fn a_canary_before_the_first_element_is_seen() {
        compare(|found| found.memory[found.first - 1] ^= 1);
    }

    #[test]
    #[should_panic(expected = "a canary")]
    fn a_canary_between_rows_is_seen() {
        compare(|found| found.memory[found.first + 8] ^= 1);
    }

    #[test]
    #[should_panic(expected = "[0, 1, 0, 1]")]
    fn a_wrong_element_is_named() {
        compare(|found| {
            let last = found.offsets()[3];
            found.memory[last] ^= 1;
        });
    }

    #[test]
    #[should_panic(expected = "token written: false")]
    fn a_row_that_must_stay_untouched_is_seen() {
        let before = Tensor::output(DType::F32, &[1, 2, 1, 2], &Layout::default());
        let mut found = before.clone();
        let elements: Vec<u8> = (0..16).collect();
        found.scatter(&elements);
        assert_memory("test", Some(&before), &found, &elements, &[true, false]);
    }
}
