"""Tensors and arrays that an object carries from step to step are told; statistics, caches and buffers are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mindx_elastic import Guard
from tests.guard.programs import run
from tests.guarded import no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


_PARTS = "PARTS = dict(model=net, optimizer=opt)\n"

CARRIED = {
    "the centre of a loss": (
        """
class Loss:
    def __init__(self): self.centre = torch.zeros(3)
    def __call__(self, y):
        loss = (y - self.centre).square().mean()
        self.centre = self.centre * 0.9 + y.detach().mean(0) * 0.1
        return loss
criterion = Loss()
def step(): update(criterion(net(x)), opt)
""",
        '"criterion.centre" (Loss, ',
        'Guard(stateful={"criterion": criterion}, ...)',
    ),
    "labels that follow": (
        """
class Labels:
    def __init__(self): self.soft = torch.rand(5, 3)
    def __call__(self, y):
        self.soft[:] = 0.7 * self.soft + 0.3 * y.detach()
        return (y - self.soft).square().mean()
labels = Labels()
def step(): update(labels(net(x)), opt)
""",
        '"labels.soft" (Labels, ',
        'Guard(stateful={"labels": labels}, ...)',
    ),
    "the hidden state of a network": (
        """
class Trainer:
    def __init__(self): self.net, self.cell, self.hidden = net, nn.GRUCell(3, 3), None
    def step(self):
        h = self.cell(self.net(x), self.hidden); self.hidden = h.detach()
        update(h.square().mean(), opt)
trainer = Trainer()
PARTS = dict(model=[net, trainer.cell], optimizer=opt)
opt.add_param_group(dict(params=list(trainer.cell.parameters())))
step = trainer.step
""",
        '"trainer.hidden" (Trainer, ',
        "keep it in a dict, trainer.state = {'hidden': ...}",
    ),
    "an order that is shuffled in place": (
        """
class Batches:
    def __init__(self): self.order = np.arange(50)
    def __getitem__(self, i): return torch.tensor(self.order[i : i + 5]).float()
    def on_epoch_end(self): np.random.shuffle(self.order)
batches = Batches()
def step():
    if number % 2 == 0: batches.on_epoch_end()
    update(net(x + batches[number].mean()).square().mean(), opt)
""",
        '"batches.order" (Batches, ',
        'Guard(stateful={"order": batches.order}, ...)',
    ),
    "an environment of arrays": (
        """
class World:
    def __init__(self): self.x = np.zeros(3)
    def move(self, a):
        self.x = 0.9 * self.x + a
        return self.x
world = World()
def step(): update(net(x + torch.tensor(world.move(np.random.rand(3))).float()).square().mean(), opt)
""",
        '"world.x" (World, ',
        'Guard(stateful={"world": world}, ...)',
    ),
}

CARRIED |= {
    "a memory bank that the loss reads elsewhere": (
        """
class Bank:
    def __init__(self): self.rows = torch.zeros(5, 3)
    def update(self, i, y): self.rows[i] = 0.5 * self.rows[i] + 0.5 * y
bank = Bank()
def step():
    y = net(x); distance = y @ bank.rows.T
    update(distance.square().mean(), opt); bank.update(torch.arange(5), y.detach())
""",
        '"bank.rows" (Bank, ',
        'Guard(stateful={"bank": bank}, ...)',
    ),
    "the first losses, by which later ones are divided": (
        """
class Balance:
    def __init__(self): self.first = None
    def __call__(self, losses):
        if self.first is None: self.first = losses.detach()
        return (losses / self.first).sum()
balance = Balance()
def step(): update(balance(net(x).square().mean(0)), opt)
""",
        '"balance.first" (Balance, ',
        'Guard(stateful={"balance": balance}, ...)',
    ),
}

POOL = """
class Pool:
    def __init__(self): self.images, self.size = [torch.zeros(5, 3)] * 2, 3
    def query(self, image):
        if len(self.images) < self.size: self.images.append(image); return image
        i = random.randrange(3); old = self.images[i]; self.images[i] = image; return old
pool = Pool()
def step(): update(net(pool.query(x)).square().mean(), opt)
"""

_WEIGHTED = """
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
sampler = WeightedRandomSampler(torch.ones(20), 20)
loader = DataLoader(TensorDataset(torch.randn(20, 3)), 5, sampler=sampler)
PARTS = dict(model=net, optimizer=opt, loader=loader, stateful=STATEFUL)
with Guard(directory=DIRECTORY, **PARTS) as guard:
    for epoch in guard.epochs(4):
        HEAD
        for x, in loader:
            update(net(x).square().mean(), opt); guard.step_end()
        TAIL
notes = guard._unmanaged.notes
"""
_SET = "sampler.weights = torch.full((20,), float(epoch))"
_FILL = "sampler.weights.fill_(float(epoch))"

WORLD = """
class Inner:
    def __init__(self): self.state, self.space = np.zeros(2), object()
    def reset(self): self.state = np.random.rand(2)
    def step(self):
        a, b = self.state
        self.state = np.array([a + 0.1 * b, b - 0.1 * a]); return self.state
