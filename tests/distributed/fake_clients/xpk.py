"""As xpk with its JobSet on one machine: one pod, whose container runs the command in the shell text of xpk.

$CLOUD/term: the first pod is told to end, as by kubelet, once it has written $CLOUD/started. $CLOUD/pods gets the exit
code of every pod, $CLOUD/calls the arguments. Unknown flags end it, as they end xpk.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CLOUD = Path(os.environ["CLOUD"])
POD = """
_sigterm() (kill -SIGTERM $! 2>/dev/null;);
trap _sigterm SIGTERM;
({command}) & PID=$!;
while kill -0 $PID 2>/dev/null; do sleep 0.1; done;
wait $PID;
exit $?
"""


def arguments():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("path", nargs=2)
    for name in ("workload", "cluster", "project", "zone"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--force", action="store_true")
    for name, default in (("num-slices", "1"), ("max-restarts", "0"), ("termination-grace-period-seconds", "30")):
        parser.add_argument(f"--{name}", default=default)
    for name in ("tpu-type", "docker-image", "command", "restart-on-exit-codes", "storage"):
        parser.add_argument(f"--{name}")
    return parser.parse_args()


def pod(command, grace):
    """Exit code of a pod."""
    shell = subprocess.Popen(["bash", "-c", POD.format(command=command)], start_new_session=True)
    term = CLOUD / "term"
    if term.exists():
        term.unlink()
        while not (CLOUD / "started").exists():
            time.sleep(0.02)
        shell.send_signal(signal.SIGTERM)
    try:
        return shell.wait(grace)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # a container ends with its first process


def main():
    with open(CLOUD / "calls", "a") as calls:
        print("xpk", *sys.argv[1:], file=calls)
    given = arguments()
    if given.path == ["workload", "delete"]:
        sys.exit(1)  # none of that name
    restarts = {42, *range(127, 256), *map(int, (given.restart_on_exit_codes or "42").split(","))}
    for _ in range(int(given.max_restarts) + 1):
        code = pod(given.command, float(given.termination_grace_period_seconds))
        with open(CLOUD / "pods", "a") as pods:
            print(code, file=pods)
        if code not in restarts:
            break


if __name__ == "__main__":
    main()
