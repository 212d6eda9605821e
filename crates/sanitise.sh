#!/usr/bin/env bash
# Rust tests under miri or ThreadSanitizer. Prints one outcome line for each crate, in the format of
# `benchmarks/record.py`. Runs all crates after a failure; any failure makes the exit status 1.
# With names of crates, those alone.
set -uo pipefail
cd "$(dirname "$0")/.."
tool=${1:?usage: crates/sanitise.sh miri|tsan [CRATE...]}
shift
chosen=" $* "
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/$tool
toolchain=$(rustc +nightly --version) || exit 1
status=0

# Tests of a crate: tests CRATE [ARGUMENTS OF CARGO].
tests() {
    local log begin=$SECONDS ended passed failed ignored races
    [[ $chosen =~ ^\ *$ || $chosen == *" $1 "* ]] || return 0
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

# Sum of a count over lines `test result: ok. 3 passed; 0 failed; ...`: sum NAME FILE.
sum() {
    awk -v what="$1;" '/^test result: / { for (i = 2; i <= NF; i++) if ($i == what) all += $(i - 1) }
        END { print all + 0 }' "$2"
}

case $tool in
miri)
    # Rings, lanes, counted writes, engines and drivers over the simulator. Excluded: tests of memory
    # files and processes (shm), sockets in an epoll (tcp) and ppoll, which miri does not support, and
    # weft-moe's test of allocations, which would take minutes.
    #
    # Strict provenance: integers never become pointers. One case of each property, since native test
    # runs cover the rest. Persistence of failed cases is off: miri isolates programs from the disk.
    export MIRIFLAGS="-Zmiri-strict-provenance -Zmiri-env-set=PROPTEST_CASES=1
        -Zmiri-env-set=PROPTEST_DISABLE_FAILURE_PERSISTENCE=true"
    # Miri warns about an optimisation level other than 0.
    export CARGO_PROFILE_DEV_OPT_LEVEL=0
    cargo=(cargo +nightly miri test --no-fail-fast)
    tests weft-fabric --lib --test sim
    # The device twin converts integer addresses into pointers.
    tests weft-moe --lib --test driver --test refusals --test rounds --test sim -- \
        --skip device::calls::connect --skip device::twin
    # Builders, proofs and models of schedules have no unsafe code, and loops over hundreds of ranks.
    tests weft-collectives --lib -- executor:: messages:: reduction::
    tests weft-collectives --test sim
    ;;
tsan)
    # ThreadSanitizer intercepts only libc, so rustix must not make system calls directly: otherwise
    # pages that were unmapped and mapped again would count as the same memory.
    export RUSTFLAGS='-Zsanitizer=thread --cfg rustix_use_libc'
    host=$(rustc +nightly -vV | sed -n 's/^host: //p')
    cargo=(cargo +nightly test -Zbuild-std --target "$host" --no-fail-fast)
    tests weft-control --tests
    tests weft-fabric --tests
    # Other tests of the crate have one thread. Runs under the simulator have one as well: some seeds suffice.
    export WEFT_SEEDS=100
    tests weft-collectives --lib --test collectives --test messages --test sim
    # Excluded: other tests of the crate, of one thread; tests of several processes, whose accesses to
    # memory that they share it cannot order; soak, which limits resident memory.
    tests weft-dispatch --test service --test threaded --test tokens --test faults -- \
        --skip vanishing::
    tests weft-qdl --lib --test handshake --test descriptors
    ;;
*)
    echo "unknown tool: $tool" >&2
    exit 2
    ;;
esac
exit $status
