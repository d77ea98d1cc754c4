"""``counted_calls.py DIR``: the README's loop; SIGTERM in its sixth step. Prints how often the package's own Python
functions were called and which ones most: by the training thread in each phase, and by all other threads together, for
in which phase these come to run depends on the load of the machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from types import FrameType

import torch

import mindx_elastic as mx

BASE = os.path.dirname(mx.__file__) + os.sep
phase = "entry"
sys.counts = defaultdict(Counter)  # type: ignore[attr-defined]  # no variable of the program: those are looked at


def note(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and frame.f_code.co_filename.startswith(BASE):
        part = phase if threading.current_thread() is threading.main_thread() else "threads"
        sys.counts[part][f"{frame.f_code.co_filename.removeprefix(BASE)}:{frame.f_code.co_name}"] += 1  # type: ignore[attr-defined]


x = torch.randn(1280, 32, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=60)

guard = mx.Guard(
    model=model, optimizer=opt, lr_scheduler=sched, loader=loader, directory=sys.argv[1], prefix="mlp", save_every="1h"
)
threading.setprofile(note)
sys.setprofile(note)
try:
    with guard:
        phase = "step 1"
        for _ in guard.epochs(3):
            for x, y in loader:
                opt.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                opt.step()
                sched.step()
                if phase == "step 6":
                    phase = "stop"
                    os.kill(os.getpid(), signal.SIGTERM)
                    sys.setprofile(None)
                    while guard.stopper.agreed_step is None:  # else it may be one of the next steps
                        time.sleep(0.001)
                    sys.setprofile(note)
                guard.step_end(loss=loss)
                if phase != "stop":
                    phase = f"step {int(phase[5:]) + 1}"
finally:
    sys.setprofile(None)
    for name, calls in sys.counts.items():  # type: ignore[attr-defined]
        print("CALLS", json.dumps([name, calls.total(), calls.most_common(15)]), flush=True)
