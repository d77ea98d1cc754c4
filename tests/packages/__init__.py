"""Other people's packages under a guard: stopped by a real signal, started again, compared with a run without a stop.

``python -m tests.packages`` prints the table that docs/trainers.md sums up, ``python -m tests.packages timm keras`` the
rows of these. What is not installed is left out; what is not as the parts say is named, with exit code 1.
"""
