"""The words for a difference, on witnesses that are made by hand."""

from __future__ import annotations

from dataclasses import replace

from mindx_elastic.prove.causes import explain, explain_chance
from mindx_elastic.prove.compare import Reference, compare_life, lost_variables
from mindx_elastic.prove.records import ProcessRecord, WitnessedStep
from tests.prove.made import REFERENCE, begin, difference, end, life, step, weights, words


def drawn() -> Reference:
    """Steps in which something has drawn before the forward."""
    steps = [step(n, begin=begin(n, stream=str(4 * (n - 1) + 2))) for n in range(1, 21)]
    return Reference(lives=[life(steps)])


def test_a_seed_set_again() -> None:
    found = difference(step(15, begin=begin(15, stream="seeded")), reference=drawn())
    assert "a seed is set there" in explain(found).cause


def test_another_batch_says_more_than_the_stream_that_its_loader_drew_from() -> None:
    found = difference(step(15, begin=begin(15, stream="drawn"), end=end(15, batch="x16")))
    explained = explain(found)
    assert found.parts[0].kind == "stream" and explained.what == "the batch of step 15 is another one"
    assert "no loader is named" in explained.cause and "Guard(loader=...)" in explained.remedy


def test_another_number_of_forwards_is_counted() -> None:
    more = step(15, end=end(15, calls="2", batch="x15 x16"))
    assert words(more) == "forwards of model in step 15: 1, and 2 in the resumed run"
    without = {key: value for key, value in end(15).items() if not key.startswith(("calls|", "batch|"))}
    gone = explain(difference(step(15, end=without)))
    assert gone.what == "forwards of model in step 15: 1, and nothing in the resumed run"
    assert "guard.enumerate(loader)" in gone.remedy


def test_a_rate_that_is_set_before_the_update_comes_before_the_weights() -> None:
    rate = {**end(15, weights="other", optimizer="other"), "option|optimizer lr": "0.05"}
    found = difference(step(15, end=rate))
    assert [part.kind for part in found.parts] == ["option", "weights", "optimizer"]
    assert explain(found).what.startswith("optimizer lr differs at step 15: 0.1, and 0.05")


def test_weights_with_which_the_script_ends() -> None:
    def ended(name: str) -> ProcessRecord:
        whole = life([step(n) for n in range(15, 21)], resumed=14)
        whole.exit = {"exit|model.w": name}
        return whole

    one = Reference(lives=[life([step(n) for n in range(1, 21)])])
    one.lives[0].exit = {"exit|model.w": "best"}
    assert compare_life(one, ended("best")) is None
    found = compare_life(one, ended("last"))
    assert found is not None and found.step == 20
    explained = explain(found)
    assert explained.what == "every step is equal, and the weights differ with which the script ends: model.w"
    assert "Guard(stateful={'best': best})" in explained.remedy
    assert compare_life(replace(one, varying=frozenset({"exit|model.w"})), ended("last")) is None
    assert compare_life(one, life([step(15)], resumed=14)) is None, "a run that was stopped"


def test_weights_at_entry_at_the_forward_and_after() -> None:
    entered = life([step(15)], resumed=14)
    entered.entered = {**weights(14), "weights|model.w": "other"}
    found = compare_life(REFERENCE, entered)
    assert found is not None
    assert explain(found).what == "weights differ when the state was put back: model.w"
    clipped = Reference(lives=[life([step(n, begin=begin(n, weights=f"c{n}")) for n in range(1, 21)])])
    text = explain(difference(step(15), reference=clipped))
    assert "at the first forward of step 15" in text.what and "changed after the boundary" in text.cause
    assert words(step(17, end=end(17, weights="other"))) == "weights differ after step 17: model.w"
    assert words(step(17, end=end(17, optimizer="other"))).startswith(
        "the optimizer's state differs after step 17: optimizer exp_avg of w"
    )


def test_the_place_and_the_length() -> None:
    assert words(step(15, epoch=1, step_in_epoch=1)) == (
        "step 15 is step 5 of epoch 2; in the resumed run it is step 1 of epoch 1"
    )
    assert words(step(21), step(22)) == (
        "the uninterrupted run ended after step 20; the resumed one went on for 2 steps too many"
    )
    cut = life([step(n) for n in range(15, 30)], resumed=14, outcome="ended")
    found = compare_life(REFERENCE, cut)
    assert found is not None and "9 steps or more too many" in explain(found).what


def test_chance_is_told_with_what_to_seed() -> None:
    found = compare_life(REFERENCE, life([step(1), step(2, end=end(2, batch="new"))]))
    assert found is not None
    seeds = explain_chance(found)
    assert "not deterministic: the batch of step 2 is" in seeds.what and "random.seed(0)" in seeds.remedy
    late = compare_life(REFERENCE, life([step(1), step(2), step(3, end=end(3, weights="other"))]))
    assert late is not None
    kernels = explain_chance(late)
    assert "differ after step 3: model.w" in kernels.what and "use_deterministic_algorithms" in kernels.remedy
    fresh = life([step(1)])
    fresh.entered = {**weights(0), "weights|model.w": "other"}
    early = compare_life(REFERENCE, fresh)
    assert early is not None
    assert "weights differ when the guard was entered: model.w" in explain_chance(early).what


def short_step(number: int, passed: int, **ends: str) -> WitnessedStep:
    end = {"weights|w": str(number), "variable|passed": str(passed + 1), "variable|clock": "1.5"}
    given = {"weights|w": str(number - 1), "variable|passed": str(passed), "variable|clock": "1.5", "variable|k": "f"}
    return WitnessedStep(series=0, number=number, epoch=1, step_in_epoch=number, begin=given, end={**end, **ends})


SHORT = Reference(
    lives=[ProcessRecord(rank=0, series=0, steps=[short_step(n, n - 1) for n in (1, 2, 3)], outcome="finished")],
    varying=frozenset({"variable|clock"}),
)


def short_life(*steps: WitnessedStep) -> ProcessRecord:
    return ProcessRecord(rank=0, series=0, resumed=2, entered={"weights|w": "2"}, steps=[*steps], outcome="finished")


def test_a_variable_that_was_not_got_back_is_named_with_both_values() -> None:
    found = compare_life(SHORT, short_life(short_step(3, 0, **{"weights|w": "x"})))
    assert found is not None
    lines = explain(found).lines
    assert len(lines) == 2 and lines[0] == "weights differ after step 3: w; not got back: passed (2, now 0)"
    assert lines[1].startswith("usual cause: ")
    right = compare_life(SHORT, short_life(short_step(3, 2, **{"weights|w": "x"})))
    assert right is not None and not right.lost


def test_variables_decide_nothing_and_are_told_of_equal_steps_too() -> None:
    other = short_step(3, 0)
    other = replace(other, begin={**(other.begin or {}), "variable|clock": "7", "variable|k": "resumed"})
    assert compare_life(SHORT, short_life(other)) is None
    assert [(lost.name, lost.first, lost.second) for lost in lost_variables(SHORT, short_life(other))] == [
        ("passed", "2", "0")
    ], "not what the reference itself does not change, nor what varies"
