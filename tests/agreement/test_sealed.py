"""Who has the key can write; nobody else can, not even what somebody with the key once wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.agreement.sealed import NotOursError, Seal

KEY = b"0123456789abcdef"


def joined(key: bytes | None = KEY, scope: str = "mindx/0/0") -> tuple[Seal, Seal]:
    """The seals of two ranks, after rank 0 has begun a start."""
    first, second = Seal(key, scope, 0), Seal(key, scope, 1)
    second.enter("session", first.begin("session"))
    assert first.has_session and second.has_session
    return first, second


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


def test_a_session_of_an_earlier_start_is_of_no_use_with_this_ones_rank_0() -> None:
    """The prefix and the user's key may be the same."""
    replayed = Seal(KEY, "mindx/0/0", 0).begin("session")
    first, second = Seal(KEY, "mindx/0/0", 0), Seal(KEY, "mindx/0/0", 1)
    own = first.begin("session")
    second.enter("session", replayed)
    with pytest.raises(NotOursError):
        first.open("stop/offer/1", second.close("stop/offer/1", "7"))
    for wrong in (own[:-1], "", Seal(None, "mindx/0/0", 0).close("session", "x" * 32), second.close("session", "x")):
        with pytest.raises(NotOursError):
            second.enter("session", wrong)


def test_before_the_session_a_rank_is_heard_by_those_who_ask_for_it() -> None:
    first, _ = joined()
    early = Seal(KEY, "mindx/0/0", 1).close("answer", "!")
    assert first.open("answer", early, early=True) == "!"
    with pytest.raises(NotOursError):
        first.open("answer", early)


def test_there_is_no_way_back_to_a_job_without_a_key() -> None:
    keyed, plain = Seal(KEY, "s", 0), Seal(None, "s", 1)
    with pytest.raises(NotOursError, match="not sealed"):
        keyed.open("first", plain.close("first", ""))
    with pytest.raises(NotOursError, match="this rank has none"):
        plain.open("first", keyed.close("first", ""))
    with pytest.raises(NotOursError, match="too many"):  # and it is not looked at
        plain.open("request", b"9" * (7 << 20), limit=4096)


def test_a_secret_is_derived_by_all_ranks_and_by_nobody_else() -> None:
    first, second = joined()
    assert first.derive("public") == second.derive("public") != "public"
    assert joined()[0].derive("public") != first.derive("public")
    assert Seal(None, "", 0).derive("public") == "public"
