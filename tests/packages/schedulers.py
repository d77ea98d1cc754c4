"""Schedulers of rates and batch sizes, and gradient clippers with a history."""

from __future__ import annotations

from tests.packages.part import Part

__all__ = ["PARTS"]

_RATE = "[g['lr'] for g in opt.param_groups]"
_OPT = "opt = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"

PARTS = (
    *(
        Part(
            package="pytorch-warmup",
            name=f"{kind}{' with a scheduler inside dampening()' * bool(sched)}{', not named' * (not named)}",
            make=f"import pytorch_warmup\n{_OPT}sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=24)\n"
            f"warmup = pytorch_warmup.{kind}(opt{arguments})",
            named=named or "lr_scheduler=sched",
            step="with warmup.dampening():\n    sched.step()",
            result=_RATE,
            want="equal" if named else "told: not got back: warmup.last_step",
        )
        for kind, arguments, sched, named in (
            ("LinearWarmup", ", warmup_period=10", "s", "lr_scheduler=[sched, warmup]"),
            ("LinearWarmup", ", warmup_period=10", "s", ""),
            ("RAdamWarmup", "", "s", "lr_scheduler=[sched, warmup]"),
        )
    ),
    Part(
        package="warmup-scheduler",
        name="GradualWarmupScheduler",
        make=f"from warmup_scheduler import GradualWarmupScheduler\n{_OPT}"
        "after = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=20)\n"
        "sched = GradualWarmupScheduler(opt, multiplier=1.0, total_epoch=8, after_scheduler=after)",
        named="lr_scheduler=sched",
        step="sched.step()",
        result=_RATE,
    ),
    Part(
        package="bs-scheduler",
        name="StepBS",
        make="from bs_scheduler import StepBS\nloader = DataLoader(data, batch_size=4, shuffle=True)\n"
        "sched = StepBS(loader, step_size=1, gamma=2.0, max_batch_size=16)",
        named="lr_scheduler=sched",
        epoch="sched.step()",
        want="refused: make a loader for each",
    ),
    Part(
        package="timm",
        name="CosineLRScheduler",
        make=f"from timm.scheduler import CosineLRScheduler\n{_OPT}"
        "sched = CosineLRScheduler(opt, t_initial=24, warmup_t=5, warmup_lr_init=1e-4, t_in_epochs=False)",
        named="lr_scheduler=sched, stateful={'n': (n := [0])}",
        step="n[0] += 1; sched.step_update(n[0])",
        result=_RATE,
    ),
    Part(
        package="transformers",
        name="get_cosine_schedule_with_warmup",
        make=f"from transformers import get_cosine_schedule_with_warmup\n{_OPT}"
        "sched = get_cosine_schedule_with_warmup(opt, 5, 24)",
        named="lr_scheduler=sched",
        step="sched.step()",
        result=_RATE,
    ),
)
