#!/usr/bin/env bash
# Finding: the state_dict of PyG's TGNMemory, taken in training, lacks the messages of the last batches, and to call eval() and train() again drops them.
# torch-geometric 2.7.0, torch 2.13.0, CPU. In training a node's last message waits in msg_s_store and msg_d_store, two dicts that are in no state_dict,
# until its next event: the loaded memory answers as if the last batch had not been. eval() applies and clears them, so an evaluation between two
# batches of an epoch makes the next gradient of the recurrent cell another one. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy tqdm jinja2 psutil pyparsing requests aiohttp fsspec xxhash
venv/bin/pip install --quiet --no-deps torch-geometric==2.7.0
cat > show.py <<'PYTHON'
import copy, sys
import torch
import torch_geometric
from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator, TGNMemory

NODES = torch.arange(4)


def memory(state=None):
    torch.manual_seed(0)
    found = TGNMemory(4, 2, 3, 3, message_module=IdentityMessage(2, 3, 3), aggregator_module=LastAggregator())
    found.train()
    if state is None:
        times, messages = torch.tensor([1, 2]), torch.ones(2, 2)
        found.update_state(torch.tensor([0, 1]), torch.tensor([2, 3]), times, messages)
    else:
        found.load_state_dict(copy.deepcopy(state))
    return found


def answer(module):
    """Memory of all nodes, and the size of the gradient that it gives to the recurrent cell."""
    value, _ = module(NODES)
    gradient = torch.autograd.grad(value.sum(), module.gru.weight_ih, allow_unused=True)[0] if value.requires_grad else None
    return value.detach(), 0.0 if gradient is None else float(gradient.norm())


trained, evaluated = memory(), memory()
loaded = memory(trained.state_dict())
evaluated.eval()
evaluated.train()
print("torch-geometric", torch_geometric.__version__, "torch", torch.__version__)
(value, gradient), (its_value, _), (_, its_gradient) = map(answer, (trained, loaded, evaluated))
print("memory of node 0:", value[0].tolist(), "loaded:", its_value[0].tolist())
print("gradient of the recurrent cell: %.4f, after eval() and train(): %.4f" % (gradient, its_gradient))
sys.exit(torch.equal(value, its_value) or gradient == its_gradient)
PYTHON
venv/bin/python show.py
