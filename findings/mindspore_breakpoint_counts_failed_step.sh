#!/usr/bin/env bash
# Finding: the breakpoint checkpoint of MindSpore's CheckpointConfig(exception_save=True) counts the step that failed; its weights do not have it.
# mindspore 2.10.0, CPU, PyNative mode, dataset_sink_mode=False. The network's forward raises in step 3. The file is net-1_3_breakpoint.ckpt and its
# step_num is 3, its weights and the optimizer's global_step are those after step 2: who goes on at step 4 leaves a batch out. An exception in a
# callback after step 3 gives the same name and numbers with the weights of step 3. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet mindspore==2.10.0 numpy==1.26.4 scipy==1.13.1
cat > show.py <<'PYTHON'
import os

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint

ms.set_device("CPU")
ms.set_context(mode=ms.PYNATIVE_MODE)


class Numbers:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return np.full((1,), index, np.float32), np.zeros((1,), np.float32)


class Net(nn.Cell):
    def __init__(self, where):
        super().__init__()
        self.dense, self.calls, self.where = nn.Dense(1, 1, weight_init="ones"), 0, where

    def construct(self, x):
        self.calls += 1
        if self.where == "forward" and self.calls == 3:
            raise ValueError("forward of step 3")
        return self.dense(x)


class AfterStep(Callback):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_train_step_end(self, run_context):
        if self.error is not None and run_context.original_args().cur_step_num == 3:
            raise self.error("after step 3")


def breakpoint_of(where, error=None):
    data = ds.GeneratorDataset(Numbers(), ["x", "y"], shuffle=False, num_parallel_workers=1).batch(2)
    net = Net(where)
    config = CheckpointConfig(save_checkpoint_steps=100, exception_save=True, append_info=["epoch_num", "step_num"])
    optimizer = nn.Momentum(net.trainable_params(), [0.01] * 20, 0.9)
    try:
        Model(net, nn.MSELoss(), optimizer).train(1, data, [ModelCheckpoint("net", where, config), AfterStep(error)], dataset_sink_mode=False)
    except BaseException as raised:
        print(where, type(raised).__name__, end=": ")
    names = [name for name in os.listdir(where) if "breakpoint" in name]
    read = {key: value.asnumpy().ravel().tolist() for key, value in ms.load_checkpoint(f"{where}/{names[0]}").items()}
    print(names[0], {key: read[key] for key in ("epoch_num", "step_num", "global_step", "dense.weight")})
    return names[0], read["step_num"], read["global_step"]


print("mindspore", ms.__version__)
assert breakpoint_of("forward", None) == ("net-1_3_breakpoint.ckpt", [3], [2])
assert breakpoint_of("after", ValueError) == ("net-1_3_breakpoint.ckpt", [3], [3])
PYTHON
venv/bin/python show.py 2> /dev/null
