#!/usr/bin/env bash
# Train on a GKE cluster through xpk. The workload restarts by itself; the same line again replaces it and resumes.
#
#   NAME=team CLUSTER=... PROJECT=... ZONE=... TYPE=v5litepod-256 IMAGE=... CONFIG=... WORKDIR=/mnt/runs/team \
#       experiments/launch/xpk.sh [--config.key=value ...]
#
# IMAGE has the repository as its working folder, installed with: pip install '.[tpu,hf]'
set -euo pipefail
: "${NAME:?name of the workload, a DNS label}" "${CLUSTER:?cluster}" "${PROJECT:?project}" "${ZONE:?zone}"
: "${TYPE:?TPU type, as v5litepod-256}" "${IMAGE:?container image with this repository}"
: "${CONFIG:?experiments/configs/FILE.py:variant}" "${WORKDIR:?folder that every host has mounted}"

train=(python -m experiments.train --config="$CONFIG" --workdir="$WORKDIR" "$@")
where=(--cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE")
xpk workload delete --workload="$NAME" "${where[@]}" --force || true # none of that name is as well
xpk workload create --workload="$NAME" "${where[@]}" --tpu-type="$TYPE" --num-slices="${SLICES:-1}" \
    --docker-image="$IMAGE" --max-restarts="${RESTARTS:-20}" --command="$(printf '%q ' "${train[@]}")"
