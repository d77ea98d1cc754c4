"""``ranks.py N SCRIPT ARGUMENTS``: N ranks of a script with torchrun's variables, forked after the imports, and nothing
that ends the others when one of them fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.jobs.forked import run_ranks


def run_script() -> int:
    exec(compile(Path(__file__).read_bytes(), __file__, "exec"), globals())  # noqa: S102
    return 0


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    sys.argv = sys.argv[2:]
    __file__ = sys.argv[0]
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    sys.exit(run_ranks(ranks, run_script))
