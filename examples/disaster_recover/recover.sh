#!/bin/bash
# Starts again what has died of the job that run.sh has started, with the same variables and arguments.
#
#   bash recover.sh                every process of the job that does not run
#   bash recover.sh worker_1       only this one; also: bash recover.sh scheduler
#
# Read from the environment: the same as by run.sh, with the same values.
set -eu
cd "$(dirname "$0")"
SCRIPT=$PWD/train.py
cd "${WORK_DIR:-$PWD}"

export MS_WORKER_NUM=${WORKER_NUM:-4}
export MS_SCHED_HOST=${MS_SCHED_HOST:-127.0.0.1}
export MS_SCHED_PORT=${MS_SCHED_PORT:-8118}
export MS_ENABLE_RECOVERY=1
export MS_RECOVERY_PATH=${MS_RECOVERY_PATH:-./recovery/}

arguments=()
while IFS= read -r word; do
    [ -z "$word" ] || arguments+=("$word")
done < device/arguments

runs() { # a zombie counts as dead
    local status
    status=$(cat "/proc/$(cat "device/$1.pid")/status" 2> /dev/null) || return 1
    case $status in *State:?[ZX]*) return 1 ;; esac
}

start() {
    local role=MS_WORKER id=${1#worker_}
    if [ "$1" = scheduler ]; then role=MS_SCHED id=sched; fi
    MS_ROLE=$role MS_NODE_ID=$id "${PYTHON:-python3}" "$SCRIPT" "${arguments[@]}" >> "device/$1.log" 2>&1 &
    echo $! > "device/$1.pid"
    echo "started again: $1 (pid $!)"
}

sleep 1 # a process that was killed a moment ago is still there

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
    names=(scheduler)
    for ((i = 0; i < MS_WORKER_NUM; i++)); do names+=("worker_$i"); done
fi
for name in "${names[@]}"; do
    if runs "$name"; then
        echo "runs already: $name (pid $(cat "device/$name.pid"))"
    else
        start "$name"
    fi
done
