#!/usr/bin/env bash
# Weft GPU tests and benchmarks. Requires only a Python that can import weft and torch (WEFT_PYTHON,
# default python3), by an installed wheel or by PYTHONPATH.
#
#     benchmarks/gpu/run.sh test [ARGUMENTS OF PYTEST]
#     benchmarks/gpu/run.sh all [--budget SECONDS] [--ranks N]
#     benchmarks/gpu/run.sh bench [--budget SECONDS] [--cases NAMES] [--ranks N] [--record FILE]
#     benchmarks/gpu/run.sh collectives [--budget SECONDS] [--cases NAMES | --sweep] [--ranks N]
#     benchmarks/gpu/run.sh fused [--budget SECONDS] [--cases NAMES] [--ranks N]
#     benchmarks/gpu/run.sh fused-models [--budget SECONDS] [--cases NAMES] [--ranks N]
#     benchmarks/gpu/run.sh fused-ablation [--budget SECONDS] [--cases NAMES] [--ranks N]
#     benchmarks/gpu/run.sh training [--budget SECONDS] [--cases NAMES] [--ranks N]
#     benchmarks/gpu/run.sh queries [--budget SECONDS] [--sizes BYTES] [--rounds N] [--record FILE]
#
# A failed benchmark case is recorded as failed, and the other cases run.
set -euo pipefail
what=${1:-}
case $what in
all | test | bench | collectives | fused | fused-ablation | fused-models | queries | training) shift ;;
*)
    sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
python=${WEFT_PYTHON:-python3}

command -v "$python" >/dev/null || {
    echo "run.sh: $python: command not found; set WEFT_PYTHON to a Python with weft and torch" >&2
    exit 2
}
"$python" - <<'END' || exit 2
import importlib.util
import sys

if sys.version_info < (3, 11):
    sys.exit(f"run.sh: Python {sys.version.split()[0]}: Weft needs 3.11 or later")
missing = [name for name in ("torch", "numpy", "ml_dtypes", "weft") if not importlib.util.find_spec(name)]
if missing:
    sys.exit(f"run.sh: {sys.executable} lacks {', '.join(missing)}; install Weft's wheel, or set PYTHONPATH")
import torch

if not torch.cuda.is_available():
    sys.exit(f"run.sh: torch {torch.__version__} of {sys.executable} sees no GPU")
END

case $what in
test)
    if ! "$python" -c 'import pytest' 2>/dev/null; then
        echo "run.sh: $python lacks pytest" >&2
        exit 2
    fi
    options=(-q -m gpu --confcutdir tests/gpu)
    if ! "$python" -c 'import pytest_timeout' 2>/dev/null; then
        # The project's settings need that plugin; without it, hanging tests have no timeout.
        echo "run.sh: $python lacks pytest-timeout: hanging tests have no timeout" >&2
        options+=(-c /dev/null --rootdir .)
    fi
    exec "$python" -m pytest "${options[@]}" tests/gpu "$@"
    ;;
all)
    exec "$python" benchmarks/gpu/everything.py "$@"
    ;;
bench)
    exec "$python" -m weft bench moe --device cuda --cases all \
        --record benchmarks/results/gpu_moe.jsonl "$@"
    ;;
collectives)
    exec "$python" benchmarks/gpu/collectives.py "$@"
    ;;
fused)
    exec "$python" benchmarks/gpu/fused.py "$@"
    ;;
fused-models)
    exec "$python" benchmarks/gpu/fused_models.py "$@"
    ;;
fused-ablation)
    exec "$python" benchmarks/gpu/fused.py --cases ablation "$@"
    ;;
training)
    exec "$python" benchmarks/gpu/training.py "$@"
    ;;
queries)
    exec "$python" benchmarks/gpu/queries.py "$@"
    ;;
esac
