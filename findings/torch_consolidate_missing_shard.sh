#!/usr/bin/env bash
# Finding: torch's consolidate_safetensors_files writes zeros where one rank's shard is missing, and says nothing.
# torch 2.13.0, safetensors 0.8.0. A job of 3 ranks saves with HuggingFaceStorageWriter(save_distributed=True), one file a rank. The middle
# file is lost (a copy that was cut off). The consolidation ends without an error; its model.safetensors has the right shape, and
# zeros in the rows of that rank. Without the last file the tensor is shorter. The shards do not say how many there were.
# Exits with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 safetensors==0.8.0 numpy
cat > save.py <<'PYTHON'
import torch, torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (3,))
weight = distribute_tensor(torch.arange(1.0, 13.0).reshape(6, 2), mesh, [Shard(0)])
save({"weight": weight}, storage_writer=HuggingFaceStorageWriter("shards", save_distributed=True))
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 3 save.py 2> /dev/null
cat > show.py <<'PYTHON'
import os, shutil, sys
import safetensors, torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

print("torch", torch.__version__, "safetensors", safetensors.__version__)
found = {}
for lost in (2, 3):
    shutil.copytree("shards", f"without{lost}")
    os.remove(f"without{lost}/shard-0000{lost}-model-00001-of-00001.safetensors")
    os.mkdir(f"whole{lost}")
    consolidate_safetensors_files(f"without{lost}", f"whole{lost}", fqn_to_index_mapping={"weight": 1})
    found[lost] = load_file(f"whole{lost}/model-00001-of-00001.safetensors")["weight"].tolist()
    print(f"without the file of rank {lost - 1}:", found[lost])
expected = {2: [[1, 2], [3, 4], [0, 0], [0, 0], [9, 10], [11, 12]], 3: [[1, 2], [3, 4], [5, 6], [7, 8]]}
sys.exit(found != expected)
PYTHON
venv/bin/python show.py 2> /dev/null
