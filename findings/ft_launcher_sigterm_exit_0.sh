#!/usr/bin/env bash
# Finding: a job that SIGTERM stops in mid-training under NVIDIA's ft_launcher is reported as finished: the launcher leaves with 0.
# nvidia-resiliency-ext 0.4.1, torch 2.13.0+cpu, two workers on one node. ft_launcher takes torchrun's place and arguments. SIGTERM to it reaches the
# workers; they save and leave with 0, as programs with a handler do. torchrun then leaves with 1 (SignalException), ft_launcher with 0 ("exiting
# without an error"), so a platform that restarts what failed (Kubernetes, Slurm with a requeue) takes the job for done. It also gives its workers
# 1800 s before it kills them, where torchrun gives 30 s. Workers that leave with 3 make 1 of both. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
venv/bin/pip install --quiet nvidia-resiliency-ext==0.4.1
cat > train.py <<'PYTHON'
import os, signal, sys, time


def leave(number, frame):
    print("saved, leaves with", sys.argv[1], flush=True)
    sys.exit(int(sys.argv[1]))


signal.signal(signal.SIGTERM, leave)
print("ready", os.environ["RANK"], flush=True)
while True:
    time.sleep(0.2)
PYTHON
stopped() {  # LAUNCHER CODE: what the launcher leaves with when it is stopped and its workers leave with CODE
    : > log
    "venv/bin/$1" --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 train.py "$2" > log 2>&1 & launcher=$!
    until [ "$(grep -c '^ready' log)" = 2 ]; do sleep 0.2; done
    kill -TERM "$launcher"
    code=0
    wait "$launcher" || code=$?
    [ "$(grep -c '^saved' log)" = 2 ]
    echo "$1, workers leave with $2: $code $(grep -o 'timeout [0-9]* sec' log || true)" >&2
    echo "$code"
}
[ "$(stopped torchrun 0)" = 1 ]
[ "$(stopped ft_launcher 0)" = 0 ]
[ "$(stopped torchrun 3)" = 1 ]
[ "$(stopped ft_launcher 3)" = 1 ]
