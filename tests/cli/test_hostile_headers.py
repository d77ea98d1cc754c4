"""Headers that claim what cannot be: each is its own file's end, and never the start's or a command's.

Every file here has a digest that fits, as an attacker or a bug of another version would make it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mindx_elastic.persist.catalog import read_entries
from tests.checkpoint_files import write
from tests.cli.conftest import Run
from tests.persist.test_format import forge
from tests.start.finding import find, step_of

Content = dict[str, Any]
Damage = Callable[[Content], None]
NEW, OLD = 9, 5
no_reset = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)


def info(**fields: Any) -> Damage:
    def change(content: Content) -> None:
        metadata = content["__metadata__"]
        metadata["mindx.checkpoint"] = json.dumps({**json.loads(metadata["mindx.checkpoint"]), **fields})

    return change


def raw_info(field: str, text: str) -> Damage:
    """`text` is JSON."""

    def change(content: Content) -> None:
        metadata = content["__metadata__"]
        values = json.loads(metadata["mindx.checkpoint"])
        values.pop(field)
        metadata["mindx.checkpoint"] = f'{json.dumps(values)[:-1]}, "{field}": {text}}}'

    return change


def shape_of_an_empty_tensor(shape: list[int]) -> Damage:
    """One more tensor, without bytes; the tree refers to it."""

    def change(content: Content) -> None:
        end = max(each["data_offsets"][1] for name, each in content.items() if name != "__metadata__")
        content["zz"] = {"dtype": "U8", "shape": shape, "data_offsets": [end, end]}
        metadata = content["__metadata__"]
        tree = json.loads(metadata["mindx.tree"])
        tree["model"]["zz"] = {"$tensor": "zz"}
        metadata["mindx.tree"] = json.dumps(tree)
        empty = "99aa06d3014798d86001c324468d497f"  # xxh3-128 of nothing
        metadata["mindx.digests"] = json.dumps({**json.loads(metadata["mindx.digests"]), "zz": empty})

    return change


def layout(**record: Any) -> Damage:
    whole = {"version": 2, "rank": 0, "world_size": 1, "layouts": [], "modules": ["model"]}

    def change(content: Content) -> None:
        content["__metadata__"]["mindx.layout"] = json.dumps({**whole, **record})

    return change


def tree(node: str) -> Damage:
    """`node` is JSON; it replaces the model."""

    def change(content: Content) -> None:
        metadata = content["__metadata__"]
        text = {k: v for k, v in json.loads(metadata["mindx.tree"]).items() if k != "model"}
        metadata["mindx.tree"] = f'{json.dumps(text)[:-1]}, "model": {node}}}'

    return change


def rename_a_tensor(content: Content) -> None:
    name = next(name for name in content if name != "__metadata__")
    content["\ud800"] = content.pop(name)
    metadata = content["__metadata__"]
    for key in ("mindx.tree", "mindx.digests"):
        metadata[key] = metadata[key].replace(json.dumps(name), '"\\ud800"')


ONE = {"mesh": [1], "placements": ["R"], "ranks": [[0, 1]]}
HUGE = {"mesh": [1 << 18], "placements": ["R"], "ranks": [[0, 1 << 18]]}
DEEP = "[" * 900 + "]" * 900
HOSTILE: dict[str, Damage] = {
    "created 10^400": raw_info("created", f"1{'0' * 400}"),
    "created 1e300": info(created=1e300),
    "created 2^62": info(created=1 << 62),
    "world of 2^24": info(world_size=1 << 24),
    "replicas on 2^18 ranks": info(world_size=1 << 18, coordinates={"replicas": 1 << 18}),
    "run id with a lone surrogate": info(run_id="run-\ud800"),
    "reason with a lone surrogate": info(reason="\udcff and \ud800"),
    "reason of a megabyte": info(reason="x" * (1 << 20)),
    "100,000 coordinates": info(coordinates={str(n): n for n in range(100_000)}),
    "append_info with a lone surrogate": info(append_info=["\ud800"]),
    "400,000 dimensions of 2^62": shape_of_an_empty_tensor([1 << 62] * 400_000),
    "no elements of 2^62": shape_of_an_empty_tensor([0, 1 << 62]),
    "a tensor with a lone surrogate": rename_a_tensor,
    "tree 900 deep": tree(DEEP),
    "tree with a number for pairs": tree('{"$map": 3}'),
    "tree with unknown tensors": tree('{"$tensor": "nobody"}'),
    "tree that is a number": tree("3"),
    "layouts without end": layout(layouts=[HUGE] * 20_000, default=0),
    "layout with a huge range": layout(layouts=[{**ONE, "ranks": [[0, 10**30]]}], default=0),
    "layout with split upon split": layout(
        layouts=[{"mesh": [2] * 16, "placements": ["_S(0,65536)"] * 16, "ranks": [[0, 65536]]}], default=0
    ),
    "layout in which tensors is a text": layout(layouts=[ONE], tensors="model.weight"),
    "a layout 900 deep": layout(layouts=json.loads(DEEP)),
}

HARMLESS = {
    "created 1e300",
    "created 2^62",
    "reason with a lone surrogate",
    "100,000 coordinates",
    "append_info with a lone surrogate",
    "replicas on 2^18 ranks",
    "tree that is a number",
    "a layout 900 deep",
    *(name for name in HOSTILE if name.startswith("layout")),
}
"""Nothing in them cannot be; or only the layout's record is malformed, and the file serves its own rank."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sound step 5 of one rank, and a step 9 that is going to be damaged."""
    write(tmp_path / f"resnet-1_{OLD}.safetensors", step=OLD)
    write(tmp_path / f"resnet-1_{NEW}.safetensors", step=NEW)
    return tmp_path


