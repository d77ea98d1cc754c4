#!/usr/bin/env bash
# Finding: with round_robin_gradients the param_slice_mappings in DeepSpeed's ZeRO-1/2 checkpoints name the places of other parameters.
# deepspeed 0.19.8, torch 2.13.0, CPU, two ranks, float32. Each rank's file says where the part of each parameter is in its flat vector
# (param_slice_mappings; ds_to_universal.py cuts by it). With "round_robin_gradients": true the vector is in round-robin order and
# the places are those of the plain order: parameters cut by them are not the module's, and nothing is said. The order in param_shapes
# (zero_to_fp32.py adds up by it) is right. Exits with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy 'setuptools<82' wheel
DS_BUILD_OPS=0 venv/bin/pip install --quiet --no-build-isolation --no-deps deepspeed==0.19.8
venv/bin/pip install --quiet hjson==3.1.0 einops==0.8.2 msgpack py-cpuinfo tqdm ninja psutil pydantic packaging
cat > train.py <<'PYTHON'
import sys
import deepspeed, torch
from torch import nn

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
zero = {"stage": 1, "round_robin_gradients": sys.argv[1] == "round_robin"}
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
config["zero_force_ds_cpu_optimizer"] = False
engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config)
engine.backward(engine(torch.ones(2, 3)).sum())
engine.step()
engine.save_checkpoint(sys.argv[1], tag="step1")
torch.distributed.destroy_process_group()
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
for order in plain round_robin; do
    venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 train.py "$order" > log 2>&1 || { tail -5 log >&2; exit 1; }
done
cat > show.py <<'PYTHON'
import sys
import deepspeed, torch

print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
differ = {}
for order in ("plain", "round_robin"):
    module = torch.load(f"{order}/step1/mp_rank_00_model_states.pt", weights_only=False)["module"]
    parts = {}
    for rank in range(2):
        file = f"{order}/step1/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(file, weights_only=False)["optimizer_state_dict"]
        for flat, places in zip(state["single_partition_of_fp32_groups"], state["param_slice_mappings"]):
            for name, place in places.items():
                parts.setdefault(name, []).append(flat[place.start : place.start + place.numel])
    differ[order] = [name for name in module if not torch.equal(torch.cat(parts[name]), module[name].flatten())]
    print(f"{order}: cut by param_slice_mappings, other values than in the module: {', '.join(differ[order]) or 'none'}")
sys.exit(not (differ["round_robin"] and not differ["plain"]))
PYTHON
venv/bin/python show.py 2> /dev/null | grep -v WARNING; exit "${PIPESTATUS[0]}"
