#!/usr/bin/env bash
# Compiles all installed peers' programs: build.sh FOLDER.
set -euo pipefail
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")"
# build PACKAGE PROGRAM SOURCE...: skipped without the package.
build() {
    if flags=$(pkg-config --cflags --libs "$1" 2>/dev/null); then
        # shellcheck disable=SC2086
        ${CC:-cc} -std=gnu11 -O2 -Wall -Wextra -o "$folder/$2" "${@:3}" pair.c $flags
    fi
}
build libfabric ofi ofi_transfer.c ofi.c messages.c
build libfabric ofi-queries ofi_queries.c ofi.c
build ucx ucx ucx.c messages.c
# mpicc adds MPI's flags.
if command -v mpicc > /dev/null; then
    mpicc -std=gnu11 -O2 -Wall -Wextra -o "$folder/mpi" mpi.c -lm
fi
