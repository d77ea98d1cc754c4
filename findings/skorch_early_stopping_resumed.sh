#!/usr/bin/env bash
# Finding: skorch's way to resume (TrainEndCheckpoint and LoadInitState) starts the patience of EarlyStopping over.
# skorch 1.4.0, torch 2.13.0, CPU. A regressor that never improves (lr 0) stops after 6 epochs with a patience of 5. The same training, ended after 4
# epochs and resumed, makes 10: the history comes back, what EarlyStopping has counted does not, and it does not read the history. A job that is
# stopped more often than its patience lasts never stops early. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy scikit-learn scipy tabulate tqdm
venv/bin/pip install --quiet --no-deps skorch==1.4.0
cat > show.py <<'PYTHON'
import sys
import numpy as np
import skorch, torch
from skorch import NeuralNetRegressor
from skorch.callbacks import EarlyStopping, LoadInitState, TrainEndCheckpoint

x = np.random.RandomState(0).randn(64, 4).astype(np.float32)
y = np.zeros((64, 1), np.float32)


def epochs(folder, most, load=False):
    torch.manual_seed(0)
    checkpoint = TrainEndCheckpoint(dirname=folder)
    callbacks = [EarlyStopping(patience=5), checkpoint, *([LoadInitState(checkpoint)] if load else [])]
    net = NeuralNetRegressor(torch.nn.Linear(4, 1), lr=0.0, max_epochs=most, verbose=0, callbacks=callbacks)
    return len(net.fit(x, y).history)


print("skorch", skorch.__version__, "torch", torch.__version__)
whole = epochs("whole", 30)
first, both = epochs("parts", 4), epochs("parts", 30, load=True)
print(f"epochs, uninterrupted: {whole}; stopped after {first} and resumed: {both}")
sys.exit(not (first < whole < both))
PYTHON
venv/bin/python show.py
