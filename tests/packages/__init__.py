"""Other people's packages under a guard: stopped by a real signal, started again, compared with a run without a stop.

``python -m tests.packages`` prints the table that docs/trainers.md sums up, ``python -m tests.packages timm keras`` the
rows of these; pytest runs the same under the marker `drill`. What is not installed is left out.
"""
