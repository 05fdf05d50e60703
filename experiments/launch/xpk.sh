#!/usr/bin/env bash
# Train on a GKE cluster through xpk. The workload restarts by itself; the same line again replaces it and resumes.
#
#   NAME=team CLUSTER=... PROJECT=... ZONE=... TYPE=v5litepod-256 IMAGE=... WORKDIR=gs://BUCKET/team \
#       CONFIG=experiments/configs/joyagents_r1.py:qwen2_5_3b experiments/launch/xpk.sh \
#       --config.team.backbone.path=gs://BUCKET/Qwen2.5-3B-Instruct
#
# IMAGE is built from docker/Dockerfile.tpu. SLICES=2 trains on several slices, with the data axis between them. STORAGE
# names a storage of the cluster (xpk storage attach) for a WORKDIR that is mounted.
set -euo pipefail
: "${NAME:?name of the workload, a DNS label}" "${CLUSTER:?cluster}" "${PROJECT:?project}" "${ZONE:?zone}"
: "${TYPE:?TPU type, as v5litepod-256}" "${IMAGE:?container image with this repository}"
: "${CONFIG:?experiments/configs/FILE.py:variant}" "${WORKDIR:?folder that every host has mounted, or a URL}"

train=(python -m experiments.train --config="$CONFIG" --workdir="$WORKDIR" "$@")
where=(--cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE")
xpk workload delete --workload="$NAME" "${where[@]}" --force || true # none of that name is as well

# xpk restarts after the codes of signals only, so 75 is added. It sends SIGTERM to the shell that runs the command:
# with exec that is the run itself. The grace period lets the run finish its step and save; spot machines give less.
xpk workload create --workload="$NAME" "${where[@]}" --tpu-type="$TYPE" --num-slices="${SLICES:-1}" \
    --docker-image="$IMAGE" --max-restarts="${RESTARTS:-20}" --restart-on-exit-codes=75 \
    --termination-grace-period-seconds="${GRACE:-900}" ${STORAGE:+--storage="$STORAGE"} \
    --command="exec $(printf '%q ' "${train[@]}")"
