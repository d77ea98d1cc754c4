#!/usr/bin/env bash
# Finding: making a MONAI DataLoader without worker processes puts torch's global generator back to its seed.
# monai 1.6.1, torch 2.13.0, CPU. After torch.manual_seed(7) and some draws, DataLoader(dataset, batch_size=2) is made; the next numbers are those
# right after the seed again. It is not said, and torch's own DataLoader leaves the stream alone. A program that makes its loader in
# each epoch, or after its random state was restored, uses the same dropout masks and shuffles again and again; with num_workers=1 the stream is left
# alone. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
venv/bin/pip install --quiet --no-deps monai==1.6.1
cat > show.py <<'PYTHON'
import sys
import monai, torch
from monai.data import DataLoader, Dataset

samples = list(range(8))


def numbers_after(make):
    torch.manual_seed(7)
    first = torch.rand(3)
    torch.rand(100)
    expected = torch.random.get_rng_state()
    make()
    moved = not torch.equal(torch.random.get_rng_state(), expected)
    return moved, torch.equal(torch.rand(3), first)


print("monai", monai.__version__, "torch", torch.__version__)
rewound = {}
for what, make in {
    "torch's DataLoader": lambda: torch.utils.data.DataLoader(samples, batch_size=2),
    "monai's, 1 worker": lambda: DataLoader(Dataset(samples), batch_size=2, num_workers=1),
    "monai's, 0 workers": lambda: DataLoader(Dataset(samples), batch_size=2),
}.items():
    rewound[what] = numbers_after(make)
    print(f"{what}: the stream has moved: {rewound[what][0]}, and is at its seed again: {rewound[what][1]}")
sys.exit([*rewound.values()] != [(False, False), (False, False), (True, True)])
PYTHON
venv/bin/python show.py
