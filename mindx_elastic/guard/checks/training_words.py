"""What a line of code does, by the words in it: it logs, it trains, it sets what the training depends on.

Programs name such things alike. Nothing tells whether a word means what it says: whoever asks decides about a risk.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

__all__ = [
    "STEPS",
    "changes_a_gradient",
    "counts_on",
    "logs",
    "name_of",
    "names_a_log",
    "names_a_setting",
    "sets_a_rate",
    "trains",
]
from mindx_elastic.guard.checks.syntax import children, walk

STEPS = ("step", "step_update", "step_frac")
"""Methods of schedulers, timm's among them."""
_TRAINS = frozenset(
    [
        "backward",
        "step",
        "zero_grad",
        "clip_grad_norm_",
        "clip_grad_value_",
        "unscale_",
        "update_parameters",
        "no_sync",
        "requires_grad_",
    ]
)
_RATES = ("lr", "momentum", "weight_decay", "betas")
_SETTINGS = re.compile(
    r"(^|_)(lr|schedule|scheduler|adjust|warmup|anneal|ramp|beta|alpha|noise|seed|temperature)(_|$)|^clip_grad"
)
_STAGES = tuple(
    f"{verb}_{what}"
    for verb in ("set", "next", "raise", "increase", "update")
    for what in ("level", "difficulty", "stage", "phase", "curriculum")
)
_LIKE_A_LOG = re.compile(r"log|print|save|plot|write|report|bar|display|summary|record")
_LOGGING = frozenset(
    """
    print printf format log log_dict log_metrics log_scalar log_step info debug warning warn error exception critical
    add_scalar add_scalars add_image add_histogram set_postfix set_postfix_str set_description set_description_str
    update_postfix write writerow info_rank0 scalar track display print_rank_0 print_rank0 progress
    """.split()  # noqa: SIM905
)
_LOGGERS = frozenset({"logger", "logging", "log", "wandb", "writer", "tqdm", "pbar", "progress", "bar", "tb", "mlflow"})
_OWN_LOGS = ("step_end", "record_boundary")


def name_of(node: ast.AST) -> str:
    """The last word of a name or an attribute: ``step`` of ``self.optimizer.step``; else empty."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def names_a_log(called: str) -> bool:
    """Whether a word is one of logging or saving, by a part of it: ``save_plot``. `logs` asks for whole words."""
    return bool(_LIKE_A_LOG.search(called))


def names_a_setting(called: str) -> bool:
    """Whether a function sets what the training depends on, by its name: ``adjust_lr``, ``set_level``."""
    return bool(_SETTINGS.search(called)) or called.startswith(_STAGES)


def logs(call: ast.Call) -> bool:
    """Whether a call prints or logs."""
    func = call.func
    if isinstance(func, ast.Name):
        return func.id in _LOGGING
    if not isinstance(func, ast.Attribute):
        return False
    owner = name_of(func.value).strip("_").lower()
    return func.attr in _LOGGING or func.attr in _OWN_LOGS or owner in _LOGGERS


def counts_on(node: ast.AST) -> bool:
    """Whether numbers go on where a resumed epoch does: of ``guard.steps()``, or ``guard.position.step_in_epoch``."""
    return any(
        name_of(part.func) == "steps" if isinstance(part, ast.Call) else part.attr == "step_in_epoch"
        for part in walk(node)
        if isinstance(part, (ast.Call, ast.Attribute))
    )


def sets_a_rate(statement: ast.stmt) -> bool:
    """Whether a statement sets a learning rate or the like: ``group["lr"] = ...``, ``group["lr"] *= ...``."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    return any(isinstance(t, ast.Subscript) and ast.unparse(t.slice).strip("'\"") in _RATES for t in targets)


def changes_a_gradient(node: ast.AST) -> bool:
    """``p.grad.mul_(scale)``, ``p.grad *= scale``."""
    owner: ast.AST | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
        owner = node.func.value
    elif isinstance(node, ast.AugAssign):
        owner = node.target
    while isinstance(owner, (ast.Attribute, ast.Subscript)):
        if isinstance(owner, ast.Attribute) and owner.attr == "grad":
            return True
        owner = owner.value
    return False


def trains(statement: ast.stmt) -> bool:
    """Whether a statement is of the training: a backward, a step, a break, a learning rate."""
    nodes = list(_of_this_loop(statement))
    if any(isinstance(node, (ast.Break, ast.Continue, ast.Return)) for node in nodes):
        return True
    return any(
        (
            isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and (n.func.attr in _TRAINS or n.func.attr.startswith(_STAGES))
            and not _is_profiler(n)
        )
        or (isinstance(n, ast.stmt) and sets_a_rate(n))
        or changes_a_gradient(n)
        for n in walk(statement)
    )


def _is_profiler(call: ast.Call) -> bool:
    owner = name_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return "prof" in owner or names_a_log(owner)


def _of_this_loop(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without those of loops and functions inside."""
    yield node
    if not isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)):
        for child in children(node):
            yield from _of_this_loop(child)
