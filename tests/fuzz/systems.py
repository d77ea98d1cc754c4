"""Programs for the documented systems: `Model.train` with callbacks and flag files, MindIO's registration in a loop of
one's own, ModelArts' fault reports, the dynamic cluster that is started by hand.

A system changes what `write` writes: ``model`` and ``cluster`` train with `Model`, ``tft`` registers at the guard.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.fuzz.write import HEAD, SCHEDULERS, Draft, Program, draw_data, draw_model
from tests.harness import free_port
from tests.watchdog import Watchdog

__all__ = ["SYSTEMS", "run_cluster", "write_for"]

SYSTEMS = ("model", "tft", "cluster")
_EXAMPLE = Path(__file__).parents[2] / "examples" / "disaster_recover"
_CALLBACKS = """
class Kept(mx.Callback):
    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class Best(Kept):
    seen, means = 0.0, ()

    def on_train_step_end(self, run_context):
        self.seen += float(run_context.original_args().net_outputs)
        at("counted")

    def on_train_epoch_end(self, run_context):
        self.means, self.seen = [*self.means, self.seen], 0.0
        at("closed")
        if PATIENCE and len(self.means) > 1 and self.means[-1] > 0.9 * self.means[-2]:
            run_context.request_stop()


class Evaluation(Kept):
    found = ()

    def HOOK(self, run_context):
        params = run_context.original_args()
        if params.cur_step_num % EVERY == 0:
            self.found = [*self.found, sorted(params.model.eval(test, places).items())]


def loss_fn(outputs, targets):
    at("forward")
    return F.cross_entropy(outputs.float(), targets)


hooks = {"train_epoch_begin": "head", "train_step_begin": "begin", "train_step_end": "end", "train_epoch_end": "tail"}
hooks |= {"eval_step_end": "eval", "train_end": "over"}
hooks = {f"on_{hook}": lambda _, run_context, place=place: at(place) for hook, place in hooks.items()}
places, best, evaluation = type("Places", (mx.Callback,), hooks)(), Best(), Evaluation()
opt.register_step_pre_hook(lambda *_: at("update"))
opt.register_step_post_hook(lambda *_: at("updated"))
test = DataLoader(TensorDataset(x[:10], y[:10]), 4)
"""
_STEP = """
def step(model, batch):
    loss = model.forward(batch)[0]
    at("backward")
    loss.backward()
    model.optimizer.step()
    model.optimizer.zero_grad()
    return loss
