#!/usr/bin/env bash
# Compiles the programs of all installed peers: build.sh FOLDER.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p "$1"
for peer in ofi:libfabric ucx:ucx; do
    program=${peer%%:*} package=${peer##*:}
    if flags=$(pkg-config --cflags --libs "$package" 2>/dev/null); then
        # shellcheck disable=SC2086
        ${CC:-cc} -std=gnu11 -O2 -Wall -Wextra -o "$1/$program" "$program.c" pair.c $flags
    fi
done
# mpicc adds the flags of MPI.
if command -v mpicc > /dev/null; then
    mpicc -std=gnu11 -O2 -Wall -Wextra -o "$1/mpi" mpi.c -lm
fi
