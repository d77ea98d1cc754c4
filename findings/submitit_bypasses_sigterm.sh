#!/usr/bin/env bash
# Finding: a function that submitit runs does not hear SIGTERM: submitit logs "Bypassing signal SIGTERM", and the function runs on.
# submitit 1.5.4, LocalExecutor. A job that is 10 s long gets SIGTERM in its first second, as from scancel, a preemption or a node that shuts down, and
# ends by itself with its result. What was meant as 30 s to save is 30 s of training, and then SIGKILL; only the signal that submitit asks
# Slurm for (SIGUSR2 at the time limit) reaches checkpoint(). Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet cloudpickle typing_extensions
venv/bin/pip install --quiet --no-deps submitit==1.5.4
cat > show.py <<'PYTHON'
import os, signal, sys, time
from pathlib import Path
import submitit


def train():
    Path("pid").write_text(str(os.getpid()))
    os.rename("pid", "ready")
    end = time.monotonic() + 10
    while time.monotonic() < end:
        time.sleep(0.1)
    return "ran to its end"


if __name__ == "__main__":
    executor = submitit.LocalExecutor(folder="logs")
    executor.update_parameters(timeout_min=5)
    job = executor.submit(train)
    while not os.path.exists("ready"):
        time.sleep(0.1)
    os.kill(int(Path("ready").read_text()), signal.SIGTERM)
    result = job.result()
    said = [line for line in job.stderr().splitlines() if "SIGTERM" in line]
    print("submitit", submitit.__version__)
    print(*said, sep="\n")
    print("the function, after SIGTERM:", result)
    sys.exit(not (said and result == "ran to its end"))
PYTHON
venv/bin/python show.py
