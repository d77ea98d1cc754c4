#!/usr/bin/env bash
# Finding: DLRover's ElasticDistributedSampler, resumed from a checkpoint of an epoch's last batch, gives most of that epoch once more.
# dlrover 0.6.1, torch 2.13.0+cpu, one process, 10 samples in batches of 4 (the last one has 2). state_dict(iter_step, micro_batch_size) counts
# whole batches: 3 x 4 = 12 samples are done of 10. load_state_dict takes that modulo 10 and goes on after sample 2: 8 samples come a second time in
# the epoch that was finished. With 12 samples, which the batch divides, the rest is empty, as it should be. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
venv/bin/pip install --quiet dlrover==0.6.1
cat > show.py <<'PYTHON'
from importlib.metadata import version

from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from torch.utils.data import DataLoader


def resumed_at_the_end(num_samples):
    sampler = ElasticDistributedSampler(range(num_samples), num_replicas=1, rank=0)
    batches = [batch.tolist() for batch in DataLoader(range(num_samples), batch_size=4, sampler=sampler)]
    state = sampler.state_dict(len(batches), 4)
    again = ElasticDistributedSampler(range(num_samples), num_replicas=1, rank=0)
    again.load_state_dict(state)
    rest = list(again)
    print(num_samples, "samples: the epoch", batches, "| state", state, "| still to come", rest)
    return [index for batch in batches for index in batch], rest


print("dlrover", version("dlrover"))
epoch, rest = resumed_at_the_end(10)
assert rest == epoch[2:]
assert resumed_at_the_end(12)[1] == []
PYTHON
venv/bin/python show.py 2> /dev/null
