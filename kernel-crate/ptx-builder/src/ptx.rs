//! What can be told from the PTX text alone.

/// Names of the kernels in a PTX file, in its order.
pub fn entries(ptx: &str) -> impl Iterator<Item = &str> {
    ptx.lines().filter_map(|line| {
        let (_, name) = line.split_once(".entry ")?;
        Some(name.split('(').next().unwrap_or(name).trim())
    })
}

/// Instructions that the bit contract rules out: contracted, approximate, or flushing subnormals.
const INEXACT: [&str; 6] = ["fma.", ".ftz", ".approx", "div.full", "mad.f32", "rsqrt"];

/// What is wrong with a PTX file made for `tier` of a crate with these `kernels`; empty when nothing
/// is.
///
/// The code generator drops what is not exported as a kernel without a word, so each kernel is
/// looked for.
pub fn faults(ptx: &str, tier: &str, kernels: &[&str]) -> Vec<String> {
    let mut faults = Vec::new();
    match ptx.lines().find_map(|line| line.strip_prefix(".target ")) {
        Some(found) if found.split(',').next().is_some_and(|t| t.trim() == tier) => {}
        Some(found) => faults.push(format!(".target is {}, expected {tier}", found.trim())),
        None => faults.push("it has no .target".to_owned()),
    }
    for kernel in kernels {
        if !entries(ptx).any(|name| name == *kernel) {
            faults.push(format!("it has no .entry {kernel}"));
        }
    }
    for name in entries(ptx) {
        if !kernels.contains(&name) {
            faults.push(format!(
                "its .entry {name} is no kernel of the device crate"
            ));
        }
    }
    for (index, line) in ptx.lines().enumerate() {
        let code = line.split("//").next().unwrap_or(line);
        if let Some(found) = INEXACT.iter().find(|&&inexact| code.contains(inexact)) {
            faults.push(format!(
                "line {}: `{}` has `{found}`",
                index + 1,
                code.trim()
            ));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "//\n// not fma.rn.f32\n.version 8.4\n.target sm_80\n.address_size 64\n\n\
        .visible .entry fused_kv_a(\n\t.param .align 8 .b8 fused_kv_a_param_0[304]\n)\n{\n\
        \tmul.rn.f32 \t%f1, %f2, %f3;\n\tsqrt.rn.f32 %f4, %f1;\n\tret;\n}\n\
        .visible .entry fused_kv_b(\n)\n{\n\tret;\n}\n";

    const KERNELS: [&str; 2] = ["fused_kv_a", "fused_kv_b"];

    #[test]
    fn entries_in_order() {
        assert_eq!(entries(GOOD).collect::<Vec<_>>(), KERNELS);
    }

    #[test]
    fn good_file_has_no_faults() {
        assert_eq!(faults(GOOD, "sm_80", &KERNELS), [""; 0]);
    }

    #[test]
    fn each_fault_is_named() {
        let of =
            |from: &str, to: &str| faults(&GOOD.replace(from, to), "sm_80", &KERNELS).join("; ");
        assert_eq!(
            of("sm_80", "sm_90, debug"),
            ".target is sm_90, debug, expected sm_80"
        );
        assert_eq!(of(".target sm_80\n", ""), "it has no .target");
        assert_eq!(
            of(".entry fused_kv_b", ".func fused_kv_b"),
            "it has no .entry fused_kv_b"
        );
        assert_eq!(
            of("entry fused_kv_b", "entry other"),
            "it has no .entry fused_kv_b; its .entry other is no kernel of the device crate"
        );
        for (instruction, what) in [
            ("fma.rn.f32 %f1, %f2, %f3, %f1;", "fma."),
            ("mul.rn.ftz.f32 %f1, %f2, %f3;", ".ftz"),
            ("sqrt.approx.f32 %f1, %f2;", ".approx"),
            ("div.full.f32 %f1, %f2, %f3;", "div.full"),
        ] {
            let found = of("sqrt.rn.f32 %f4, %f1;", instruction);
            assert_eq!(found, format!("line 12: `{instruction}` has `{what}`"));
        }
    }
}
