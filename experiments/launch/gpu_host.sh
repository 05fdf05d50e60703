#!/usr/bin/env bash
# Train on this machine's GPUs (or its CPU), starting again after a crash. Run it again to resume. `python`
# is that of the environment that is active.
#
#   CONFIG=experiments/configs/joyagents_r1.py:qwen2_5_3b WORKDIR=runs/team experiments/launch/gpu_host.sh \
#       --config.team.parameter_sharing=shared --config.mesh.fsdp=2 --config.mesh.rollout_blocks=1
#
# These are the flags for 8 GPUs. The weights are those of the hub, or --config.team.backbone.path=FOLDER.
#
# On several machines without a scheduler: on each of them, with --coordinator=HOST:PORT --processes=N --process=I. When
# one dies the others end with 75, start again here and wait for it, --init_timeout seconds.
set -euo pipefail
: "${CONFIG:?experiments/configs/FILE.py:variant}" "${WORKDIR:?folder of the run}"
RESTARTS=${RESTARTS:-3}
cd "$(dirname "$0")/../.."

for attempt in $(seq 0 "$RESTARTS"); do
    status=0
    python -m experiments.train --config="$CONFIG" --workdir="$WORKDIR" "$@" || status=$?
    # 2: a wrong flag or configuration; 130: interrupted. Neither gets better by trying again. 75 asks for it.
    case $status in 0 | 2 | 130) exit "$status" ;; esac
    echo "attempt $attempt ended with $status" >&2
done
exit "$status"
