#!/usr/bin/env bash
# Finding: after going back to an older step, orbax's CheckpointManager.save() saves nothing until the newest old step is passed, and only returns False.
# orbax-checkpoint 0.12.8, jax 0.10.2, CPU. Steps 1 to 4 are saved; step 2 is restored and trained on from there, as after a loss that diverged. save(3) and
# save(4) return False without a line, the folder keeps steps 3 and 4 of the training that was given up, and step 5 of the new one stands beside them. Who dies
# before step 5 is restored from the step 4 that was given up. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet orbax-checkpoint==0.12.8 jax==0.10.2
cat > show.py <<'PYTHON'
import importlib.metadata
import os

import numpy as np
import orbax.checkpoint as ocp

folder = os.path.abspath("checkpoints")


def manager():
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=3))


def saved(steps, sign):
    return [steps_manager.save(step, args=ocp.args.StandardSave({"weight": np.float32([sign * step])})) for step in steps]


print("orbax-checkpoint", importlib.metadata.version("orbax-checkpoint"), "jax", importlib.metadata.version("jax"))
with manager() as steps_manager:
    print("first training, save(1..4):", saved([1, 2, 3, 4], 1))
with manager() as steps_manager:
    steps_manager.restore(2, args=ocp.args.StandardRestore())
    again = saved([3, 4], -1)
    steps_manager.wait_until_finished()
    newest = steps_manager.latest_step()
    found = float(steps_manager.restore(newest, args=ocp.args.StandardRestore())["weight"][0])
    print("second training from step 2, save(3), save(4):", again, "| newest step:", newest, "of the", "first" if found > 0 else "second")
    later = saved([5], -1)
    steps_manager.wait_until_finished()
    kept = {step: float(steps_manager.restore(step, args=ocp.args.StandardRestore())["weight"][0]) for step in steps_manager.all_steps()}
    print("save(5):", later, "| steps in the folder, negative are the second training's:", kept)
assert again == [False, False] and newest == 4 and found == 4.0
assert later == [True] and kept == {3: 3.0, 4: 4.0, 5: -5.0}
PYTHON
JAX_PLATFORMS=cpu venv/bin/python show.py 2> /dev/null
