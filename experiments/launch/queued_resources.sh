#!/usr/bin/env bash
# Ask for a TPU slice, wait until it is given, train, and ask again when it was taken away (spot). Every round resumes
# from the newest checkpoint in WORKDIR. Variables and flags as in tpu_vm.sh; SPOT=1 asks for spot capacity.
set -euo pipefail
: "${NAME:?name of the slice}" "${ZONE:?zone}" "${TYPE:?accelerator type, as v5litepod-256}"
: "${CONFIG:?experiments/configs/FILE.py:variant}" "${WORKDIR:?folder that every host has mounted, or a URL}"
VERSION=${VERSION:-v2-alpha-tpuv5-lite}
ROUNDS=${ROUNDS:-20}      # most times that the run is started
WAIT=${WAIT:-60}          # seconds between looks at the queue
PATIENCE=${PATIENCE:-900} # seconds in which the queue may still call a slice ACTIVE that was taken away

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/gcloud_state.sh"
queue() { gcloud compute tpus queued-resources "$@" --zone="$ZONE"; }
state() { gcloud_state 'value(state.state)' queue describe "$NAME"; }
gone() { # whether the queue says, within PATIENCE seconds, that the slice was taken away
    local waited
    for ((waited = 0; waited <= PATIENCE; waited += WAIT)); do
        case $(state) in ACTIVE | UNKNOWN) sleep "$WAIT" ;; *) return 0 ;; esac
    done
    return 1
}
given() { # wait until the slice is there; 1 where a request fails, or the slice was taken away
    local now
    while true; do
        now=$(state)
        case $now in
            ACTIVE) return 0 ;;
            FAILED | SUSPENDED)
                queue delete "$NAME" --force --quiet
                return 1
                ;;
            "")
                queue create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$VERSION" \
                    ${SPOT:+--spot} || return 1
                ;;
            *) sleep "$WAIT" ;;
        esac
    done
}

for round in $(seq "$ROUNDS"); do
    given || { sleep "$WAIT" && continue; }
    # tpu_vm.sh finds the slice and runs: python -m experiments.train --config="$CONFIG" --workdir="$WORKDIR"
    status=0
    QUEUED=1 "$here/tpu_vm.sh" "$@" || status=$?
    case $status in
        0)
            echo "finished in round $round; delete the slice with: gcloud compute tpus queued-resources delete $NAME --force"
            exit 0
            ;;
        2)
            echo "the input is wrong: see the output of the run" >&2
            exit 2
            ;;
        75) ;; # nothing is wrong: run it again
        255) gone || true ;; # ssh was lost: the slice, or the connection alone; the next round ends what still runs
        *) gone || { echo "the run failed on a slice that is well: see its output" >&2 && exit 1; } ;;
    esac
done
echo "gave up after $ROUNDS rounds" >&2
exit 1
