#!/usr/bin/env bash
# Train on a TPU slice that Compute Engine gives at once. The slice is made when it is not there. The same line again,
# after a preemption or a crash, makes a new slice where necessary and goes on from the newest checkpoint in WORKDIR.
#
#   NAME=team ZONE=... TYPE=v5litepod-256 CONFIG=experiments/configs/joyagents_r1.py:qwen2_5_3b WORKDIR=gs://BUCKET/team \
#       experiments/launch/tpu_vm.sh --config.team.backbone.path=gs://BUCKET/Qwen2.5-3B-Instruct
set -euo pipefail
: "${NAME:?name of the slice}" "${ZONE:?zone}" "${TYPE:?accelerator type, as v5litepod-256}"
: "${CONFIG:?experiments/configs/FILE.py:variant}" "${WORKDIR:?folder that every host has mounted, or a URL}"
VERSION=${VERSION:-v2-alpha-tpuv5-lite} # of the VM's image: v2-alpha-tpuv5 for v5p, v2-alpha-tpuv6e for v6e
QUEUED=${QUEUED:-}                      # 1 where queued_resources.sh asks for slices, and this script does not

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/gcloud_state.sh"
train=(python -m experiments.train --config="$CONFIG" --workdir="$WORKDIR" "$@")
tpu() { gcloud compute tpus tpu-vm "$@" --zone="$ZONE"; }
make() { tpu create "$NAME" --accelerator-type="$TYPE" --version="$VERSION" ${SPOT:+--spot}; }

found=$(gcloud_state 'value(state)' tpu describe "$NAME")
case $QUEUED:$found in
    *:READY) ;;
    1:*)
        echo "$NAME: expected a slice that is READY, found ${found:-none}" >&2
        exit 1
        ;;
    :) make ;;
    :PREEMPTED | :TERMINATED) # it stays there, without machines
        tpu delete "$NAME" --quiet
        make
        ;;
    *)
        echo "$NAME: the slice is $found; try again when it is READY" >&2
        exit 1
        ;;
esac

code=$(mktemp -d)
trap 'rm -rf "$code"' EXIT
git archive --output="$code/code.tar.gz" HEAD
tpu scp "$code/code.tar.gz" "$NAME:code.tar.gz" --worker=all

# The same command on every host: the processes find each other.
tpu ssh "$NAME" --worker=all --command="
    set -e
    mkdir -p jaxmarl_llm && tar -xzf code.tar.gz -C jaxmarl_llm
    exec bash jaxmarl_llm/experiments/launch/on_host.sh $(printf '%q ' "${train[@]}")"