class World:
    def __init__(self): self.env = Inner()
    def reset(self): self.env.reset()
world = World()
world.reset()
PARTS = dict(model=net, optimizer=opt)
with Guard(directory=DIRECTORY, **PARTS) as guard:
    for number in guard.steps(12):
        {reset}
        for _ in range(3): a = world.env.step()
        update(net(torch.tensor([*a, 1.0]).float()[None].repeat(4, 1)).square().mean(), opt)
        guard.step_end()
notes = guard._unmanaged.notes
"""

LEFT_ALONE = {
    "an order that is made anew": """
class Batches:
    def __init__(self): self.order = np.arange(50)
    def __getitem__(self, i): return torch.tensor(self.order[i : i + 5]).float()
    def on_epoch_end(self): self.order = np.arange(50); np.random.shuffle(self.order)
batches = Batches()
def step():
    if number % 2 == 0: batches.on_epoch_end()
    update(net(x + batches[number].mean()).square().mean(), opt)
""",
    "meters": """
class Meter:
    def __init__(self): self.val = self.sum = self.avg = torch.zeros(3); self.count = 0
    def update(self, val): self.val = val; self.sum = self.sum + val; self.count += 1; self.avg = self.sum / self.count
class Matrix:
    def __init__(self): self.mat = torch.zeros(3, 3)
    def update(self, y): self.mat += torch.outer(y, y)
    def compute(self): return self.mat / self.mat.sum()
    def reset(self): self.mat.zero_()
class Smoothed:
    def __init__(self): self.values = torch.zeros(3)
    def add(self, y):
        self.values = 0.9 * self.values + 0.1 * y
        print("smoothed", self.values)
meters, matrix, smoothed = Meter(), Matrix(), Smoothed()
def step():
    y = net(x); update(y.square().mean(), opt); y = y.detach().mean(0); meters.update(y); matrix.update(y)
    smoothed.add(y); matrix.compute()
""",
    "caches and buffers": """
class Cache:
    def __init__(self): self.features, self.filled, self.n = torch.zeros(50, 3), [False] * 50, 0
    def __call__(self, i):
        if not self.filled[i]: self.features[i] = torch.full((3,), float(i)); self.filled[i] = True
        return self.features[i]
class Buffer:
    def __init__(self): self.buffer, self.last = torch.zeros(5, 3), None
    def __call__(self, x):
        self.buffer.zero_(); self.buffer.add_(x); return self.buffer * 2
class Attention:
    def __init__(self): self.weights = torch.zeros(3)
    def __call__(self, y): self.weights = y.detach().softmax(-1); return y * self.weights
cache, buffer, attention = Cache(), Buffer(), Attention()
def step():
    update(attention(net(buffer(x) + cache(number))).square().mean(), opt)
""",
    "a matrix that is read elsewhere for a log, and a mask that is made once": """
class Matrix:
    def __init__(self): self.mat = torch.zeros(3, 3)
    def update(self, y): self.mat += torch.outer(y, y)
class Masked:
    def __init__(self): self.mask = None
    def __call__(self, y):
        if self.mask is None: self.mask = torch.ones(y.shape[1])
        return (y * self.mask).square().mean()
matrix, masked = Matrix(), Masked()
def step():
    y = net(x); update(masked(y), opt); matrix.update(y.detach().mean(0)); share = matrix.mat.diag() / matrix.mat.sum()
    print("shares", share.tolist())
""",
    "objects that are named": """
class Loss:
    def __init__(self): self.centre, self.temperature = torch.zeros(3), 0.1
    def __call__(self, y):
        loss = (y - self.centre).square().mean(); self.centre = self.centre * 0.9 + y.detach().mean(0) * 0.1
        return loss
criterion = Loss()
PARTS = dict(model=net, optimizer=opt, stateful={"criterion": criterion})
def step(): update(criterion(net(x)), opt)
""",
    "an order that is named": """
class Batches:
    def __init__(self): self.order = np.arange(50)
    def __getitem__(self, i): return torch.tensor(self.order[i : i + 5]).float()
    def on_epoch_end(self): np.random.shuffle(self.order)
batches = Batches()
PARTS = dict(model=net, optimizer=opt, stateful={"order": batches.order})
def step():
    if number % 2 == 0: batches.on_epoch_end()
    update(net(x + batches[number].mean()).square().mean(), opt)
""",
    "a world that each step resets": WORLD.format(reset="world.reset()"),
    "lists that are filled anew": """
class Hooks:
    def __init__(self): self.outputs = []
    def __call__(self, *tensors): self.outputs[:] = [t.detach() for t in tensors]
hooks, batch = Hooks(), [None, None]
def step():
    batch[0], batch[1] = x, torch.ones(5)
    y = net(batch[0]); hooks(x, y, y + 1); update(y.square().mean(), opt)
