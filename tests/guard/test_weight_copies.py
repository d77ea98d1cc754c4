"""Copies of the weights that a training carries on are told; those that it makes and uses in one step are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guard.programs import run
from tests.guarded import no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


CARRIED = {
    "the best ones": """
        best_loss, best_state = float("inf"), None
        PARTS = dict(model=net, optimizer=opt)
        def step():
            global best_loss, best_state
            loss = net(x).square().mean()
            if loss.item() < best_loss: best_loss, best_state = loss.item(), copy.deepcopy(net.state_dict())
            update(loss, opt)
        def after_epoch(): net.load_state_dict(best_state)
        """,
    "the best ones, to go back to": """
        best_loss, best_state = float("inf"), None
        PARTS = dict(model=net, optimizer=opt)
        with Guard(directory=DIRECTORY, **PARTS) as guard:
            for number in guard.steps(12):
                x = torch.randn(5, 3)
                loss = net(x).square().mean()
                if loss.item() < best_loss: best_loss, best_state = loss.item(), copy.deepcopy(net.state_dict())
                elif loss.item() > 2 * best_loss: net.load_state_dict(best_state)
                update(net(x).square().mean(), opt); guard.step_end()
        notes = guard._unmanaged.notes
        """,
    "the best module": """
        best_loss, best_net = float("inf"), None
        PARTS = dict(model=net, optimizer=opt)
        def step():
            global best_loss, best_net
            loss = net(x).square().mean()
            if loss.item() < best_loss: best_loss, best_net = loss.item(), copy.deepcopy(net)
            update(loss, opt)
        def after_epoch(): assert best_net(torch.ones(2, 3)).shape == (2, 3)
        """,
    "the best ones of an object": """
        class Stopping:
            def __init__(self): self.best, self.weights = float("inf"), None
            def __call__(self, loss):
                improved = loss < self.best
                if improved: self.best = loss; self.weights = {k: v.clone() for k, v in net.state_dict().items()}
            def back(self): net.load_state_dict(self.weights)
        stopping = Stopping()
        PARTS = dict(model=net, optimizer=opt)
        def step():
            loss = net(x).square().mean(); update(loss, opt); stopping(loss.item())
        def after_epoch(): stopping.back()
        """,
    "those of every fifth step": """
        anchor, count = None, 0
        PARTS = dict(model=net, optimizer=opt)
        def step():
            global anchor, count
            if count % 5 == 0: anchor = {n: p.detach().clone() for n, p in net.named_parameters()}
            count += 1
            away = sum((p - anchor[n]).square().sum() for n, p in net.named_parameters())
            update(net(x).square().mean() + 0.1 * away, opt)
        """,
}

LEFT_ALONE = {
    "gradients of functions, looked at twice at the boundary of a stop": """
        from mindx_elastic import GracefulExit
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        weights = dict(net.named_parameters())
        def loss_of(params, x): return torch.func.functional_call(net, params, (x,)).square().mean()
        try:
            with Guard(directory=DIRECTORY, model=net) as guard:
                for number in guard.steps(30):
                    grads = torch.func.grad(loss_of)(weights, torch.randn(5, 3))
                    with torch.no_grad():
                        for name, p in weights.items(): p.sub_(0.01 * grads[name])
                    if number in (4, 5): guard.request_stop("test")
                    guard.step_end()
        except GracefulExit:
            pass
        notes = guard._unmanaged.notes
        """,
    "made and used in each step": """
        PARTS = dict(model=net, optimizer=opt)
        def step():
            global before
            before = copy.deepcopy(net.state_dict())
            update(net(x).square().mean(), opt)
            after = net.state_dict()
            net.load_state_dict({k: torch.where(v > 0, v, before[k]) for k, v in after.items()})
        """,
    "made in each epoch for its evaluation": """
        converted = None
        PARTS = dict(model=net, optimizer=opt)
        def step(): update(net(x).square().mean(), opt)
        def after_epoch():
            global converted
            converted = copy.deepcopy(net).eval()
            if converted is not None: converted = converted.double()
            assert converted(x.double()).shape == (5, 3)
        STEPS = 2
        """,
    "the first ones": """
        first = copy.deepcopy(net.state_dict())
        PARTS = dict(model=net, optimizer=opt)
        def step():
            away = sum((p - first[n]).square().sum() for n, p in net.named_parameters())
            update(net(x).square().mean() + 0.1 * away, opt)
        """,
    "only saved": """
        best_loss, best_state = float("inf"), None
        PARTS = dict(model=net, optimizer=opt)
        def step():
            global best_loss, best_state
            loss = net(x).square().mean()
            if loss.item() < best_loss: best_loss, best_state = loss.item(), copy.deepcopy(net.state_dict())
            update(loss, opt)
        def after_epoch():
            if best_state is not None: torch.save({"model": best_state, "loss": best_loss}, DIRECTORY / "own.pt")
        """,
    "named": """
        best = {"value": float("inf"), "state": None}
        PARTS = dict(model=net, optimizer=opt, stateful={"best": best})
        def step():
            loss = net(x).square().mean()
            if loss.item() < best["value"]: best["value"], best["state"] = loss.item(), copy.deepcopy(net.state_dict())
            update(loss, opt)
        def after_epoch(): net.load_state_dict(best["state"])
        """,
    "a reference to the weights": """
        PARTS = dict(model=net, optimizer=opt)
        def step():
            global state
            state = {"model": net.state_dict()}
            update(net(x).square().mean(), opt)
        def after_epoch(): net.load_state_dict(state["model"])
        """,
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_copy_that_is_carried_on_is_told(name: str, tmp_path: Path) -> None:
    notes = run("copies", CARRIED[name], tmp_path / "ckpt", file=tmp_path / "train.py")
    (note,) = [note for note in notes if "the variable best_loss" not in note]  # which is told, too
    assert "is a copy of the weights, changes in the training, and is not kept" in note


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_copy_of_one_step_or_that_is_kept_is_left_alone(name: str, tmp_path: Path) -> None:
    notes = run("copies", LEFT_ALONE[name], tmp_path / "ckpt", file=tmp_path / "train.py")
    assert [note for note in notes if "the variable best_loss" not in note] == []
