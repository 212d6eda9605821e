#!/usr/bin/env bash
# Compiles the programs against SimGrid into the given folder. Without SimGrid it prints the package to install
# and exits with 3.
set -euo pipefail
cd "$(dirname "$0")"
compiler=${CXX:-c++}
if ! printf '#include <simgrid/s4u.hpp>\n' | "$compiler" -x c++ -fsyntax-only - 2>/dev/null; then
    echo 'SimGrid is not installed: apt-get install libsimgrid-dev' >&2
    exit 3
fi
mkdir -p "$1"
"$compiler" -std=c++17 -O2 -Wall -Wextra -o "$1/all_reduce" all_reduce.cpp -lsimgrid
