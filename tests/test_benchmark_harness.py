"""benchmarks/harness.py: the order of the rounds, medians, ratios, targets and what is written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import harness


def method(order: list[str], name: str, values: list[float]) -> Callable[[], float]:
    left = list(values)

    def once() -> float:
        order.append(name)
        return left.pop(0)

    return once


def test_rounds_alternate_and_ratios_are_of_one_round() -> None:
    order: list[str] = []
    methods = {
        "stock": method(order, "stock", [9.0, 1.0, 2.0, 4.0]),
        "ours": method(order, "ours", [9.0, 2.0, 3.0, 6.0]),
    }
    found = harness.compare("title", methods, rounds=3, warm_up=1)
    assert order == ["ours", "stock", "stock", "ours", "ours", "stock", "stock", "ours"]
    assert found.spread("stock") == harness.Spread((1.0, 2.0, 4.0))
    assert found.times_as_long("ours", "stock").values == (2.0, 1.5, 1.5)
    assert found.times_as_fast("stock", "ours").median == 1.5


def test_a_method_that_leaves_out_a_figure_is_refused() -> None:
    rounds = iter([{"seconds": 1.0, "bytes": 2.0}, {"seconds": 1.0}])
    with pytest.raises(ValueError, match="bytes"):
        harness.compare("title", {"one": lambda: next(rounds)}, rounds=2)


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (harness.Target(method="ours", times_as_long=1.5), True),
        (harness.Target(method="ours", times_as_long=1.4), False),
        (harness.Target(method="stock", times_as_fast=1.5, base="ours"), True),
        (harness.Target(method="stock", times_as_fast=1.6, base="ours"), False),
        (harness.Target(method="ours", at_most=3.0), True),
        (harness.Target(method="ours", at_most=2.9), False),
    ],
)
def test_targets(target: harness.Target, met: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = {"stock": lambda: 2.0, "ours": lambda: 3.0}
    args = argparse.Namespace(json=tmp_path / "found.json", plot=tmp_path / "found.svg", strict=True)
    report = harness.Report(args)
    report.add(harness.compare("batches", methods, rounds=2), base="stock", targets=[target], scale=1e3, unit="ms")
    assert report.end() == (0 if met else 1)
    told = json.loads(args.json.read_text())
    assert told["results"][0]["targets"][0]["met"] is met
    assert told["results"][0]["methods"]["ours"]["seconds"] == {"median": 3.0, "min": 3.0, "max": 3.0, "values": [3, 3]}
    drawn = args.plot.read_text()
    assert "stock" in drawn and "batches (ms)" in drawn
    printed = capsys.readouterr().out
    assert "batches (ms)" in printed and ("MISSED" in printed) is not met and "3000" in printed


def test_a_target_has_one_limit() -> None:
    with pytest.raises(ValueError, match="needs one of"):
        harness.Target(method="ours", at_most=1.0, times_as_long=2.0)
