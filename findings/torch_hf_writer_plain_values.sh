#!/usr/bin/env bash
# Finding: a plain value in the state makes torch's HuggingFaceStorageWriter write a file that nothing can read, without a word.
# torch 2.13.0, safetensors 0.8.0. {"w": tensor, "step": 7} is a state that torch.distributed.checkpoint saves with its usual writer. With
# HuggingFaceStorageWriter the save ends without an error too, but the bytes of "step" are put in front of the safetensors header:
# safetensors and HuggingFaceStorageReader refuse the file, the weights in it included. Exits with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 safetensors==0.8.0 numpy
cat > show.py <<'PYTHON'
import os, sys, warnings
import safetensors, torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

warnings.simplefilter("ignore")
print("torch", torch.__version__, "safetensors", safetensors.__version__)
save({"w": torch.ones(2), "step": 7}, storage_writer=HuggingFaceStorageWriter("saved"), no_dist=True)
print("saved:", sorted(os.listdir("saved")))
try:
    print("read:", load_file("saved/model-00001-of-00001.safetensors"))
except safetensors.SafetensorError as error:
    print("read: SafetensorError:", error)
    sys.exit(0)
sys.exit(1)
PYTHON
venv/bin/python show.py 2> /dev/null
