#!/usr/bin/env bash
# Finding: SIGTERM to `accelerate launch` ends the launcher and not the training: the script runs on as an orphan that has heard nothing.
# accelerate 1.15.0, torch 2.13.0, CPU, one process. The launcher dies of it at once; the script, which has a handler for SIGTERM, is not told and goes
# on under another parent. A platform that signals the process which it has started sees the job end, and starts the next one next to the old one:
# two writers of one checkpoint folder. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy packaging psutil pyyaml huggingface_hub safetensors
venv/bin/pip install --quiet --no-deps accelerate==1.15.0
cat > train.py <<'PYTHON'
import os, signal, time

heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
with open("started", "w") as file:
    file.write(str(os.getpid()))
os.rename("started", "pid")
while not os.path.exists("enough"):
    time.sleep(0.1)
with open("report", "w") as file:
    file.write("heard SIGTERM: %s, parent is the launcher: %s" % (bool(heard), os.getppid() == int(os.environ["LAUNCHER"])))
os.rename("report", "end")
PYTHON
cat > show.py <<'PYTHON'
import os, signal, subprocess, sys, time
import accelerate, torch


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.1)
    with open(path) as file:
        return file.read()


words = "--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no train.py".split()
command = 'export LAUNCHER=$$; exec "$@"'
python = [sys.executable, "-m", "accelerate.commands.launch", *words]
launcher = subprocess.Popen(["sh", "-c", command, "sh", *python], stderr=subprocess.DEVNULL)
pid = int(wait_for("pid"))
launcher.send_signal(signal.SIGTERM)
code = launcher.wait()
os.kill(pid, 0)  # raises if the script is gone
open("enough", "w").close()
print("accelerate", accelerate.__version__, "torch", torch.__version__)
print("exit code of the launcher after SIGTERM:", code if code >= 0 else f"signal {-code}")
report = wait_for("end")
print("the script runs on;", report)
sys.exit(report != "heard SIGTERM: False, parent is the launcher: False")
PYTHON
venv/bin/python show.py