def newest(directory: Path) -> Path:
    return directory / f"resnet-1_{NEW}.safetensors"


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest, directory: Path) -> str:
    """Each of the headers in turn, on the newer step."""
    forge(newest(directory), HOSTILE[request.param])
    return str(request.param)


def test_a_start_takes_what_is_sound(hostile: str, directory: Path) -> None:
    found = find(directory)
    assert step_of(found) == (NEW if hostile in HARMLESS else OLD)
    put_aside = not newest(directory).exists()
    assert put_aside or hostile in HARMLESS or f"step {NEW}" in " ".join(found.rejected if found else ())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "{directory}"],
        ["inspect", "{file}", "--json"],
        ["verify", "{directory}"],
        ["plan", "{directory}", "--json"],
        ["plan", "{directory}", "--world-size", "2"],
        ["convert", "{file}", "{made}"],
    ],
    ids=" ".join,
)
def test_no_command_ends_in_a_traceback(
    run: Run, directory: Path, tmp_path_factory: pytest.TempPathFactory, words: list[str]
) -> None:
    """All headers, one after the other: what is wrong with one is said, and the exit code is one of ours."""
    sound = newest(directory).read_bytes()
    failures: list[str] = []
    for name, damage in HOSTILE.items():
        newest(directory).write_bytes(sound)
        forge(newest(directory), damage)
        made = tmp_path_factory.mktemp("made") / "made.safetensors"
        places = {"directory": directory, "file": newest(directory), "made": made}
        try:
            outcome = run(*(word.format(**places) for word in words))
        except Exception as error:
            failures.append(f"{name}: {error!r:.300}")
            continue
        if outcome.exit_code not in (0, 1, 2, 3) or "Traceback" in outcome.stderr:
            failures.append(f"{name}: exit code {outcome.exit_code}\n{outcome.stderr}")
        elif "--json" in words and outcome.exit_code != 2:
            json.loads(outcome.stdout)
    assert not failures, "\n".join(failures)


def test_a_large_job_is_none_of_these(run: Run, tmp_path: Path) -> None:
    """16,384 ranks in pipelines, with thousands of tensors in a file."""
    ranks, stages = 16_384, 16
    size = ranks // stages
    state = {"model": {f"layers.{n}.weight": torch.zeros(2, 2) for n in range(3000)}, "rng": {}}
    path = write(tmp_path / "rank_0" / "big-1_9.safetensors", step=9, state=state, rank=0, world_size=ranks)
    layouts = [
        {"mesh": [size], "placements": [text], "ranks": [[stage * size, size]]}
        for stage in range(stages)
        for text in ("R", "S(0)", "S(1)")
    ]
    job = [[f"layers.{n}", n, [4096, 4096]] for n in range(len(layouts))]
    record = layout(rank=0, world_size=ranks, layouts=layouts, default=0, job=job)
    forge(path, record)
    (entry,) = read_entries(tmp_path)
    assert entry.problem is None and entry.info is not None and entry.info.world_size == ranks
    outcome = run("plan", tmp_path, "--json")
    assert "malformed" not in outcome.stdout, outcome.stdout
    assert "part 2 of 1024 of layers.1: no usable file" in outcome.stdout, outcome.stdout


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=8)
    | st.sampled_from([1 << 18, 1 << 24, 1 << 62, 1 << 63, -1, 10**400, "R", "S(0)", "$tensor", "model"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def set_something(content: Content, where: list[int], value: Any) -> None:
    """Replace some node of the header or of the JSON texts in its metadata."""
    metadata = content["__metadata__"]
    inside = {key: json.loads(metadata[key]) for key in ("mindx.checkpoint", "mindx.tree", "mindx.layout")}
    root: Any = {**inside, "entries": {key: each for key, each in content.items() if key != "__metadata__"}}
    node = root
    for step, choice in enumerate(where):
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
        if not keys:
            break
        key = keys[choice % len(keys)]
        if step == len(where) - 1 or not isinstance(node[key], (dict, list)) or not node[key]:
            if node is not root:
                node[key] = value
            break
        node = node[key]
    for key in inside:
        metadata[key] = json.dumps(root[key])
    content.clear()
    content.update({"__metadata__": metadata, **root["entries"]})


@no_reset
@example(where=[2, 4], value=None)
@given(where=st.lists(st.integers(0, 20), min_size=2, max_size=7), value=JSON)
def test_whatever_stands_in_a_header(
    run: Run, tmp_path_factory: pytest.TempPathFactory, where: list[int], value: Any
) -> None:
    directory = tmp_path_factory.mktemp("fuzzed")
    for step in (OLD, NEW):
        write(directory / f"resnet-1_{step}.safetensors", step=step)
    forge(newest(directory), layout(layouts=[ONE], default=0, parameters={}, volatile={}, job=[["x", 0, [3]]]))
    forge(newest(directory), lambda content: set_something(content, where, value))
    for words in (["inspect", newest(directory), "--json"], ["plan", directory, "--json"], ["verify", directory]):
        assert run(*words).exit_code in (0, 1, 2, 3)
    assert run("convert", newest(directory), directory / "made.safetensors").exit_code in (0, 1, 2, 3)
    assert step_of(find(directory)) >= 0
