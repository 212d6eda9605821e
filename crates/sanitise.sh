#!/usr/bin/env bash
# Runs Rust tests under miri or under ThreadSanitizer, and says how those of each crate ended as
# `benchmarks/record.py` reads it. Whatever fails, the others run; any failure makes the exit status 1.
set -uo pipefail
cd "$(dirname "$0")/.."
tool=${1:?usage: crates/sanitise.sh miri|tsan}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/$tool
toolchain=$(rustc +nightly --version) || exit 1
status=0

# Runs cargo's tests of a crate: CRATE, and what else to say to cargo.
tests() {
    local log begin=$SECONDS ended passed failed ignored races
    log=$(mktemp)
    "${cargo[@]}" --locked --package "$@" 2>&1 | tee "$log"
    ended=${PIPESTATUS[0]}
    passed=$(sum passed "$log") failed=$(sum failed "$log") ignored=$(sum ignored "$log")
    races=$(grep -c '^WARNING: ThreadSanitizer' "$log")
    rm "$log"
    printf 'outcome {"tool": "%s", "crate": "%s", "passed": %d, "failed": %d, "ignored": %d, ' \
        "$tool" "$1" "$passed" "$failed" "$ignored"
    [ "$tool" = miri ] || printf '"races": %d, ' "$races"
    printf '"seconds": %d, "exit": %d, "toolchain": "%s"}\n' $((SECONDS - begin)) "$ended" "$toolchain"
    [ "$ended" = 0 ] || status=1
}

# Adds up what the test programs say of themselves: `test result: ok. 3 passed; 0 failed; ...`.
sum() {
    awk -v what="$1;" '/^test result: / { for (i = 2; i <= NF; i++) if ($i == what) all += $(i - 1) }
        END { print all + 0 }' "$2"
}

case $tool in
miri)
    # What moves bytes and words within a process: rings, lanes, counted writes, engines and drivers
    # over the simulator. The other tests need what miri lacks: memory files and processes (shm),
    # sockets in an epoll (tcp), ppoll (the adaptor with a thread). That of allocations in weft-moe would
    # take minutes to count the same.
    #
    # No integer becomes a pointer. One case of each property: all are run on the processor anyway.
    # proptest would look on disk for cases that failed before, and miri keeps programs away from there.
    export MIRIFLAGS="-Zmiri-strict-provenance -Zmiri-env-set=PROPTEST_CASES=1
        -Zmiri-env-set=PROPTEST_DISABLE_FAILURE_PERSISTENCE=true"
    # Miri optimises nothing, and says so if it is asked to.
    export CARGO_PROFILE_DEV_OPT_LEVEL=0
    cargo=(cargo +nightly miri test --no-fail-fast)
    tests weft-fabric --lib --test sim
    # The twin of a device turns addresses, which are numbers there, into pointers.
    tests weft-moe --lib --test driver --test refusals --test rounds --test sim -- \
        --skip device::connect --skip device::twin
    ;;
tsan)
    # rustix calls the kernel by itself unless it is told not to. ThreadSanitizer sees only calls of
    # libc: it would take pages that were unmapped and mapped again for the same memory.
    export RUSTFLAGS='-Zsanitizer=thread --cfg rustix_use_libc'
    host=$(rustc +nightly -vV | sed -n 's/^host: //p')
    cargo=(cargo +nightly test -Zbuild-std --target "$host" --no-fail-fast)
    tests weft-control --tests
    tests weft-fabric --tests
    ;;
*)
    echo "unknown tool: $tool" >&2
    exit 2
    ;;
esac
exit $status
