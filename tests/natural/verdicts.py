"""What the package must say about each loop, and about the loop with a line of its state taken away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EXACT", "LOOPS", "Cut", "Exact", "Found", "Loop", "Refused", "Told", "Verdict", "Warned"]

_FOLDER = Path(__file__).parent / "loops"


@dataclass(frozen=True)
class Exact:
    """The resumed run ends with the same numbers."""


@dataclass(frozen=True)
class Refused:
    """The first run ends with an error that has these words."""

    words: str

    @property
    def saves(self) -> bool:
        """Only the loop is at fault, and the steps are kept for the corrected one."""
        return "begins anew" in self.words


@dataclass(frozen=True)
class Found:
    """`mindx-elastic prove` finds it, with these words; a run by itself ends without an error."""

    words: str
    variable: str = ""
    """The variable of the program that it names as the likely cause."""
    often: bool = False
    """It is proved by each run of the tests, and not only by `make drill`."""
    stops: int = 3
    """From 2 on the end of the training is one of them."""
    steps: int = 0
    """``--steps``; 0: as many as `prove` takes by itself."""


@dataclass(frozen=True)
class Warned:
    """The run goes on and says these words: it may differ."""

    words: str
    found: Found | None = None
    """What `prove` says about it."""


@dataclass(frozen=True)
class Told:
    """The first run may be silent; the first one that is resumed says these words: the variable, or the cause."""

    words: str
    found: Found | None = None
    """What `prove` says about it."""


Verdict = Exact | Refused | Warned | Found | Told


@dataclass(frozen=True)
class Cut:
    """The loop with `old` replaced by `new`."""

    old: str
    verdict: Verdict
    new: str = ""


@dataclass(frozen=True)
class Loop:
    """One file in ``loops/``, or in another folder."""

    name: str
    verdict: Verdict
    cuts: Sequence[Cut] = ()
    ranks: int = 1
    folder: Path = _FOLDER

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.py"

    def source(self, cut: Cut) -> str:
        """The text with the cut made. Raises ValueError unless its place is there exactly once."""
        text = self.path.read_text(encoding="utf-8")
        if text.count(cut.old) != 1:
            raise ValueError(f"{self.name}: {cut.old!r} is there {text.count(cut.old)} times")
        return text.replace(cut.old, cut.new)


EXACT = Exact()
COUNTS_BY_ITSELF = Refused("begins anew after a resume, for it counts by itself")
UNNAMED_GENERATOR = Refused("draws numbers in the training and is not kept")
UNNAMED_MODULE = Refused("changes in the training and is not named")
UNNAMED_SCHEDULER = Refused("belongs to an optimizer of the guard, steps and is not named")
NO_OPTIMIZER = Cut("optimizer=opt, ", Refused("steps and is not named"))
NO_LOADER = Cut("loader=loader, ", Refused("steps use batches of a "))

LOOPS: Sequence[Loop] = (
    Loop("epochs", EXACT, [Cut("lr_scheduler=sched, ", UNNAMED_SCHEDULER)]),
    Loop("stock_loader", EXACT, [NO_LOADER]),
    Loop("stock_workers", EXACT, [NO_OPTIMIZER]),
    Loop("stock_persistent", EXACT, [NO_LOADER]),
    Loop("stock_generator", EXACT, [NO_LOADER]),
    Loop("stock_weighted", EXACT, [NO_LOADER]),
    Loop("stock_buckets", EXACT, [Cut("guard.epochs(3)", COUNTS_BY_ITSELF, new="range(1, 4)")]),
    Loop("stock_stream", EXACT, [NO_LOADER]),
    Loop("stream_shuffle_buffer", EXACT, [NO_LOADER]),
    Loop("list_of_batches", Refused("knows no position")),
    Loop("list_converted", EXACT, [Cut("loader=loader, ", Refused("steps use batches of a ReplayLoader over list"))]),
    Loop("epochs_from_zero", EXACT, [Cut("guard.epochs(3, start=0)", COUNTS_BY_ITSELF, new="range(3)")]),
    Loop("steps_endless", EXACT, [Cut("guard.steps(13)", COUNTS_BY_ITSELF, new="range(13)"), NO_LOADER]),
    Loop("steps_while", EXACT, [NO_OPTIMIZER]),
    Loop("steps_full_batch", EXACT, [NO_OPTIMIZER]),
    Loop("nanogpt", EXACT, [Cut("guard.steps(12)", COUNTS_BY_ITSELF, new="range(1, 13)")]),
    Loop("nanogpt_ahead", Told("from_function(get_batch)", Found("from_function(get_batch)"))),
    Loop("nanogpt_function_loader", EXACT, [NO_LOADER]),
    Loop("ahead_in_epoch", EXACT, [NO_LOADER]),
    Loop("ahead_across_epochs", EXACT, [NO_LOADER]),
    Loop(
        "ahead_prefetcher",
        EXACT,
        [
            NO_LOADER,
            Cut(
                "            self.batch = next(self.batches)\n",
                Told("began with another torch stream"),
                new="            x, y = next(self.batches)\n            self.batch = x + torch.randn_like(x), y\n",
            ),
        ],
    ),
    Loop("ahead_generator", EXACT, [NO_LOADER]),
    Loop("ahead_thread", Refused("are fetched in another thread")),
    Loop(
        "accumulate",
        EXACT,
        [
            Cut(
                "guard.enumerate(loader, start=1)",
                Found("weights differ after step", "i"),
                new="enumerate(loader, start=1)",
            )
        ],
    ),
    Loop("accumulate_own_count", EXACT, [NO_OPTIMIZER]),
    Loop("accumulate_inner", EXACT, [NO_LOADER]),
    Loop("skips_batches", EXACT, [NO_LOADER]),
    Loop("grad_scaler", EXACT, [Cut("scaler=scaler, ", Refused('scaler "scaler" (GradScaler'))]),
    Loop(
        "gan",
        EXACT,
        [
            Cut("optimizer=[opt_g, opt_c]", Refused("steps and is not named"), new="optimizer=opt_g"),
            Cut("model=[generator, critic]", Refused("that none of the guard's objects holds"), new="model=generator"),
        ],
    ),
    Loop(
        "two_loaders",
        EXACT,
        [Cut("loader=[labelled, unlabelled]", Refused("beside the named ones"), new="loader=labelled")],
    ),
    Loop("ema_averaged_model", EXACT, [Cut('    stateful={"ema": ema},\n', UNNAMED_MODULE)]),
    Loop("ema_own_class", EXACT, [Cut('    stateful={"ema": ema},\n', Told("ema"))]),
    Loop("ema_copy", EXACT, [Cut("model=[model, slow]", UNNAMED_MODULE, new="model=model")]),
    Loop("plateau", EXACT, [Cut("    lr_scheduler=sched,\n", UNNAMED_SCHEDULER)]),
    Loop("plateau_of_a_meter", EXACT, [Cut('    stateful={"meter": meter},\n', Told("meter"))]),
    Loop("scheduler_each_epoch", EXACT, [Cut("    lr_scheduler=sched,\n", UNNAMED_SCHEDULER)]),
    Loop("warmup_cosine", EXACT, [Cut("    lr_scheduler=sched,\n", UNNAMED_SCHEDULER)]),
    Loop("lambda_lr", EXACT, [Cut("    lr_scheduler=sched,\n", UNNAMED_SCHEDULER)]),
    Loop(
        "evaluate_in_loop",
        EXACT,
        [
            Cut(
                "with guard.outside_step():\n                    loss = evaluate()",
                Refused("a random stream (torch) moves after guard.step_end()"),
                new="loss = evaluate()",
            )
        ],
    ),
    Loop(
        "evaluate_on_training_data",
        EXACT,
        [
            Cut(
                "with guard.outside_step(), torch.no_grad():",
                Refused("is iterated twice at once"),
                new="with torch.no_grad():",
            )
        ],
    ),
    Loop("evaluate_with_dropout", EXACT, [NO_LOADER]),
    Loop("frozen_batch_norm", EXACT, [Cut("guard.epochs(3)", COUNTS_BY_ITSELF, new="range(1, 4)")]),
    Loop("distillation", EXACT, [NO_OPTIMIZER]),
    Loop("pruning", EXACT, [NO_OPTIMIZER]),
    Loop("weight_norm", EXACT, [NO_OPTIMIZER]),
    Loop("two_phases_one_loader", EXACT, [NO_OPTIMIZER]),
    Loop(
        "early_stopping",
        EXACT,
        [
            Cut(
                '    stateful={"stopping": stopping},\n',
                Found("went on for 5 steps too many", "stopping.bad", stops=8, steps=60),
            )
        ],
    ),
    Loop("unfreezing", EXACT, [NO_OPTIMIZER]),
    Loop("two_phases", EXACT, [Cut("loader=[easy, full]", Refused("beside the named ones"), new="loader=easy")]),
    Loop("curriculum", Refused("steps use batches of a ")),
    Loop("curriculum_data_set", EXACT, [NO_LOADER]),
    Loop("exchanged_transform", Told("the batch of step 8 is another one")),
    Loop("active_learning", EXACT, [Cut("loader=loader,\n    ", Refused("steps use batches of a "))]),
    Loop("curriculum_longer", EXACT, [NO_LOADER]),
    Loop(
        "steps_of_an_epoch",
        EXACT,
        [
            Cut(
                "guard.steps(5)",
                Refused("begins anew when its epoch is resumed in the middle, for it counts by itself"),
                new="range(5)",
            )
        ],
    ),
    Loop("fixmatch", EXACT, [NO_OPTIMIZER]),
    Loop("passes_in_an_epoch", Refused("begins anew when its epoch is resumed in the middle, for it counts by itself")),
    Loop(
        "range_over_the_loader",
        EXACT,
        [
            Cut(
                "guard.steps(len(loader), start=0)",
                Found("the resumed run fails with exit code 1: StopIteration"),
                new="range(len(loader))",
            )
        ],
    ),
    Loop("auto_clip", EXACT, [Cut('    stateful={"clip": clip},\n', Told("clip.norms"))]),
    Loop("muon", EXACT, [Cut("optimizer=opt, ", Told("an unnamed optimizer"))]),
    Loop(
        "noise_generator",
        EXACT,
        [Cut(text, UNNAMED_GENERATOR) for text in ('"noise": noise, ', '"mix": mix, ', ', "draw": draw')],
    ),
    Loop("data_set_with_generator", EXACT, [NO_LOADER]),
    Loop("mixup_global", EXACT, [NO_OPTIMIZER]),
    Loop(
        "dqn",
        EXACT,
        [
            Cut('"memory": memory', Told("memory")),
            Cut("model=[q, target]", UNNAMED_MODULE, new="model=q"),
            Cut('"world": world, ', UNNAMED_GENERATOR),
        ],
    ),
    Loop("dqn_deque", EXACT, [Cut(', "memory": memory', Told("memory"))]),
    Loop(
        "reinforce",
        EXACT,
        [Cut(', "baseline": baseline', Told("baseline.mean", Found("weights differ after step", "baseline.mean")))],
    ),
    Loop(
        "sac_temperature",
        EXACT,
        [Cut('    stateful={"log_alpha": log_alpha},\n', Refused("that none of the guard's objects holds"))],
    ),
    Loop(
        "criterion_with_weights",
        EXACT,
        [Cut("model=[model, criterion]", Refused("that none of the guard's objects holds"), new="model=model")],
    ),
    Loop(
        "sam",
        EXACT,
        [Cut("optimizer=[opt, opt.base_optimizer]", Refused("steps and is not named"), new="optimizer=opt")],
    ),
    Loop("lookahead", EXACT, [NO_OPTIMIZER]),
    Loop(
        "hidden_state_of_a_network",
        EXACT,
        [Cut('stateful={"memory": memory}, ', Told("memory.hidden", Found("is another one", "memory.hidden")))],
    ),
    Loop(
        "vae",
        EXACT,
        [Cut("model=[encode, decode]", Refused("that none of the guard's objects holds"), new="model=encode")],
    ),
    Loop("diffusion", EXACT, [Cut('    stateful={"ema": ema},\n', UNNAMED_MODULE)]),
    Loop("moco", EXACT, [NO_OPTIMIZER]),
    Loop("tasks_in_turn", EXACT, [Cut("loader=loaders, ", Refused("steps use batches of a "))]),
    Loop("transformer", EXACT, [Cut("    lr_scheduler=sched,\n", UNNAMED_SCHEDULER)]),
    Loop(
        "two_optimizers_by_kind",
        EXACT,
        [Cut("optimizer=opts", Refused("steps and is not named"), new="optimizer=opts[1]")],
    ),
    Loop("swa", EXACT, [Cut(', stateful={"swa": swa}', Warned('module "swa" (AveragedModel'))]),
    Loop("hand_made_update", EXACT, [NO_LOADER]),
    Loop("non_persistent_buffer", EXACT, [NO_OPTIMIZER]),
    Loop("draws_after_the_boundary", Refused("a random stream (torch) moves after guard.step_end()")),
    Loop(
        "trainer_class",
        EXACT,
        [
            Cut(', "noise")}', Refused('Guard(stateful={"noise": self.noise}, ...)'), new=")}"),
            Cut('"factor", ', Told("factor"), new=""),
            Cut('"history", ', Refused("Trainer has no attribute 'histroy'"), new='"histroy", '),
        ],
    ),
    Loop("counter_of_its_own", Told("passed", Found("weights differ after step", "passed"))),
    Loop("order_of_a_set", Found("the script itself is not deterministic")),
    Loop("best_weights", Told("best_loss", Found("weights differ after step", "best_loss"))),
    Loop("moving_average_of_the_loss", Told("average", Found("optimizer lr differs at step", "average", often=True))),
    Loop("calls_of_the_data_set", Told("calls", Found("is another one", "loader.dataset.calls"))),
    Loop("not_deterministic", Found("the script itself is not deterministic")),
    Loop("iterator_before_the_guard", Refused("was made before the guard was entered")),
    Loop("no_position", COUNTS_BY_ITSELF),
    Loop("no_loader_named", Refused("no loader is named")),
    Loop("another_loader", Refused("beside the named ones")),
    Loop("evaluation_in_mid_epoch", Refused("a random stream (torch) moves after guard.step_end()")),
    Loop("optimizer_of_phase_two", Refused("steps and is not named")),
    Loop("new_head", EXACT, [NO_OPTIMIZER]),
    Loop("memory_bank", EXACT, [Cut('stateful={"bank": bank}, ', Told("bank.rows"))]),
    Loop("temporal_ensembling", EXACT, [Cut('    stateful={"ensemble": ensemble},\n', Told("ensemble"))]),
    Loop("dynamic_weight_average", EXACT, [Cut('    stateful={"history": history},\n', Told("history"))]),
    Loop("first_losses", EXACT, [Cut('    stateful={"balance": balance},\n', Told("balance.first"))]),
    Loop(
        "state_of_its_own",
        EXACT,
        [
            Cut('("scale", "calls")', Told("scale.calls"), new='("scale",)'),
            Cut(
                "            opt.zero_grad()\n",
                Told("model.3.p"),
                new="            if guard.step == 3:\n                model.apply(off)\n            opt.zero_grad()\n",
            ),
            Cut(
                "            loss = scale(F.cross_entropy(model(x), y))\n",
                Told("first"),
                new="            loss = F.cross_entropy(model(x), y)\n            if first is None:\n"
                "                first = loss.item()\n            loss = loss / first\n",
            ),
            Cut(
                "            loss.backward()\n",
                Told("n ("),
                new="            n += 1\n            (loss * 0.5 if n % 4 == 0 else loss).backward()\n",
            ),
            Cut(
                "            opt.step()\n",
                Told("is_late"),
                new="            if not is_late and guard.step == 3:\n                is_late = True\n"
                "            if is_late:\n                model[0].weight.grad.mul_(0.1)\n            opt.step()\n",
            ),
        ],
    ),
    Loop("wgan_while", Found("the resumed run fails with exit code 1: StopIteration")),
    Loop("lstm_of_a_module", Told("state")),
    Loop(
        "epochs_of_steps",
        EXACT,
        [
            Cut(
                "guard.steps(4)",
                Refused("begins anew when its epoch is resumed in the middle, for it counts by itself"),
                new="range(4)",
            )
        ],
    ),
    Loop("mean_teacher", EXACT, [Cut("model=[student, teacher]", UNNAMED_MODULE, new="model=student")]),
    Loop("lookahead_wrapper", EXACT, [NO_OPTIMIZER]),
    Loop("ddp", EXACT, [NO_OPTIMIZER], ranks=2),
    Loop("ddp_distributed_sampler", EXACT, [NO_LOADER], ranks=2),
    Loop("ddp_own_sampler", EXACT, [NO_LOADER], ranks=2),
    Loop("ddp_accumulate", EXACT, [NO_OPTIMIZER], ranks=2),
    Loop("ddp_hand_averaged", EXACT, [NO_OPTIMIZER], ranks=2),
    Loop("ddp_local_later", Warned("gradients that DDP has not reduced"), ranks=2),
    Loop("ddp_powersgd", EXACT, [Cut('    stateful={"powersgd": powersgd},\n', Refused("PowerSGD"))], ranks=2),
    Loop("ddp_wrapped", EXACT, [NO_OPTIMIZER], ranks=2),
    Loop("ddp_ema", EXACT, [Cut('    stateful={"ema": ema},\n', UNNAMED_MODULE)], ranks=2),
    Loop("ddp_prefetch", EXACT, [NO_LOADER], ranks=2),
    Loop("fsdp", EXACT, [Cut('    stateful={"ema": ema},\n', UNNAMED_MODULE)], ranks=2),
)
