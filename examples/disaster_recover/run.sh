#!/bin/bash
# Starts 1 scheduler and WORKER_NUM workers of train.py on this machine; arguments go to train.py.
#
#   bash run.sh                    logs: device/scheduler.log, device/worker_0.log, ...
#   kill -9 "$(cat device/worker_1.pid)"
#   bash recover.sh                starts what has died; the others have waited for it
#
# Read from the environment: WORKER_NUM (4), MS_SCHED_HOST (127.0.0.1), MS_SCHED_PORT (8118), PYTHON (python3).
set -eu
cd "$(dirname "$0")"
SCRIPT=$PWD/train.py
cd "${WORK_DIR:-$PWD}"

export MS_WORKER_NUM=${WORKER_NUM:-4}
export MS_SCHED_HOST=${MS_SCHED_HOST:-127.0.0.1}
export MS_SCHED_PORT=${MS_SCHED_PORT:-8118}
export MS_ENABLE_RECOVERY=1
export MS_RECOVERY_PATH=${MS_RECOVERY_PATH:-./recovery/}

rm -rf device
mkdir -p device
printf '%s\n' "$@" > device/arguments

MS_ROLE=MS_SCHED MS_NODE_ID=sched "${PYTHON:-python3}" "$SCRIPT" "$@" > device/scheduler.log 2>&1 &
echo $! > device/scheduler.pid
for ((i = 0; i < MS_WORKER_NUM; i++)); do
    MS_ROLE=MS_WORKER MS_NODE_ID=$i "${PYTHON:-python3}" "$SCRIPT" "$@" > "device/worker_$i.log" 2>&1 &
    echo $! > "device/worker_$i.pid"
done
echo "started: 1 scheduler and $MS_WORKER_NUM workers; see device/"
