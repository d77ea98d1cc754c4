#!/bin/bash
# Trains on WORKER_NUM ranks of this machine; arguments go to mindio_ttp_case.py.
#
#   bash msrun.sh                  each rank prints its pid and its loss
#   kill -9 PID                    any rank, also 0: the others save their last step into ./ttp_checkpoints, the job ends
#   bash msrun-resume.sh           goes on from there
#
# Read from the environment: WORKER_NUM (4), WORK_DIR (this folder), PYTHON (python3).
set -eu
cd "$(dirname "$0")"
SCRIPT=$PWD/mindio_ttp_case.py
cd "${WORK_DIR:-$PWD}"

export MS_ENABLE_TFT='{TTP:1}'
export MINDIO_FOR_MINDSPORE=1

# Without --max-restarts 0 the agent would start the ranks again by itself.
exec "${PYTHON:-python3}" -m mindx_elastic run --standalone --nproc-per-node "${WORKER_NUM:-4}" --max-restarts 0 "$SCRIPT" "$@"
