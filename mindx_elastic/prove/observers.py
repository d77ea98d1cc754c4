"""Answers for the port ``observers`` of the guard (see `guard.observer`)."""

from __future__ import annotations

from mindx_elastic.prove.kept_steps import open_kept_steps
from mindx_elastic.prove.not_kept import NotKept
from mindx_elastic.prove.overlap import Played, open_comparison
from mindx_elastic.prove.proof_witness import open_proof
from mindx_elastic.prove.variables import own_variables

__all__ = ["look_for_not_kept", "open_comparison", "open_kept_steps", "open_played", "open_proof", "own_variables"]

look_for_not_kept = NotKept
open_played = Played
