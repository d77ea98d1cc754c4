#!/usr/bin/env bash
# Finding: keras' fit on the torch backend opens a DataLoader once more than there are epochs, and drops the batch that it reads there.
# keras 3.15.1, torch 2.13.0, CPU. fit(loader, epochs=2) with 4 batches an epoch trains 8 times; the loader is opened 3 times and hands out 9 batches. The
# first one builds the model and is not trained on. A shuffle that draws from a generator is one draw further than the epochs say, and a data set
# that reads a stream which cannot begin again (a queue, a socket) loses the samples of that batch: training begins with number 4 here, where
# 16 numbers are read in batches of 4. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy absl-py rich namex h5py optree ml-dtypes packaging
venv/bin/pip install --quiet --no-deps keras==3.15.1
cat > show.py <<'PYTHON'
import os, sys, warnings
os.environ["KERAS_BACKEND"] = "torch"
import keras, torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

warnings.simplefilter("ignore")  # keras', that it does not shuffle a loader itself
counts = {"opened": 0, "handed out": 0}


class Counted(DataLoader):
    def __iter__(self):
        counts["opened"] += 1
        for batch in super().__iter__():
            counts["handed out"] += 1
            yield batch


class Stream(IterableDataset):
    numbers = iter(range(16))

    def __iter__(self):
        for number in self.numbers:
            yield torch.tensor([float(number)]), torch.zeros(1)


trained_on = []


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        trained_on.extend(int(number) for number in data[0].flatten())
        return super().train_step(data)


def fit(loader, **options):
    trained_on.clear()
    model = Model()
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(loader, verbose=0, **options)
    return len(trained_on)


print("keras", keras.__version__, "torch", torch.__version__)
samples = fit(Counted(TensorDataset(torch.zeros(64, 1), torch.zeros(64, 1)), batch_size=16), epochs=2)
print("2 epochs of 4 batches: trained on", samples // 16, counts)
fit(DataLoader(Stream(), batch_size=4))
print("a stream of 0 to 15, trained on:", trained_on)
sys.exit(not (samples == 128 and counts == {"opened": 3, "handed out": 9} and trained_on == list(range(4, 16))))
PYTHON
venv/bin/python show.py