""",
}


def train(source: str, tmp_path: Path) -> tuple[str, ...]:
    parts = "" if "PARTS" in source else _PARTS
    tmp_path.mkdir(exist_ok=True)
    return run("own", parts + source, tmp_path / "ckpt", file=tmp_path / "train.py")


@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried_on_is_told_with_the_line_to_write(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, what, line = CARRIED[name]
    (note,) = train(source, tmp_path)
    assert note.startswith(what)
    assert "carried from one step into another and not kept" in note
    assert any(line in record.getMessage() for record in caplog.records)


def test_a_world_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the program's own, and of a library."""
    (note,) = train(WORLD.format(reset="if number % 5 == 4: world.reset()"), tmp_path / "own")
    assert note.startswith('"world.env.state" (Inner, ')
    monkeypatch.setattr("mindx_elastic.guard.checks.own_tensors.is_library", lambda module: True)
    caplog.clear()
    train(WORLD.format(reset="pass"), tmp_path / "library")
    assert "name an object of your own" in caplog.text and 'Guard(stateful={"world": world}, ...)' in caplog.text


def test_a_pool_of_constant_length(tmp_path: Path) -> None:
    (note,) = train(POOL, tmp_path)
    assert note.startswith('"pool.images" (list, ')


SAMPLER = """
from torch.utils.data import DataLoader, Sampler, TensorDataset
class Order(Sampler):
    def __init__(self): self.order = list(range(20))
    def __iter__(self): random.shuffle(self.order); return iter(self.order)
    def __len__(self): return 20
loader = DataLoader(TensorDataset(torch.randn(20, 3)), 5, sampler=Order())
PARTS = dict(model=net, optimizer=opt, loader=loader)
with Guard(directory=DIRECTORY, **PARTS) as guard:
    for epoch in guard.epochs(4):
        for x, in loader:
            update(net(x).square().mean(), opt); guard.step_end()
notes = guard._unmanaged.notes
"""


def test_a_sampler_that_shuffles_its_last_order(tmp_path: Path) -> None:
    (note,) = train(SAMPLER, tmp_path)
    assert note.startswith('"loader.sampler.order" (Order) is carried')
    anew = SAMPLER.replace("random.shuffle", "self.order = list(range(20)); random.shuffle")
    assert train(anew, tmp_path / "anew") == ()


def weighted(head: str, tail: str, stateful: str = "{}") -> str:
    return _WEIGHTED.replace("HEAD", head).replace("TAIL", tail).replace("STATEFUL", stateful)


@pytest.mark.parametrize("tail", [_SET, _FILL])
def test_weights_of_a_sampler_that_follow_the_training(tail: str, tmp_path: Path) -> None:
    (note,) = train(weighted("pass", tail), tmp_path)
    assert note.startswith("the weights of loader.sampler (WeightedRandomSampler) change in the training")


@pytest.mark.parametrize(
    "source",
    [
        weighted(_SET, "pass"),
        weighted(_FILL, "pass"),
        weighted("pass", "pass"),
        weighted("pass", _FILL, '{"w": sampler.weights}'),
    ],
    ids=["set", "filled", "constant", "named"],
)
def test_weights_of_a_sampler_that_the_head_of_the_epoch_sets(source: str, tmp_path: Path) -> None:
    assert train(source, tmp_path) == ()


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_statistics_caches_and_buffers_are_left_alone(name: str, tmp_path: Path) -> None:
    assert train(LEFT_ALONE[name], tmp_path) == ()


class SelfTrained(Dataset[Any]):
    """Its labels follow the predictions."""

    def __init__(self) -> None:
        self.x, self.labels = torch.randn(8, 3), torch.zeros(8, 1)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.labels[index]

    @torch.no_grad()
    def label(self, model: torch.nn.Module) -> None:
        self.labels = torch.where(self.x[:, :1] > 0, model(self.x), self.labels)


class SelfTrainedWithState(SelfTrained):
    def state_dict(self) -> dict[str, Any]:
        return {"labels": self.labels}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.labels = state["labels"]


@pytest.mark.parametrize("is_named", [False, True])
def test_the_labels_of_a_data_set_that_follow_the_predictions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_named: bool
) -> None:
    model, data = torch.nn.Linear(3, 1), SelfTrainedWithState() if is_named else SelfTrained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    stateful = {"dataset": data} if is_named else {}
    with Guard(model=model, optimizer=optimizer, loader=loader, stateful=stateful, directory=tmp_path) as guard:
        for _ in guard.epochs(3):
            for x, y in loader:
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                guard.step_end()
            data.label(model)
    told = [r.getMessage() for r in caplog.records if "not kept" in r.getMessage()]
    assert len(told) == (not is_named), told
    for each in told:
        assert each.startswith('"loader.dataset.labels" (SelfTrained'), told
        assert 'load_state_dict() in SelfTrained, and Guard(stateful={"dataset": loader.dataset}, ...)' in each
