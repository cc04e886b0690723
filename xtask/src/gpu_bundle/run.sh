#!/usr/bin/env bash
# Runs the tests of this folder on a machine with an NVIDIA GPU; a missing GPU is a failure.
# Exit status 1 when anything failed.
#
#   run.sh [FILTER...]                  all test binaries
#   run.sh memcheck|racecheck|initcheck|synccheck [FILTER...]
#                                       the GPU tests under compute-sanitizer, a process each,
#                                       JOBS (default: half of the processors) at a time; long
#                                       sweeps are shared by PARTS (default 8) processes, random
#                                       tests run 20 cases unless FUSED_KV_GPU_CASES and
#                                       FUSED_KV_SOAK say otherwise; SANITIZER_OPTIONS go to the
#                                       tool; a run ends after LIMIT (default 600) seconds; one in
#                                       which the tool itself failed (it may lose track of launches
#                                       of several threads) goes again, alone, at most three times
#   run.sh cli                          fused-kv on every golden file, on CUDA, compared
#   run.sh examples                     the examples of the library
#   run.sh bench [--out DIR] [--sglang PATH] [--flaggems PATH] [--tokenspeed PATH]
#                                       all measurements, and those of the peers whose file or
#                                       checkout is given (needs python3 with torch and triton);
#                                       JSON in DIR (default: results), for `cargo xtask bench`
#   run.sh bench dense|load [ARGUMENT...]
#                                       one of them (run.sh bench --help)
#   run.sh info                         what the program and the driver say about this machine
#
# FILTER goes to the test binaries: a part of the tests' names, or an option such as --nocapture.
# FUSED_KV_PTX_DIR, when set, names PTX to use instead of what the binaries hold
# (ptx/llvm and ptx/rust-cuda lie here).
set -u
called_from=$PWD
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here" || exit 1
export FUSED_KV_TEST_DATA="$here/data" FUSED_KV_BIN="$here/bin/fused-kv"
export FUSED_KV_REQUIRE_GPU=1 RUST_BACKTRACE="${RUST_BACKTRACE:-1}"
chmod +x bin/* tests/* examples/* 2>/dev/null

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

# absolute PATH: as seen from where this script was called.
absolute() {
    case $1 in
    /*) printf '%s\n' "$1" ;;
    *) printf '%s\n' "$called_from/$1" ;;
    esac
}

# json_string TEXT
json_string() {
    printf '"%s"' "$(printf '%s' "$1" | tr -d '\000-\037' | sed 's/\\/\\\\/g; s/"/\\"/g')"
}

# measure NAME COMMAND...: a step whose command goes into the report.
commands=()
results=$here/results
measure() {
    local name=$1 words
    shift
    # Paths as they mean something elsewhere: within the bundle and the caller's folder.
    words="$*"
    words=${words//$results\//}
    words=${words//$here\//}
    commands+=("${words//$called_from\//}")
    step "$name" "$@"
}

# bench [--out DIR] [--PEER PATH]...
bench() {
    local peers=() kind index cache list separator query
    while [ $# -gt 0 ]; do
        case $1 in
        --out | --sglang | --flaggems | --tokenspeed)
            [ $# -ge 2 ] || { echo "bench: $1 needs a path"; failed=1; return; }
            if [ "$1" = --out ]; then
                results=$(absolute "$2")
            else
                peers+=("$1" "$(absolute "$2")")
            fi
            shift 2
            ;;
        *)
            echo "bench: unknown argument $1"
            failed=1
            return
            ;;
        esac
    done
    mkdir -p "$results" || { failed=1; return; }
    rm -f "$results"/{machine,dense,dense-rust-cuda,peers,ptx-llvm,ptx-rust-cuda}.json "$results/load.jsonl"
    cp ptx/llvm/manifest.json "$results/ptx-llvm.json"

    measure dense bin/fused-kv-bench dense --out "$results/dense.json"
    if [ "${#peers[@]}" -gt 0 ]; then
        measure peers python3 peers/peers.py "${peers[@]}" --out "$results/peers.json"
    fi
    if [ -d ptx/rust-cuda ]; then
        cp ptx/rust-cuda/manifest.json "$results/ptx-rust-cuda.json"
        measure "dense, PTX of rust-cuda" env FUSED_KV_PTX_DIR="$here/ptx/rust-cuda" \
            bin/fused-kv-bench dense --group headline --out "$results/dense-rust-cuda.json"
    fi
    # A process each: the first load with an empty cache of the driver, then with what that left.
    for index in 1 2 3 4 5; do
        cache=$(mktemp -d)
        for kind in cold cached; do
            step "load $index, $kind" env CUDA_CACHE_PATH="$cache" \
                bin/fused-kv-bench load --label "$kind" --append "$results/load.jsonl"
        done
        rm -rf "$cache"
    done
    commands+=("CUDA_CACHE_PATH=(empty, then used) bin/fused-kv-bench load (5 times)")

    query=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    list='' separator=''
    for kind in "${commands[@]}"; do
        list+="$separator$(json_string "$kind")"
        separator=', '
    done
    cat >"$results/machine.json" <<END
{
  "date": $(json_string "$(date -u +%Y-%m-%dT%H:%M:%SZ)"),
  "gpu": $(json_string "${query%,*}"),
  "driver": $(json_string "${query##*, }"),
  "ptx_dir": $(json_string "$(basename "${FUSED_KV_PTX_DIR:-}")"),
  "commands": [$list]
}
END
    echo "figures: $results"
}

# checked BINARY TEST PART: one test under compute-sanitizer, one line of output.
checked() {
    local log start status found
    log="$logs/$mode-$(basename "$1")-${2//::/-}-${3//\//of}"
    start=$SECONDS
    # shellcheck disable=SC2086 # several options
    FUSED_KV_GPU_PART=$3 timeout -k 5 "${LIMIT:-600}" \
        "$tool" --tool "$mode" --error-exitcode 9 --target-processes all ${SANITIZER_OPTIONS:-} \
        "$1" --exact "$2" --test-threads=1 >"$log" 2>&1
    status=$?
    # A test that calls the driver in no way leaves the tool nothing to look at.
    if [ "$status" -ne 0 ] && grep -q 'before first instrumented API call' "$log" &&
        grep -q '^test result: ok. 1 passed' "$log"; then
        status=0
    fi
    # The heads of what it reports. (A summary may count a failure of the tool, or may not.)
    found=$(grep -o '========= [^= ].*' "$log" | grep -v 'COMPUTE-SANITIZER\|SUMMARY')
    if [ "$status" -eq 0 ] && ! grep -q 'Internal Sanitizer Error' <<<"$found"; then
        echo "ok $mode $(basename "$1") $2 $3, $((SECONDS - start)) s"
    elif [ -n "$found" ] && ! grep -qv 'Internal Sanitizer Error' <<<"$found" &&
        ! grep -q '^test result: FAILED' "$log"; then
        echo "THE TOOL FAILED (exit $status), not the test: $mode $*"
    else
        echo "NOT CLEAN (exit $status) $mode $(basename "$1") $2 $3: $(sed -n '/COMPUTE-SANITIZER\|^running \|^test result/d; s/^test .* \.\.\. //; s/^=* *\([^= ].*[^ ]\) *$/\1/p' "$log" | head -n 8 | tr '\n' ';')"
    fi
}
export -f checked

mode=${1:-tests}
case $mode in
-h | --help)
    sed -n '2,/^set -u/{s/^# \{0,1\}//;/^set -u/d;p}' "$here/run.sh"
    exit 0
    ;;
memcheck | racecheck | initcheck | synccheck)
    shift
    tool=$(sanitizer) || { echo "compute-sanitizer: not on PATH, nor in CUDA_PATH"; exit 1; }
    export mode tool FUSED_KV_GPU_CASES="${FUSED_KV_GPU_CASES:-20}" FUSED_KV_SOAK="${FUSED_KV_SOAK:-20}"
    logs=$(mktemp -d)
    export logs
    jobs=()
    for binary in tests/*gpu*; do
        [ -x "$binary" ] || continue
        for name in $("$binary" --list "$@" 2>/dev/null | sed -n 's/: test$//p'); do
            case $name in
            every_* | *::every_* | *known_faults | *larger_jobs)
                for part in $(seq "${PARTS:-8}"); do
                    jobs+=("$binary $name $part/${PARTS:-8}")
                done
                ;;
            *) jobs+=("$binary $name 1/1") ;;
            esac
        done
    done
    [ "${#jobs[@]}" -gt 0 ] || { echo "no such GPU tests in this bundle"; exit 1; }
    printf '%s\n' "${jobs[@]}" |
        xargs -P "${JOBS:-$((($(nproc) + 1) / 2))}" -L 1 bash -c 'checked "$@"' checked |
        tee "$logs/all"
    for _ in 1 2 3; do
        mapfile -t jobs_again < <(sed -n "s/^THE TOOL FAILED.*: $mode //p" "$logs/all")
        [ "${#jobs_again[@]}" -gt 0 ] || break
        sed -i '/^THE TOOL FAILED/d' "$logs/all"
        printf '%s\n' "${jobs_again[@]}" |
            xargs -L 1 bash -c 'checked "$@"' checked | tee -a "$logs/all"
    done
    bad=$(grep -vc '^ok' "$logs/all")
    summary+=("$mode: ${#jobs[@]} runs, $bad not clean")
    [ "$bad" -eq 0 ] || { summary+=("what the tool said: $logs"); failed=1; }
    [ "$(wc -l <"$logs/all")" -eq "${#jobs[@]}" ] || { summary+=("$mode: runs are missing"); failed=1; }
    [ "$failed" -ne 0 ] || rm -rf "$logs"
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
examples)
    for binary in examples/*; do
        step "example $(basename "$binary")" "$binary"
    done
    ;;
bench)
    shift
    case ${1:-} in
    dense | load | -h | --help) step fused-kv-bench bin/fused-kv-bench "$@" ;;
    *) bench "$@" ;;
    esac
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
