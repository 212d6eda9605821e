#!/usr/bin/env bash
# Runs every target for SECONDS each, two at a time, and says how each ended as `benchmarks/record.py`
# reads it. Finds do not stop the others; any find makes the exit status 1.
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?usage: fuzz/run.sh SECONDS}
cargo +nightly fuzz build || exit 1

one() {
    local target=$1 log corpus status runs coverage
    log=$(mktemp)
    # What is found goes to a corpus of its own, so that the committed one stays small.
    corpus=$(mktemp -d)
    cargo +nightly fuzz run "$target" "$corpus" "fuzz/corpus/$target" -- \
        -max_total_time="$2" -timeout=5 -rss_limit_mb=1024 -max_len=4096 >"$log" 2>&1
    status=$?
    runs=$(grep -oP 'Done \K[0-9]+' "$log" | tail -1)
    coverage=$(grep -oP ' cov: \K[0-9]+' "$log" | tail -1)
    printf 'outcome {"target": "%s", "seconds": %d, "runs": %d, "edges": %d, "exit": %d}\n' \
        "$target" "$2" "${runs:-0}" "${coverage:-0}" "$status"
    [ $status = 0 ] || { tail -40 "$log" >&2; exit 1; }
    rm -rf "$corpus" "$log"
}
export -f one
cargo +nightly fuzz list | xargs -P 2 -I{} bash -c "one {} $seconds"
