"""Who has the key can write; nobody else can, not even what somebody with the key once wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.agreement.sealed import NotOursError, Seal

KEY = b"0123456789abcdef"


def joined(key: bytes | None = KEY, scope: str = "mindx/0/0", count: int = 2) -> list[Seal]:
    """The seals of all ranks, after the first values were collected."""
    seals = [Seal(key, scope, rank) for rank in range(count)]
    messages = [seal.close("start/first", f"of {seal.rank}") for seal in seals]
    nonces, contents = seals[0].join(["start/first"] * count, messages)
    assert contents == [f"of {rank}" for rank in range(count)]
    for seal, message in zip(seals, seals[0].welcomes("start/welcome", nonces), strict=False):
        if seal.rank:
            seal.enter("start/welcome", message)
    assert all(seal.has_joined for seal in seals)
    return seals


@given(content=st.text(), key=st.sampled_from([KEY, None]))
def test_what_one_rank_closes_another_opens(content: str, key: bytes | None) -> None:
    first, second = joined(key)
    if key is None and content.startswith("mx1."):
        return
    assert second.open("stop/decision", first.close("stop/decision", content)) == content
    assert second.open("x", first.close("x", content).encode("utf-8", "surrogatepass"), author=0) == content


@given(data=st.data())
def test_any_change_is_noticed(data: st.DataObject) -> None:
    first, second = joined()
    text = first.close("key", "step 7").encode()
    assert second.open("key", text) == "step 7"
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2), label="replaced"))
    changed = text[:begin] + data.draw(st.binary(max_size=40), label="by") + text[end:]
    if changed != text:
        with pytest.raises(NotOursError):
            second.open("key", changed)


def test_a_message_holds_for_one_key_one_rank_one_guard_and_one_start() -> None:
    first, second = joined()
    text = first.close("stop/decision", "x")
    with pytest.raises(NotOursError, match="another place"):
        second.open("salvage/decision", text)
    with pytest.raises(NotOursError, match="by rank 0"):
        second.open("stop/decision", text, author=1)
    for others in (joined(scope="mindx/0/1"), joined(), joined(key=b"another key of the user's")):
        with pytest.raises(NotOursError):
            others[1].open("stop/decision", text)


def test_the_first_values_of_an_earlier_start_do_not_open_this_one() -> None:
    """The prefix and the user's key may be the same: the nonces are not."""
    old = [Seal(KEY, "mindx/0/0", rank) for rank in range(2)]
    replayed = old[1].close("start/first", "of 1")
    now = [Seal(KEY, "mindx/0/0", rank) for rank in range(2)]
    told = [seal.close("start/first", f"of {seal.rank}") for seal in now]
    nonces, contents = now[0].join(["start/first"] * 2, [told[0], replayed])
    assert contents == ["of 0", "of 1"], "without the session it cannot be told from a new one"
    with pytest.raises(NotOursError, match="another start"):  # the rank itself can
        now[1].enter("start/welcome", now[0].welcomes("start/welcome", nonces)[1])
    with pytest.raises(NotOursError):  # and what it says later is not opened
        now[0].open("stop/offer/1", now[1].close("stop/offer/1", "7"))
    again = Seal(KEY, "mindx/0/0", 1)
    again.close("start/first", "of 1")
    with pytest.raises(NotOursError, match="own message"):
        again.join(["start/first"] * 2, [told[0], replayed])


def test_a_welcome_is_for_one_rank_of_one_start() -> None:
    seals = [Seal(KEY, "mindx/0/0", rank) for rank in range(3)]
    messages = [seal.close("start/first", "") for seal in seals]
    nonces, _ = seals[0].join(["start/first"] * 3, messages)
    welcomes = seals[0].welcomes("start/welcome", nonces)
    for wrong in (welcomes[2], welcomes[1][:-1], "", Seal(None, "mindx/0/0", 0).close("start/welcome/1", "x" * 64)):
        with pytest.raises(NotOursError):
            seals[1].enter("start/welcome", wrong)
    seals[1].enter("start/welcome", welcomes[1])
    assert seals[1].open("x", seals[0].close("x", "later")) == "later"
    assert not seals[2].has_joined


def test_there_is_no_way_back_to_a_job_without_a_key() -> None:
    keyed, plain = Seal(KEY, "s", 0), Seal(None, "s", 1)
    with pytest.raises(NotOursError, match="not sealed"):
        keyed.join(["first"] * 2, [keyed.close("first", ""), plain.close("first", "")])
    with pytest.raises(NotOursError, match="this rank has none"):
        plain.join(["first"] * 2, [keyed.close("first", ""), plain.close("first", "")])
    assert not keyed.has_joined


def test_a_secret_is_derived_by_all_ranks_and_by_nobody_else() -> None:
    first, second = joined()
    assert first.derive("public") == second.derive("public") != "public"
    assert joined()[0].derive("public") != first.derive("public")
    assert Seal(None, "", 0).derive("public") == "public"


def test_what_is_far_too_long_is_not_looked_at() -> None:
    with pytest.raises(NotOursError, match="too many"):
        Seal(None, "", 0).open("request", b"9" * (7 << 20), limit=4096)
