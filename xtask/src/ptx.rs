//! Reading PTX text.

use anyhow::{Context, Result};

/// What the tasks look at in one PTX file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ptx {
    /// `.version`, for example `7.8`.
    pub version: String,
    /// `.target`, for example `sm_80`.
    pub target: String,
    /// Kernels in the order of their names.
    pub entries: Vec<Entry>,
    /// Functions that are declared but not defined: such PTX does not load.
    pub unresolved: Vec<String>,
}

/// One kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Symbol.
    pub name: String,
    /// Parameters, each as `type[bytes]` without its name.
    pub parameters: Vec<String>,
    /// Instructions, without predicates, labels and directives, one an element.
    pub instructions: Vec<String>,
    /// Whether there are variables in local memory.
    pub local: bool,
}

impl Ptx {
    /// Reads PTX text.
    pub fn parse(text: &str) -> Result<Self> {
        let mut ptx = Self::default();
        let mut lines = text.lines().map(strip_comment);
        while let Some(line) = lines.next() {
            if let Some(version) = line.strip_prefix(".version ") {
                ptx.version = version.trim().to_owned();
            } else if let Some(target) = line.strip_prefix(".target ") {
                ptx.target = target
                    .split(',')
                    .next()
                    .unwrap_or_default()
                    .trim()
                    .to_owned();
            } else if line.starts_with(".extern .func") {
                let mut declaration = line.to_owned();
                while !declaration.contains(';') {
                    match lines.next() {
                        Some(next) => declaration.push_str(next),
                        None => break,
                    }
                }
                ptx.unresolved.push(function_name(&declaration));
            } else if line.contains(".entry ") {
                ptx.entries.push(entry(line, &mut lines));
            }
        }
        if ptx.version.is_empty() || ptx.target.is_empty() {
            None.context("not PTX: no .version and .target")?;
        }
        ptx.entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(ptx)
    }

    /// Names of the kernels, sorted.
    pub fn entry_names(&self) -> Vec<String> {
        self.entries
            .iter()
            .map(|entry| entry.name.clone())
            .collect()
    }
}

fn strip_comment(line: &str) -> &str {
    line.split("//").next().unwrap_or_default().trim()
}

/// The symbol in `.extern .func (.param .b32 r) name(`; the result in parentheses may be absent.
fn function_name(declaration: &str) -> String {
    let rest = declaration.trim_start_matches(".extern .func").trim();
    let rest = match rest.strip_prefix('(') {
        Some(result) => result.split_once(')').map_or("", |(_, rest)| rest).trim(),
        None => rest,
    };
    rest.split(|c: char| c == '(' || c == ';' || c.is_whitespace())
        .next()
        .unwrap_or_default()
        .to_owned()
}

fn entry<'a>(first: &'a str, lines: &mut impl Iterator<Item = &'a str>) -> Entry {
    let head = first.split_once(".entry ").map_or("", |(_, rest)| rest);
    let mut header = head.to_owned();
    let mut brace = head.contains('{');
    while !brace {
        let Some(line) = lines.next() else { break };
        brace = line.starts_with('{') || line.ends_with('{');
        header.push(' ');
        header.push_str(line);
    }
    let name = header
        .split(|c: char| c == '(' || c == '{' || c.is_whitespace())
        .next()
        .unwrap_or_default();
    let parameters = header
        .split_once('(')
        .and_then(|(_, rest)| rest.split_once(')'))
        .map(|(list, _)| list.split(',').filter_map(parameter).collect())
        .unwrap_or_default();
    let mut entry = Entry {
        name: name.to_owned(),
        parameters,
        ..Entry::default()
    };
    let mut depth = 1;
    for line in lines {
        match line {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => statement(line, &mut entry, &mut depth),
        }
        if depth == 0 {
            break;
        }
    }
    entry
}

/// Inline assembly puts braces and several statements on a line.
fn statement(line: &str, entry: &mut Entry, depth: &mut u32) {
    if line.starts_with(".local") {
        entry.local = true;
    }
    if line.starts_with('.') && !line.starts_with(".reg") {
        return;
    }
    // Braces of vector operands are between parentheses of an instruction, those of scopes stand
    // before or behind the statements.
    let mut line = line;
    while let Some(rest) = line.strip_prefix('{') {
        *depth += 1;
        line = rest.trim_start();
    }
    for part in line.split(';') {
        let mut part = part.trim();
        while let Some(rest) = part.strip_prefix('}') {
            *depth -= 1;
            part = rest.trim_start();
        }
        if let Some((label, rest)) = part.split_once(':')
            && !label.contains(char::is_whitespace)
            && !label.contains('[')
        {
            part = rest.trim_start_matches(':').trim();
        }
        if part.starts_with('@') {
            part = part.split_once(char::is_whitespace).map_or("", |(_, r)| r);
            part = part.trim();
        }
        if !part.is_empty() && !part.starts_with('.') {
            entry.instructions.push(part.to_owned());
        }
    }
}

/// `.param .align 8 .b8 name[304]` as `.align 8 .b8[304]`.
fn parameter(text: &str) -> Option<String> {
    let text = text.trim().strip_prefix(".param")?.trim();
    let (kind, name) = text.rsplit_once(char::is_whitespace)?;
    let size = name.find('[').map_or("", |at| &name[at..]);
    Some(format!("{}{size}", kind.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "//
// Generated by LLVM NVPTX Back-End
//

.version 7.8
.target sm_80, debug
.address_size 64

.extern .func  (.param .b32 func_retval0) memcmp
(
	.param .b64 memcmp_param_0
)
;
.extern .func _RNv_panic
(
	.param .b64 a
)
.noreturn;
.visible .entry fused_kv_b(
	.param .align 8 .b8 fused_kv_b_param_0[304]
)
.maxntid 256
{
	.local .align 8 .b8 	__local_depot0[24];
	.reg .b64 	%SP;

	@%p1 bra 	$L__BB0_8;
$L__BB0_3:
	// begin inline asm
	ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
	{ .reg .pred p; setp.ne.u32 p, %r1, 0; @p st.global.u32 [%rd1], %r2; }
	// end inline asm
	ret;
}
	// .globl x
.visible .entry fused_kv_a(
	.param .u64 a,
	.param .u32 b
)
{
	ret;
}
";

    #[test]
    fn entries_and_declarations_are_found() {
        let ptx = Ptx::parse(TEXT).unwrap();
        assert_eq!((&*ptx.version, &*ptx.target), ("7.8", "sm_80"));
        assert_eq!(ptx.entry_names(), ["fused_kv_a", "fused_kv_b"]);
        assert_eq!(ptx.unresolved, ["memcmp", "_RNv_panic"]);
        assert_eq!(ptx.entries[0].parameters, [".u64", ".u32"]);
        assert!(!ptx.entries[0].local);
        assert_eq!(ptx.entries[0].instructions, ["ret"]);
        assert_eq!(ptx.entries[1].parameters, [".align 8 .b8[304]"]);
        assert!(ptx.entries[1].local);
        assert_eq!(
            ptx.entries[1].instructions,
            [
                "bra \t$L__BB0_8",
                "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1]",
                "setp.ne.u32 p, %r1, 0",
                "st.global.u32 [%rd1], %r2",
                "ret",
            ]
        );
    }

    #[test]
    fn other_text_is_refused() {
        assert!(Ptx::parse("fn main() {}").is_err());
    }
}
