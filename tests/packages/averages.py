"""Averages of weights, and metrics that steer."""

from __future__ import annotations

from tests.packages.part import Part

__all__ = ["PARTS"]

PARTS = (
    *(
        Part(
            package="torch-ema",
            name=f"ExponentialMovingAverage{name}",
            make="from torch_ema import ExponentialMovingAverage\n"
            "ema = ExponentialMovingAverage(model.parameters(), decay=0.9)",
            named=named,
            step="ema.update()",
            result="ema.shadow_params",
            want=want,
            note=note,
        )
        for name, named, want, note in (
            ("", "stateful={'ema': ema}", "equal", ""),
            (
                ", only its list named",
                "stateful={'shadow_params': ema.shadow_params}",
                "told: ema.num_updates (12, now 0)",
                "its count of updates is lost: name the object",
            ),
            (", not named", "", "told: ema.num_updates (12, now 0)", ""),
        )
    ),
    Part(
        package="ema-pytorch",
        name="EMA",
        make="from ema_pytorch import EMA\nema = EMA(model, beta=0.9, update_after_step=3, update_every=2)",
        named="stateful={'ema': ema}",
        step="ema.update()",
        result="ema.ema_model.parameters()",
    ),
    *(
        Part(
            package="timm",
            name=name,
            make=f"from timm.utils import ModelEmaV3\nema = ModelEmaV3(model, decay=0.9, use_warmup=True)\n{make}",
            named=named,
            step=step,
            result="ema.state_dict().values()",
            want=want,
            note=note,
        )
        for name, make, named, step, want, note in (
            (
                "ModelEmaV3, the step from the guard",
                "",
                "stateful={'ema': ema}",
                "ema.update(model, step=guard.step + 1)",
                "equal",
                "",
            ),
            (
                "ModelEmaV3, a local count",
                "num_updates = 0",
                "stateful={'ema': ema}",
                "num_updates += 1; ema.update(model, step=num_updates)",
                "told: num_updates (12, now 0)",
                "the decay follows a local count: take guard.step",
            ),
        )
    ),
    Part(
        package="diffusers",
        name="EMAModel",
        make="from diffusers.training_utils import EMAModel\n"
        "ema = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True)",
        named="stateful={'ema': ema}",
        step="ema.step(model.parameters())",
        result="ema.shadow_params",
    ),
    *(
        Part(
            package="torchmetrics",
            name=f"MulticlassAccuracy that sets the rate{name}",
            make="import torchmetrics\nacc = torchmetrics.classification.MulticlassAccuracy(num_classes=4)"
            + "\nacc.persistent(True)" * persistent,
            named=named,
            loss="F.cross_entropy(out := model(x), y)",
            step="acc.update(out.detach(), y)",
            epoch="opt.param_groups[0]['lr'] = 1e-2 * (2 - float(acc.compute())); acc.reset()",
            result="[opt.param_groups[0]['lr']]",
            want=want,
        )
        for name, persistent, named, want in (
            ("", False, "stateful={'acc': acc}", "equal"),
            (", persistent(True)", True, "stateful={'acc': acc}", "equal"),
            (", not named", False, "", "told: not got back: acc._update_count"),
        )
    ),
)
