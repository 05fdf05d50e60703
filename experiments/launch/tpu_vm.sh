#!/usr/bin/env bash
# Train on a TPU slice that Compute Engine gives at once. The slice is made when it is not there; run the same line
# again after a preemption or a crash, and training goes on from the newest checkpoint in WORKDIR.
#
#   NAME=team ZONE=... TYPE=v5litepod-16 CONFIG=experiments/configs/joyagents_r1.py:qwen2_5_3b WORKDIR=/mnt/runs/team \
#       experiments/launch/tpu_vm.sh [--config.key=value ...]
set -euo pipefail
: "${NAME:?name of the slice}" "${ZONE:?zone}" "${TYPE:?accelerator type, as v5litepod-16}"
: "${CONFIG:?experiments/configs/FILE.py:variant}" "${WORKDIR:?folder that every host has mounted}"
VERSION=${VERSION:-v2-alpha-tpuv5-lite} # of the VM's image: v2-alpha-tpuv5 for v5p, v2-alpha-tpuv6e for v6e

train=(python -m experiments.train --config="$CONFIG" --workdir="$WORKDIR" "$@")
tpu() { gcloud compute tpus tpu-vm "$@" --zone="$ZONE"; }

tpu describe "$NAME" >/dev/null 2>&1 ||
    tpu create "$NAME" --accelerator-type="$TYPE" --version="$VERSION" ${SPOT:+--spot}

code=$(mktemp -d)
trap 'rm -rf "$code"' EXIT
git archive --output="$code/code.tar.gz" HEAD
tpu scp "$code/code.tar.gz" "$NAME:code.tar.gz" --worker=all

# The same command on every host: the processes find each other. A run that is still there is stopped first, which takes
# it to the end of its step: two of them would wait for each other's chips.
tpu ssh "$NAME" --worker=all --command="
    set -e
    mkdir -p jaxmarl_llm && tar -xzf code.tar.gz -C jaxmarl_llm && cd jaxmarl_llm
    if [ -f train.pid ]; then
        kill \$(cat train.pid) 2>/dev/null || true
        for i in \$(seq 300); do kill -0 \$(cat train.pid) 2>/dev/null || break; sleep 1; done
        kill -9 \$(cat train.pid) 2>/dev/null || true
    fi
    [ -d .venv ] || python3 -m venv .venv
    . .venv/bin/activate && pip install --quiet -e '.[tpu,hf]'
    echo \$\$ >train.pid
    exec $(printf '%q ' "${train[@]}")"
