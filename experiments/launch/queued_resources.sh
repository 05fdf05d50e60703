#!/usr/bin/env bash
# Ask for a TPU slice, wait until it is given, train, and ask again when it was taken away (spot). Every round resumes
# from the newest checkpoint in WORKDIR. Variables as in tpu_vm.sh; SPOT=1 asks for spot capacity.
set -euo pipefail
: "${NAME:?name of the slice}" "${ZONE:?zone}" "${TYPE:?accelerator type, as v5litepod-16}"
: "${CONFIG:?experiments/configs/FILE.py:variant}" "${WORKDIR:?folder that every host has mounted}"
VERSION=${VERSION:-v2-alpha-tpuv5-lite}
ROUNDS=${ROUNDS:-20} # most times that the slice is asked for
WAIT=${WAIT:-60}     # seconds between looks at the queue

here=$(cd "$(dirname "$0")" && pwd)
queue() { gcloud compute tpus queued-resources "$@" --zone="$ZONE"; }
state() { queue describe "$NAME" --format='value(state.state)' 2>/dev/null || true; }

for round in $(seq "$ROUNDS"); do
    case $(state) in
        FAILED | SUSPENDING | SUSPENDED) queue delete "$NAME" --force --quiet ;;
    esac
    [ -n "$(state)" ] ||
        queue create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$VERSION" ${SPOT:+--spot}
    until [ "$(state)" = ACTIVE ]; do
        case $(state) in FAILED | SUSPENDING | SUSPENDED) continue 2 ;; esac
        sleep "$WAIT"
    done
    # tpu_vm.sh finds the slice and runs: python -m experiments.train --config="$CONFIG" --workdir="$WORKDIR"
    status=0
    "$here/tpu_vm.sh" "$@" || status=$?
    if [ "$status" -eq 0 ]; then
        echo "finished in round $round; delete the slice with: gcloud compute tpus queued-resources delete $NAME --force"
        exit 0
    fi
    [ "$status" -ne 75 ] || continue # nothing is wrong: run it again
    [ "$(state)" != ACTIVE ] || { echo "the run failed on a slice that is well: see its output" >&2; exit 1; }
done
echo "gave up after $ROUNDS rounds" >&2
exit 1
