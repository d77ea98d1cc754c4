"""Collects what is known against an exact resume: state of the training that the guard does not keep.

What is certain to make a resumed run differ is refused (`UnmanagedStateError`), or with ``unmanaged="warn"`` a warning.
What only may is one warning. Each is recorded in every file of the run, so that `inspect` and `plan` can say it. A run
that is resumed inherits the notes of its file: what its weights have gone through stays true of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from mindx_elastic.core.certificate import added
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed, printable
from mindx_elastic.errors import UnmanagedStateError, UsageError

__all__ = ["MODES", "NOW_AND_THEN", "Unmanaged"]

MODES = ("error", "warn")
_MOST_NOTES = 32
_MOST_CHARACTERS = 400
_MOST_NAMES = 12
_SHOWN_LATER = "The next resume shows whether they matter"
NOW_AND_THEN = "now and then: "
"""In `Unmanaged.not_kept`, in front of what does not change in each step."""


class Unmanaged:
    """One per guard. Training thread; `notes` may be read from any thread."""

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise UsageError(f'unmanaged={mode!r}: give "error" or "warn"')
        self._refuses = mode == "error"
        self.notes: tuple[str, ...] = ()
        """What is known, oldest first; only ever replaced."""
        self.not_kept = ""
        """Names of variables that change in the training and are not kept: a fact, nothing against an exact resume."""
        self.certificate: tuple[str, ...] = ()
        """What comparisons of the run's resumes have shown, see `core.certificate`; only ever replaced."""
        self._told: set[str] = set()
        self._refusal: str | None = None
        self.has_refused = False
        """Whether there is a `refusal`."""

    def certain(self, what: str, remedy: str, *, saves: bool = False) -> None:
        """A resumed run will differ: raises UnmanagedStateError, or warns once.

        `what`: a sentence without its full stop that names the thing. `remedy`: the line to write. `saves`: the state
        of the last boundary is whole, and the corrected program goes on from it: saved as at any exception.
        """
        if not self._refuses:
            self.risk(what, remedy)
            return
        error = UnmanagedStateError(f"{what}. {remedy}")
        error.saves = saves
        if not saves:
            self._refusal, self.has_refused = str(error), True
        raise error

    def risk(self, what: str, remedy: str) -> None:
        """A resumed run may differ: warns once."""
        self.hint(what, remedy)
        self._note([what])

    def hint(self, what: str, remedy: str) -> None:
        """Warn once that something may soon be wrong; record nothing."""
        if what not in self._told:
            self._told.add(what)
            logger.warning("%s. %s", what, remedy)

    def note_not_kept(self, in_steps: Sequence[str], later: Sequence[str]) -> None:
        """Variables of the program that go on from step to step, and those that change now and then."""
        parts = [listed(in_steps, _MOST_NAMES), NOW_AND_THEN * bool(later) + listed(later, _MOST_NAMES)]
        self.not_kept = printable("; ".join(filter(None, parts)))[:_MOST_CHARACTERS]

    def say_not_kept(self, names: Sequence[str], how: str, *, is_resumed: bool) -> None:
        """They are noted, in the first process of a run that knows them."""
        if names:
            found = printable(listed(names, _MOST_NAMES))[:_MOST_CHARACTERS]
            effect = "This run was resumed without them and may differ" if is_resumed else _SHOWN_LATER
            logger.info("%s and are not kept: %s. %s", how, found, effect)

    @property
    def refusal(self) -> UnmanagedStateError | None:
        """Why the training was refused, also if the program has caught that: nothing of it may be saved."""
        return None if self._refusal is None else UnmanagedStateError(self._refusal)

    def certify(self, after: int, outcome: str, *, ranks: int, why: str, last: int | None = None) -> None:
        """What the comparison of the resume from step `after` has shown. The arguments: see
        `core.certificate.CertifiedResume`."""
        last, date = after if last is None else last, round(time.time())
        self.certificate = added(
            self.certificate, after=after, last=last, outcome=outcome, why=why, ranks=ranks, date=date
        )

    def inherit(self, notes: Iterable[str]) -> None:
        """The run goes on from a file with these notes."""
        self._note(notes)

    def _note(self, notes: Iterable[str]) -> None:
        shortened = (printable(note)[:_MOST_CHARACTERS] for note in notes)
        self.notes = tuple(dict.fromkeys((*self.notes, *shortened)))[:_MOST_NOTES]
