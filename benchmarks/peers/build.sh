#!/usr/bin/env bash
# Compiles the programs of all installed peers: build.sh FOLDER.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p "$1"
# build PACKAGE PROGRAM SOURCE...: skipped without the package.
build() {
    if flags=$(pkg-config --cflags --libs "$1" 2>/dev/null); then
        # shellcheck disable=SC2086
        ${CC:-cc} -std=gnu11 -O2 -Wall -Wextra -o "$folder/$2" "${@:3}" pair.c $flags
    fi
}
folder=$1
build libfabric ofi ofi_transfer.c ofi.c messages.c
build libfabric ofi-queries ofi_queries.c ofi.c
build ucx ucx ucx.c messages.c
# mpicc adds the flags of MPI.
if command -v mpicc > /dev/null; then
    mpicc -std=gnu11 -O2 -Wall -Wextra -o "$1/mpi" mpi.c -lm
fi
