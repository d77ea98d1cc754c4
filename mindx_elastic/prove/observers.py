"""Answers for the port ``observers`` of the guard (see `guard.observers`)."""

from __future__ import annotations

from mindx_elastic.prove.play_on import Overlap
from mindx_elastic.prove.proof_witness import open_proof
from mindx_elastic.prove.variables import Variables

__all__ = ["Variables", "open_overlap", "open_proof"]

open_overlap = Overlap
