#!/usr/bin/env bash
# Runs the tests of this folder on a machine with an NVIDIA GPU; a missing GPU is a failure.
# Exit status 1 when anything failed.
#
#   run.sh [FILTER...]                  all test binaries
#   run.sh memcheck|racecheck|initcheck|synccheck [FILTER...]
#                                       the GPU tests under compute-sanitizer
#   run.sh cli                          fused-kv on every golden file, on CUDA, compared
#   run.sh bench [ARGUMENT...]          the measurements (bench --help)
#   run.sh info                         what the program and the driver say about this machine
#
# FILTER goes to the test binaries: a part of the tests' names, or an option such as --nocapture.
# FUSED_KV_PTX_DIR, when set, names PTX to use instead of what the binaries hold
# (ptx/llvm and ptx/rust-cuda lie here).
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here" || exit 1
export FUSED_KV_TEST_DATA="$here/data" FUSED_KV_BIN="$here/bin/fused-kv"
export FUSED_KV_REQUIRE_GPU=1 RUST_BACKTRACE="${RUST_BACKTRACE:-1}"
chmod +x bin/* tests/* 2>/dev/null

summary=()
failed=0

# step NAME COMMAND...: runs it, shows its output, keeps one line for the summary.
step() {
    local name=$1 log status tests verdict=ok
    shift
    log=$(mktemp)
    echo "== $name"
    "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    if [ "$status" -ne 0 ]; then
        verdict="FAILED (exit $status)"
        failed=1
    fi
    tests=$(grep -h '^test result:' "$log" | sed 's/^test result: [A-Za-z]*\. //; s/; [0-9]* measured.*//' | tail -n 1)
    summary+=("$name: $verdict${tests:+ ($tests)}")
    rm -f "$log"
}

sanitizer() {
    command -v compute-sanitizer 2>/dev/null && return
    local root
    for root in "${CUDA_PATH:-}" /usr/local/cuda /usr/local/cuda-*; do
        [ -x "$root/bin/compute-sanitizer" ] && echo "$root/bin/compute-sanitizer" && return
    done
    return 1
}

mode=${1:-tests}
case $mode in
-h | --help)
    sed -n '2,/^set -u/{s/^# \{0,1\}//;/^set -u/d;p}' "$here/run.sh"
    exit 0
    ;;
memcheck | racecheck | initcheck | synccheck)
    shift
    tool=$(sanitizer) || { echo "compute-sanitizer: not on PATH, nor in CUDA_PATH"; exit 1; }
    found=0
    for binary in tests/*gpu*; do
        [ -x "$binary" ] || continue
        found=1
        step "$mode $(basename "$binary")" "$tool" --tool "$mode" --error-exitcode 9 \
            --target-processes all "$binary" --test-threads=1 "$@"
    done
    [ "$found" = 1 ] || { echo "no GPU tests in this bundle"; failed=1; }
    ;;
cli)
    found=0
    for file in data/golden/*.safetensors; do
        [ -f "$file" ] || continue
        found=1
        step "fused-kv run $(basename "$file")" bin/fused-kv run "$file" --backend cuda --verify
    done
    [ "$found" = 1 ] || { echo "no golden files in this bundle"; failed=1; }
    ;;
bench)
    shift
    step fused-kv-bench bin/fused-kv-bench "$@"
    ;;
info)
    step "fused-kv info" bin/fused-kv info
    command -v nvidia-smi >/dev/null && step nvidia-smi nvidia-smi
    ;;
*)
    [ "$mode" = tests ] && [ $# -gt 0 ] && shift
    for binary in tests/*; do
        step "$(basename "$binary")" "$binary" "$@"
    done
    ;;
esac

echo
echo "== summary"
printf '%s\n' "${summary[@]}"
exit "$failed"
