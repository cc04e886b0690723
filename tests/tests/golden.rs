//! The golden files of sglang's Triton kernel: against the library, and against the oracle that
//! the other tests rely on.

use fused_kv::{Inputs, Outputs, Plan, TensorView};
use fused_kv_tests::compare::{SLACK, assert_bits, assert_oracle};
use fused_kv_tests::element::ulp;
use fused_kv_tests::golden::{self, Golden};
use fused_kv_tests::{Runner, Tensor, oracle, reference};
use safetensors::SafeTensors;

/// K of the file within one unit in the last place plus the bound of the contract of what was
/// found, V bit for bit.
fn compare(golden: &Golden, k: &Tensor, v: &Tensor) {
    let oracle = oracle::compute(&golden.case);
    let dtype = golden.k.dtype;
    let (found, expected) = (k.values(), golden.k.values());
    assert_eq!(found.len(), expected.len());
    for (index, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
        let (found, expected) = (f64::from(found), f64::from(expected));
        let bound = ulp(dtype, found.abs().max(expected.abs())) + SLACK * oracle.terms[index];
        assert!(
            (found - expected).abs() <= bound,
            "K element {index} of {}: found {found:e}, the file has {expected:e}",
            golden.case.name
        );
    }
    assert!(v.bits() == golden.v.bits(), "V of {}", golden.case.name);
}

fn check(name: &str) {
    let golden = golden::load(name);
    let outcome = Runner::Cpu.run(&golden.case).expect("a valid case");
    compare(&golden, &outcome.k, &outcome.v);
    assert_bits(&golden.case, &outcome, &reference::compute(&golden.case));
    assert_oracle(&golden.case, &outcome, &oracle::compute(&golden.case));
}

macro_rules! golden {
    ($($name:ident),*) => {
        $(
            #[test]
            fn $name() {
                check(stringify!($name));
            }
        )*

        #[test]
        fn every_file_of_the_folder_has_a_test() {
            let mut found: Vec<String> = std::fs::read_dir(golden::data_dir().join("golden"))
                .expect("the golden files")
                .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
                .filter_map(|name| name.strip_suffix(".safetensors").map(str::to_owned))
                .collect();
            found.sort();
            assert_eq!(found, golden::NAMES);
            assert_eq!(found, [$(stringify!($name)),*]);
        }
    };
}

golden!(
    half_precision,
    mixed_cache,
    odd_head_dim,
    partial_rotary,
    single_precision,
    square,
    tiny,
    zeros_and_large
);

/// The files hold values that tell: not all zero, several positions, more than one weight.
#[test]
fn files_are_not_degenerate() {
    for name in golden::NAMES {
        let golden = golden::load(name);
        let nonzero = golden.k.values().iter().filter(|&&x| x != 0.0).count();
        assert!(nonzero * 2 > golden.k.len(), "{name}");
        assert!(golden.k.values().iter().all(|x| x.is_finite()), "{name}");
    }
}

/// The tensors of a file in memory, at whatever alignment it has them, and outputs that the plan
/// allocates.
#[test]
fn views_of_the_bytes_of_a_file() {
    for name in golden::NAMES {
        let golden = golden::load(name);
        let file = golden::read(name);
        let tensors = SafeTensors::deserialize(&file).expect("a safetensors file");
        let data = |key: &str| tensors.tensor(key).expect(key);
        for shift in 0..4 {
            // Copies at every alignment of four bytes: the file's own is a matter of chance.
            let keys = ["kv", "k_norm_weight", "eps", "cos_sin_cache", "positions"];
            let shifted: Vec<Vec<u8>> = keys
                .iter()
                .map(|key| [&vec![0xff; shift], data(key).data()].concat())
                .collect();
            let view = |index: usize| {
                let tensor = data(keys[index]);
                let dtype = golden::dtype(tensor.dtype());
                TensorView::from_bytes(&shifted[index][shift..], dtype, tensor.shape())
                    .expect("a view")
            };
            let inputs = Inputs {
                kv: view(0),
                k_norm_weight: view(1),
                eps: view(2),
                cos_sin_cache: view(3),
                positions: view(4),
                value_scale: None,
            };
            let mut plan =
                Plan::new(golden.case.config, inputs, Outputs::default()).expect("a valid job");
            plan.run().expect("a run");
            plan.check().expect("positions of the table");
            let (k, v) = plan.into_outputs();
            let tensor = |found: fused_kv::OwnedTensor| {
                Tensor::input(
                    found.dtype(),
                    found.shape(),
                    &Default::default(),
                    found.as_bytes().expect("host memory"),
                )
            };
            compare(
                &golden,
                &tensor(k.expect("allocated")),
                &tensor(v.expect("allocated")),
            );
        }
    }
}
