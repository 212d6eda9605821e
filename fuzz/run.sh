#!/usr/bin/env bash
# Fuzzes every target for SECONDS each, two at a time, and prints one outcome line a target for
# `benchmarks/record.py`. A crash stops its own target alone; the exit status is 1 after any crash.
# --merge adds inputs with new coverage to the corpora.
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?usage: fuzz/run.sh SECONDS [--merge]}
merge=${2:-}
cargo +nightly fuzz build || exit 1

one() {
    local target=$1 scratch log status runs coverage
    scratch=$(mktemp -d)
    log=$scratch/log
    mkdir "$scratch/new" "$scratch/merged"
    fuzz/corpus.py unpack "$target" "$scratch/seeds" 2>>"$log" || { cat "$log" >&2; exit 1; }
    # libFuzzer writes new inputs into its first folder.
    cargo +nightly fuzz run "$target" "$scratch/new" "$scratch/seeds" -- \
        -max_total_time="$2" -timeout=5 -rss_limit_mb=1024 -max_len=4096 >>"$log" 2>&1
    status=$?
    runs=$(grep -oP 'Done \K[0-9]+' "$log" | tail -1)
    coverage=$(grep -oP ' cov: \K[0-9]+' "$log" | tail -1)
    printf 'outcome {"target": "%s", "seconds": %d, "runs": %d, "edges": %d, "exit": %d}\n' \
        "$target" "$2" "${runs:-0}" "${coverage:-0}" "$status"
    [ $status = 0 ] || { tail -40 "$log" >&2; exit 1; }
    if [ "${3:-}" = --merge ]; then
        cp "$scratch"/seeds/* "$scratch/merged"
        cargo +nightly fuzz run "$target" "$scratch/merged" "$scratch/new" -- -merge=1 >>"$log" 2>&1 \
            || { tail -40 "$log" >&2; exit 1; }
        fuzz/corpus.py add "$target" "$scratch"/merged/* || exit 1
    fi
    rm -rf "$scratch"
}
export -f one
cargo +nightly fuzz list | xargs -P 2 -I{} bash -c "one {} $seconds $merge"
