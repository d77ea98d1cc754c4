"""The program of a dynamic cluster as far as its scheduler comes: it must go no further than `cluster.init`."""

from __future__ import annotations

from mindx_elastic import cluster

if __name__ == "__main__":
    cluster.init()
    raise AssertionError("a scheduler runs no training")
