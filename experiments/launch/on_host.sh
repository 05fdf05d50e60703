#!/usr/bin/env bash
# On one host of a TPU slice, called by tpu_vm.sh: install this checkout, end the run that is still there, and train.
#
#   experiments/launch/on_host.sh python -m experiments.train FLAGS
#
# The run does not end with the connection that started it. Its output is in train.log, that of the run before in
# train.log.1. The exit code is that of the run.
set -euo pipefail
cd "$(dirname "$0")/../.."
END=${END:-900} # most seconds that an earlier run gets to finish its step and save

# The package needs Python 3.11; images for TPUs may have 3.10. uv brings its own.
environment() {
    local python
    for python in python3.13 python3.12 python3.11 python3; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        if "$python" -m venv --clear .venv; then return; fi
    done
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --clear --seed --python 3.12 .venv
}
running() { grep -qs experiments.train "/proc/$1/cmdline"; } # not another process that has its number now

# Two runs on a host would wait for each other's chips.
if [ -s train.pid ] && running "$(cat train.pid)"; then
    kill "$(cat train.pid)"
    for _ in $(seq "$END"); do
        running "$(cat train.pid)" || break
        sleep 1
    done
    kill -9 "$(cat train.pid)" 2>/dev/null || true
fi

[ -x .venv/bin/pip ] || environment
# shellcheck source=/dev/null
. .venv/bin/activate
pip install --quiet -e '.[tpu,hf,gcs]'

rm -f train.pid train.code
[ ! -f train.log ] || mv train.log train.log.1
# shellcheck disable=SC2016 # expanded by the inner shell
setsid bash -c '"$@" & echo $! >train.pid; code=0; wait $! || code=$?; echo $code >train.code' run "$@" \
    >train.log 2>&1 </dev/null &
until [ -s train.pid ]; do sleep 0.1; done
tail -n +1 -f --pid="$(cat train.pid)" train.log
until [ -s train.code ]; do sleep 0.1; done
exit "$(cat train.code)"
