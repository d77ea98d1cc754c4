"""``mindx-elastic run`` in a test's own folder, see `in_own_folder`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness import events, start_agent

__all__ = ["RUN", "agent", "attempts", "nothing_left"]

RUN = Path("mindx-run")
"""The default run directory."""


def agent(script: str, *args: object, **more: Any) -> Any:
    """`start_agent` with shared memory in the test's folder."""
    env = {"MINDX_ARENA_DIR": str(Path("shm").absolute()), **more.pop("env", {})}
    return start_agent(script, *args, env=env, **more)


def attempts(run_dir: Path = RUN) -> list[tuple[str, int | None]]:
    """Outcome and steps lost of each attempt."""
    return [(event["outcome"], event["steps_lost"]) for event in events(run_dir, "attempt")]


def nothing_left() -> bool:
    return not list(Path("shm").glob("*/agent-*"))
