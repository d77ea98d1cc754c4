#!/usr/bin/env bash
# Finding: DeepSpeed's zero_to_fp32 leaves frozen parameters out of a ZeRO-1 checkpoint, without a word.
# deepspeed 0.19.8, torch 2.13.0, CPU, one rank. A network with a frozen layer is trained and saved by engine.save_checkpoint(). At stages 2
# and 3 get_fp32_state_dict_from_zero_checkpoint() has all parameters; at stage 1 the frozen ones are missing from its result (they
# are in mp_rank_00_model_states.pt): load_state_dict(strict=False) then keeps their random initial values. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy 'setuptools<82' wheel
DS_BUILD_OPS=0 venv/bin/pip install --quiet --no-build-isolation --no-deps deepspeed==0.19.8
venv/bin/pip install --quiet hjson==3.1.0 einops==0.8.2 msgpack py-cpuinfo tqdm ninja psutil pydantic packaging
cat > show.py <<'PYTHON'
import contextlib, io, os, sys
import torch
from torch import nn
import deepspeed
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

deepspeed.init_distributed("gloo")
names = {}
for stage in (1, 2, 3):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    config["zero_force_ds_cpu_optimizer"] = False
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.save_checkpoint(f"stage{stage}")
    with contextlib.redirect_stdout(io.StringIO()):
        names[stage] = sorted(get_fp32_state_dict_from_zero_checkpoint(f"stage{stage}"))
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for stage, found in names.items():
    print(f"stage {stage}: {', '.join(found)}")
whole = ["0.bias", "0.weight", "1.bias", "1.weight"]
sys.exit(names != {1: whole[2:], 2: whole, 3: whole})
PYTHON
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29719 venv/bin/python show.py 2> errors | grep -E "^(deepspeed|stage)" || { tail -5 errors >&2; exit 1; }
