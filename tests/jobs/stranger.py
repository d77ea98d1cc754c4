"""Somebody who reaches the store's port and belongs to no job: ``stranger.py HOST PORT WHAT``.

Plants WHAT into the store of a job of two ranks that are in their first guard, and prints ``PLANTED WHAT``.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

RANKS = range(2)


def connect(host: str, port: int) -> Any:
    """The guard's part of the store, found by looking at what is there."""
    store: Any = dist.TCPStore(host, port, None, False, timedelta(seconds=30), wait_for_workers=False)
    known = "mindx/0/0/start/round0/say/0"
    if hasattr(store, "list_keys"):
        found = [key for key in store.list_keys() if key.endswith(known)]
    else:
        places = ("default_pg/0//", "/worker/attempt_0/default_pg/0//", "default_pg/", "/worker/attempt_0/default_pg/")
        found = [f"{place}{known}" for place in places if store.check([f"{place}{known}"])]
    if len(found) != 1:
        sys.exit(f"the guard's keys are not found: {found}")
    return dist.PrefixStore(found[0].removesuffix("/start/round0/say/0"), store)


def plant(store: Any, what: str) -> None:
    ring = False
    if what == "exit-0":
        request = {"kind": "request", "reason": "planted\x1b[31m", "origin": 1, "exit_code": 0, "signum": None}
        store.set("request", json.dumps({**request, "grace_left_s": 600.0}))
        ring = True
    elif what == "not-json":
        store.set("request", b"\xff\xfe{[[")
        for name in ("stop", "salvage"):
            store.set(f"{name}/decision", "{" * 3000)
        ring = True
    elif what == "huge":
        for key in ("request", "stop/decision", "stop/offer/0", "stop/offer/1"):
            store.set(key, b"9" * (7 << 20))
        ring = True
    elif what == "far-step":
        for name in ("stop", "salvage"):
            store.set(f"{name}/decision", json.dumps({"step": 10**9, "reason": ""}))
    elif what == "finished":
        for name in ("stop", "salvage"):
            store.set(f"{name}/decision", json.dumps({"step": None, "reason": "every rank has finished training"}))
    elif what == "offers":
        for name in ("stop", "salvage"):
            for rank in RANKS:
                store.set(f"{name}/offer/{rank}", str(10**9))
            store.add(f"{name}/count", 1)
    elif what == "count":
        for name in ("stop", "salvage"):
            store.add(f"{name}/count", -100)
    else:
        sys.exit(f"no such thing: {what}")
    if ring:
        store.multi_set([f"bell/{rank}" for rank in RANKS], ["1" for _ in RANKS])


if __name__ == "__main__":
    client = connect(sys.argv[1], int(sys.argv[2]))
    for each in sys.argv[3].split(","):
        plant(client, each)
        print(f"PLANTED {each}", flush=True)
