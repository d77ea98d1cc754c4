#!/usr/bin/env bash
# Finding: keep_checkpoint_max of MindSpore's ModelCheckpoint bounds one start of the training and not its folder: each start with the same prefix leaves files.
# mindspore 2.10.0, CPU, keep_checkpoint_max=2, three starts of one script with one prefix and folder. Where files of the prefix are there, the callback
# takes another prefix (net_1, net_2), and counts only files of that one: 2, 4, 6 files after the starts. A job that is restarted by its platform fills the disk,
# and names say nothing about which is newest (net-1_6 and net_2-1_6 are both "epoch 1, step 6"). Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet mindspore==2.10.0 numpy==1.26.4 scipy==1.13.1
cat > train.py <<'PYTHON'
import os

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import CheckpointConfig, Model, ModelCheckpoint

ms.set_device("CPU")
data = ds.GeneratorDataset([(np.ones(1, np.float32), np.zeros(1, np.float32))] * 6, ["x", "y"]).batch(1)
net = nn.Dense(1, 1)
model = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.01))
config = CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=2)
model.train(1, data, callbacks=[ModelCheckpoint("net", "checkpoints", config)], dataset_sink_mode=False)
print("mindspore", ms.__version__, sorted(name for name in os.listdir("checkpoints") if name.endswith(".ckpt")))
PYTHON
for start in 1 2 3; do
    venv/bin/python train.py 2> /dev/null
    test "$(ls checkpoints/*.ckpt | wc -l)" = $((2 * start))
done
