"""What is changed in place in plain variables, and is in the gradients, is told; statistics and buffers are not."""

from __future__ import annotations

import textwrap
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
    "bank": """
        bank = torch.zeros(5, 3)
        def step():
            y = net(x); update((y @ bank.T).square().mean(), opt)
            bank[:5] = 0.5 * bank[:5] + 0.5 * y.detach()
        """,
    "centres": """
        centres = torch.zeros(5, 3)
        def away(y, i): return (y - centres[i]).square().mean()
        def step():
            i = torch.arange(5); y = net(x); update(away(y, i), opt)
            centres[i] += 0.5 * (y.detach() - centres[i])
        """,
    "means": """
        means = {"a": torch.zeros(3)}
        def step():
            y = net(x); loss = (y - means["a"]).square().mean(); update(loss, opt)
            means["a"].mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        """,
    "queue": """
        queue, at = torch.randn(12, 3), [0]
        def step():
            y = net(x); update((y @ queue.T).square().mean(), opt)
            queue[at[0] : at[0] + 3] = y.detach()[:3]; at[0] = (at[0] + 3) % 12
        """,
    "losses": """
        losses = {}
        def step():
            weights = torch.tensor([losses.get(i, 1.0) for i in range(5)])
            each = net(x).square().mean(1); update((weights * each).mean(), opt)
            for i, one in enumerate(each.detach()):
                losses[i] = float(one)
        """,
    "counts": """
        from collections import Counter
        counts = Counter()
        def step():
            counts.update([0, 1, 1])
            weights = torch.tensor([1.0 / counts[0], 1.0 / counts[1], 1.0])
            update((weights * net(x)).square().mean(), opt)
        """,
    "history": """
        history = [1.0]
        def step():
            weight = history[-1] / sum(history)
            loss = weight * net(x).square().mean(); update(loss, opt)
        def after_epoch(): history.append(net(torch.ones(5, 3)).square().mean().item())
        """,
}

LEFT_ALONE = {
    "named": """
        bank = torch.zeros(5, 3)
        PARTS = dict(model=net, optimizer=opt, stateful={"bank": bank})
        def step():
            y = net(x); update((y @ bank.T).square().mean(), opt)
            bank[:5] = 0.5 * bank[:5] + 0.5 * y.detach()
        """,
    "for a log": """
        matrix, losses = torch.zeros(3, 3), [0.0]
        def step():
            y = net(x); loss = y.square().mean(); update(loss, opt)
            y = y.detach().mean(0); matrix.add_(torch.outer(y, y)); losses.append(loss.item())
            print(len(losses), sum(losses), matrix.diag() / matrix.sum())
        """,
    "filled anew in each step": """
        rows, parts = torch.zeros(5, 3), []
        def step():
            rows.zero_(); rows[:3] = x[:3]; parts.clear()
            for number in range(2): parts.append(number + 1.0)
            update(net(rows * sum(parts)).square().mean(), opt)
        """,
    "a dict for the batch": """
        batch = {}
        def step():
            batch.update(x=x)
            update(net(batch["x"]).square().mean(), opt)
        """,
    "a buffer for the batch": """
        rows = torch.zeros(5, 3)
        def step():
            print(rows.shape, len(rows))
            for i in range(5):
                rows[i] = x[i] * 2
            update(net(rows).square().mean(), opt)
        """,
    "a buffer of the function that has the loop": """
        def main():
            rows = torch.zeros(5, 3)
            with Guard(directory=DIRECTORY, model=net, optimizer=opt) as guard:
                for number in guard.steps(12):
                    x = torch.randn(5, 3)
                    for i in range(5):
                        rows[i] = x[i] * 2
                    update(net(rows).square().mean(), opt); guard.step_end()
            return guard._unmanaged.notes
        notes = main()
        """,
    "made in the loop": """
        with Guard(directory=DIRECTORY, model=net, optimizer=opt) as guard:
            for number in guard.steps(12):
                x, seen, factors = torch.randn(5, 3), torch.zeros(5, 3), []
                seen[:3] += x[:3]; factors.append(2.0)
                update(net(seen * factors[0]).square().mean(), opt); guard.step_end()
        notes = guard._unmanaged.notes
        """,
}


def train(source: str, tmp_path: Path) -> tuple[str, ...]:
    parts = "" if "PARTS" in source or "Guard(" in source else "PARTS = dict(model=net, optimizer=opt)\n"
    return run("in_place", parts + textwrap.dedent(source), tmp_path / "ckpt", file=tmp_path / "train.py")


@pytest.mark.parametrize("name", CARRIED)
def test_what_the_gradients_depend_on_is_told_with_the_line_to_write(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (note,) = train(CARRIED[name], tmp_path)
    assert note.startswith(f"the variable {name} (train.py) is changed in place from step to step"), note
    assert any(f'Write Guard(stateful={{"{name}": {name}}}, ...)' in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_kept_or_of_one_step_is_left_alone(name: str, tmp_path: Path) -> None:
    assert train(LEFT_ALONE[name], tmp_path) == ()
