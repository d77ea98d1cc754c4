#!/usr/bin/env bash
# Finding: Model.train(initial_epoch=k) of MindSpore, made to resume a training, gives epoch k + 1 the samples' order of epoch 1 and counts steps from 1.
# mindspore 2.10.0, CPU, GeneratorDataset with shuffle and a fixed seed, dataset_sink_mode=False. Three epochs in one run have three orders. A run that
# begins with initial_epoch=1 makes its first epoch, the second, in the order of the first; cur_step_num, by which checkpoints are named, is 1 again.
# (set_init_step of the data set continues in the right order.) Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet mindspore==2.10.0 numpy==1.26.4 scipy==1.13.1
cat > show.py <<'PYTHON'
import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import Callback, Model

ms.set_device("CPU")


class Numbers:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return np.full((1,), index, np.float32), np.zeros((1,), np.float32)


class Record(Callback):
    def on_train_step_end(self, run_context):
        now = run_context.original_args()
        seen.setdefault(now.cur_epoch_num, []).append(tuple(now.train_dataset_element[0].asnumpy().ravel().astype(int).tolist()))
        steps.append(now.cur_step_num)


def orders(initial_epoch):
    global seen, steps
    seen, steps = {}, []
    ms.set_seed(7)
    ds.config.set_seed(7)
    data = ds.GeneratorDataset(Numbers(), ["x", "y"], shuffle=True, num_parallel_workers=1).batch(2)
    net = nn.Dense(1, 1)
    model = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.01))
    model.train(3, data, callbacks=[Record()], dataset_sink_mode=False, initial_epoch=initial_epoch)
    return seen, steps[0]


print("mindspore", ms.__version__)
whole, _ = orders(0)
resumed, first = orders(1)
for epoch in whole:
    print("epoch", epoch, "in one run", whole[epoch], "| from initial_epoch=1", resumed.get(epoch))
print("first cur_step_num of the resumed run:", first)
assert whole[1] != whole[2] and resumed[2] == whole[1] and resumed[3] == whole[2] and first == 1
PYTHON
venv/bin/python show.py 2> /dev/null
