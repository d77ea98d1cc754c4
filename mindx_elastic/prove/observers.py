"""Answers for the port ``observers`` of the guard (see `guard.observer`, `guard.overlap`)."""

from __future__ import annotations

from mindx_elastic.prove.play_on import Overlap
from mindx_elastic.prove.proof_witness import open_proof
from mindx_elastic.prove.variables import own_variables

__all__ = ["Overlap", "open_proof", "own_variables"]
