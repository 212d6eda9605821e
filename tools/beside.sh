#!/usr/bin/env bash
# beside.sh LOG PATIENT COMMAND: runs both, PATIENT at a lower priority with its output in LOG, which is
# shown at the end. Fails if one of them fails; if COMMAND fails, PATIENT is still waited for.
set -euo pipefail

log=$1
nice -n 10 bash -c "exec $2" > "$log" 2>&1 &
patient=$!
trap 'kill "$patient" 2> /dev/null || :; cat "$log"' EXIT
trap 'exit 143' TERM

status=0
bash -c "exec $3" || status=$?
wait "$patient" || status=$?
exit "$status"