"""
_HOWS = ["SIGTERM", "SIGTERM+wait", "raise", "SIGKILL"] * 2
_HOWS += ["SIGINT+wait", "SIGTERM+SIGTERM", "SIGUSR1", "full+SIGTERM"]
_FLAGS = ["flag", "flag+wait", "flag+SIGKILL", "torn+wait", "torn+flag+wait", "flag+wait+flag+wait", "SIGTERM+flag"]
_REPORTS = ["report", "report+wait", "torn_report+wait", "report+SIGTERM", "report+SIGKILL", "reset+wait"]
_IN_CLUSTER = ["SIGKILL", "scheduler", "scheduler+SIGKILL", "all", "scheduler+SIGTERM"]
_MOST = {"head": 2, "tail": 2, "closed": 2, "over": 1, "begun": 1, "joined": 1, "eval": 5, "data": 40}


def _savers(d: Draft) -> list[str]:
    folder = "'./ckpt_of_rank/' + os.environ['RANK']" if "system=cluster" in d.features else "sys.argv[1]"
    kind = d.choose("saver", "exception", "exit", "both", "periodic", "tft")
    flag = d.choose("flag", "", ", config_file=os.environ['FLAG_FILE']") if kind in ("exit", "both") else ""
    ours = {
        "exception": f"mx.ExceptionCheckpoint(prefix='p', directory={folder})",
        "exit": f"mx.OnRequestExit(save_mindir=False, file_name='n', directory={folder}{flag})",
        "tft": f"mx.TFTRegister(0, '127.0.0.1', 30051, {folder})",
    }
    found = [ours[each] for each in ours if each == kind or (kind == "both" and each != "tft")]
    if kind == "periodic" or d.has("periodic", 0.4):
        options = [f"{'save_checkpoint_seconds=0.05' if d.has('seconds', 0.2) else 'save_checkpoint_steps=2'}"]
        more = ("async_save", "exception_save", "remove_redundancy")
        options += [f"{name}=True" for name in more if d.has(name, 0.3)]
        options += ["keep_checkpoint_max=2"] if "system=cluster" in d.features else []
        found.append(f"mx.ModelCheckpoint('m', {folder}, mx.CheckpointConfig({', '.join(options)}))")
    return found


def _faults(d: Draft) -> tuple[str, ...]:
    places = [
        *["begin", "forward", "update", "updated", "end", "counted"] * 2,
        "head",
        "tail",
        "closed",
        "eval",
        "over",
    ]
    places += ["data"] * ("data=tensors" not in d.features and "workers=0" in d.features)
    found = []
    for _ in range(d.chance.choice([1, 1, 2, 3])):
        if d.has("any line", 0.4):  # between any two statements of the program or the package
            how = d.chance.choice(_HOWS).replace("raise", "SIGINT")
            found.append(f"line:{int(10 ** d.chance.uniform(2.5, 5))}:{how}")
            continue
        more = _FLAGS if {"saver=exit", "saver=both"} & {*d.features} else _REPORTS
        more = _IN_CLUSTER if "system=cluster" in d.features else more
        place = d.chance.choice(places + ["begun", "joined"] * ("system=cluster" in d.features))
        found.append(f"{place}:{d.chance.randint(1, _MOST.get(place, 14))}:{d.chance.choice((*_HOWS, *more, *more))}")
    return tuple(found)


def write_for(system: str, seed: int, ranks: int) -> Program:
    """The program of a seed that trains with `Model`."""
    d = Draft(random.Random(f"{system} {seed}"), ranks, "ddp" if ranks > 1 else "none")
    d.choose("system", system)
    draw_data(d)
    draw_model(d)
    savers, epochs = _savers(d), d.chance.choice([2, 3])
    own_ddp = ranks > 1 and d.has("own DDP", 0.5)
    setup = [each for each in d.parts["setup"] if own_ddp or "DistributedData" not in each]
    arguments = ["model", "loss_fn", "opt", "metrics={'accuracy', 'loss'}"]
    if (kind := d.choose("sched", "none", *SCHEDULERS)) != "none":
        setup.append(f"sched = {SCHEDULERS[kind]}")
        per_epoch = kind == "plateau" or d.has("sched per epoch", 0.3)
        arguments.append(f"lr_scheduler=sched, lr_scheduler_interval={'epoch' if per_epoch else 'step'!r}")
    if d.has("own step", 0.25):
        setup.append(_STEP)
        arguments.append("train_step=step")
    else:
        arguments += [f"grad_accum={d.chance.choice([2, 3])}"] * d.has("accumulation", 0.3)
        arguments += ["max_grad_norm=1.0"] * d.has("clip", 0.3)
    arguments += ["amp=torch.bfloat16"] * d.has("amp", 0.2)
    if "saver=tft" in d.features and d.has("wrapper", 0.7):
        arguments[2] = "mx.OptTFTWrapper(opt)"
    hook = d.choose("evaluation", "on_train_epoch_end", "on_train_step_end", "none")
    callbacks = _CALLBACKS.replace("HOOK", hook).replace("EVERY", "1" if "epoch" in hook else "4")
    callbacks = callbacks.replace("PATIENCE", str(d.has("patience", 0.3)))
    given = ["places", "best", "evaluation", *savers] + ["mx.LossMonitor(3)"] * d.has("monitor", 0.3)
    d.chance.shuffle(given)
    options = ", dataset_sink_mode=True" * d.has("sink", 0.2) + ", grace_s=20" * d.has("grace", 0.2)
    train = f"trainer.train({epochs}, loader, [{', '.join(given)}]{options})"
    results = "{'model': bare.state_dict(), 'opt': opt.state_dict(), 'best': best.state_dict()"
    results += ", 'found': evaluation.found"
    results += ", 'sched': (sched.last_epoch, sched.get_last_lr())" * (kind != "none")
    results += ", 'eval': sorted(trainer.eval(test).items())}"
    group = ""
    if system == "cluster":
        group = "from mindx_elastic import cluster\n\nat('begun')\ncluster.init()\nat('joined')"
    elif ranks > 1:
        group = "dist.init_process_group('gloo')"
    group += "\nRANK, RANKS = dist.get_rank(), dist.get_world_size()" if ranks > 1 else "\nRANK, RANKS = 0, 1"
    trainer = f"trainer = mx.Model({', '.join(arguments)})"
    text = "\n\n".join([HEAD + group, *setup, callbacks, trainer, train, f"tell({results}, trainer.position.step)\n"])
    agent = (
        ("mindx-elastic", "run", "--nproc-per-node", str(ranks), "--max-restarts", "9")
        if ranks > 1 and system != "cluster"
        else ()
    )
    return Program(seed, text, tuple(d.features), _faults(d), agent, cluster=ranks if system == "cluster" else 0)


def run_cluster(folder: Path, env: dict[str, str], workers: int) -> tuple[int, str]:
    """Start the program `train.py` in a folder by run.sh, as its users do, and what has died by recover.sh. Returns how
    often that was, and what all processes have said. Raises Stalled where it hangs."""
    env |= {"WORKER_NUM": str(workers), "MS_SCHED_PORT": str(free_port()), "PYTHON": sys.executable}
    names, device = ["scheduler", *(f"worker_{number}" for number in range(workers))], folder / "device"
    said, num_starts = "", 0

    def script(name: str) -> str:
        shutil.copy(_EXAMPLE / name, folder)
        words = ["bash", str(folder / name)]
        return subprocess.run(words, env=env, capture_output=True, text=True, start_new_session=True, check=True).stdout

    def pid(name: str) -> int:
        return int((device / f"{name}.pid").read_text())

    try:
        script("run.sh")
        watchdog = Watchdog(pid("worker_0"))
        while True:
            time.sleep(0.3)
            text = {name: (device / f"{name}.log").read_text(errors="replace") for name in names}
            alive = {name for name in names if Path(f"/proc/{pid(name)}").exists()}
            going = {name for name in names[1:] if "ENDED" not in text[name]}
            said = "\n".join(text.values())
            if not alive | going or num_starts == 9:
                return num_starts, said
            if going and (going | {"scheduler"}) - alive:
                num_starts += 1
                said += script("recover.sh")
                watchdog = Watchdog(pid("worker_0"))
            watchdog.check(len(said))
    finally:
        for name in names:
            with suppress(OSError):
                os.kill(pid(name), signal.SIGKILL)
