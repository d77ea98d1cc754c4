#!/usr/bin/env bash
# Finding: load_state_dict of lhotse's samplers takes the state apart: the dict that it was given is empty afterwards, and loading it once more raises KeyError.
# lhotse 1.33.0, torch 2.13.0, CPU. A job that keeps its checkpoint in memory and loads it twice (a retry after an error, a recovery in place, one state for the
# samplers of two loaders), or writes it again after the load, has lost the sampler's place. A copy (copy.deepcopy) for each load goes on exactly.
# All samplers do so: simple, dynamic, bucketing, and those that combine others. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy urllib3 lhotse==1.33.0
cat > show.py <<'PYTHON'
import copy

import lhotse
import torch
from lhotse import CutSet
from lhotse.dataset import DynamicBucketingSampler, DynamicCutSampler, RoundRobinSampler, SimpleCutSampler, ZipSampler
from lhotse.testing.dummies import dummy_cut

cuts = CutSet.from_cuts(dummy_cut(number, duration=1 + number * 7 % 5) for number in range(60)).to_eager()
options = dict(max_duration=12, shuffle=True, seed=0)
samplers = {
    "SimpleCutSampler": lambda: SimpleCutSampler(cuts, **options),
    "DynamicCutSampler": lambda: DynamicCutSampler(cuts, **options),
    "DynamicBucketingSampler": lambda: DynamicBucketingSampler(cuts, num_buckets=3, **options),
    "RoundRobinSampler": lambda: RoundRobinSampler(SimpleCutSampler(cuts, **options), SimpleCutSampler(cuts, **options)),
    "ZipSampler": lambda: ZipSampler(SimpleCutSampler(cuts, **options), SimpleCutSampler(cuts, **options)),
}
print("lhotse", lhotse.__version__, "torch", torch.__version__)
for name, make in samplers.items():
    whole = [str(batch) for batch in make()]
    stopped = make()
    batches = iter(stopped)
    for _ in range(3):
        next(batches)
    state = stopped.state_dict()
    had = len(state)
    first = make()
    first.load_state_dict(copy.deepcopy(state))
    assert [str(batch) for batch in first] == whole[3:]
    make().load_state_dict(state)
    try:
        make().load_state_dict(state)
        again = "works"
    except KeyError as error:
        again = f"KeyError: {error}"
    print(f"{name}: {had} members before the load, {len(state)} after it; the second load: {again}")
    assert had > 0 and not state and again.startswith("KeyError")
PYTHON
venv/bin/python show.py 2> /dev/null
