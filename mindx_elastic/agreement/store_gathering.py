"""The meetings of a start over the process group's c10d store; the keys and what they mean: see `gather`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from mindx_elastic.agreement.gather import Gathering, is_failure
from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.errors import UntrustedMessageError

__all__ = ["Store", "StoreGathering", "is_missing_key"]

_KEYS_AT_ONCE = 4096  # in one message to the store


class Store(Protocol):
    """The part of `torch.distributed.Store` that we use."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str | bytes, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[str], /) -> None: ...


def is_missing_key(error: Exception) -> bool:
    """Whether the store has answered that a key does not exist."""
    return type(error).__name__ == "DistStoreError"  # torch's, which this module does not import


class StoreGathering(Gathering):
    """Main thread, all ranks together."""

    def __init__(self, store: Store, seal: Seal, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.seal = rank, world_size, seal
        self._store = store
        self._lock = threading.Lock()  # main thread (exceptions, leaving) and watcher share the connection
        self._nonces: list[str] = []

    def _write(self, texts: Mapping[str, str]) -> None:
        keys = [f"start/{key}" for key in texts]
        messages = [self.seal.close(key, text) for key, text in zip(keys, texts.values(), strict=True)]
        with self._lock:
            for number in range(0, len(keys), _KEYS_AT_ONCE):
                part = slice(number, number + _KEYS_AT_ONCE)
                self._store.multi_set(keys[part], messages[part])

    def _write_first(self, key: str, text: str) -> str:
        key = f"start/{key}"
        with self._lock:
            found = self._store.compare_set(key, "", self.seal.close(key, text))
        return self.open_from(key, found, None)

    def _count(self, key: str) -> int:
        with self._lock:
            return self._store.add(f"start/{key}", 1)

    def _heard(self, key: str) -> int:
        with self._lock:
            return self._store.add(f"start/{key}", 0)

    def _ring(self, key: str) -> None:
        with self._lock:
            self._store.set(f"start/{key}", "1")

    def _wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        keys = [f"start/{key}" for key in keys]
        with self._lock:
            if timeout_s <= 0.0:
                return self._store.check(keys)
            try:
                self._store.wait(keys, timedelta(seconds=timeout_s))
            except Exception as error:
                if not is_missing_key(error):
                    raise
                return False
            return True

    def _read(self, keys: Sequence[str], authors: Sequence[int | None]) -> list[str]:
        keys = [f"start/{key}" for key in keys]
        messages: list[bytes] = []
        with self._lock:
            for number in range(0, len(keys), _KEYS_AT_ONCE):
                messages += self._store.multi_get(keys[number : number + _KEYS_AT_ONCE])
        if len(keys) == self.world_size and not self.seal.has_joined and authors[0] is not None:
            self._nonces, found = self._join(keys, messages)
            return found
        return [self.open_from(*each) for each in zip(keys, messages, authors, strict=True)]

    def open_from(self, key: str, message: bytes, author: int | None) -> str:
        try:
            return self.seal.open(key, message, author=author)
        except NotOursError as error:
            if author is None and (early := self._early_failure(key, message)):
                return early
            raise UntrustedMessageError(self._complaint(key, author, error)) from None

    def _early_failure(self, key: str, message: bytes) -> str:
        """The error of a rank that left inside the first meeting, before it had entered the session; empty: none."""
        with suppress(NotOursError):
            text = self.seal.open_early(key, message)
            return text if is_failure(text) else ""
        return ""

    def _welcome(self, key: str) -> None:
        if self._nonces:
            messages = self.seal.welcomes(f"start/{key}/welcome", self._nonces)
            keys = [f"start/{key}/welcome/{rank}" for rank in range(self.world_size)]
            with self._lock:
                for number in range(0, len(keys), _KEYS_AT_ONCE):
                    part = slice(number, number + _KEYS_AT_ONCE)
                    self._store.multi_set(keys[part], messages[part])
            self._nonces = []

    def _be_welcomed(self, key: str) -> None:
        if self.seal.has_joined:
            return
        welcome = f"start/{key}/welcome"
        with self._lock:
            if not self._store.check([f"{welcome}/{self.rank}"]):
                return  # a rank has failed before rank 0 had all the first values
            message = self._store.get(f"{welcome}/{self.rank}")
        try:
            self.seal.enter(welcome, message)
        except NotOursError as error:
            raise UntrustedMessageError(self._complaint(f"{welcome}/{self.rank}", 0, error)) from None

    def _join(self, keys: Sequence[str], messages: Sequence[bytes]) -> tuple[list[str], list[str]]:
        """Rank 0: the nonces and the texts of the first values of all ranks."""
        try:
            return self.seal.join(keys, messages)
        except NotOursError as error:
            for rank, (key, message) in enumerate(zip(keys, messages, strict=True)):
                self.open_from(key, message, rank)  # names the rank
            raise UntrustedMessageError(self._complaint(keys[0], 0, error)) from None

    def _complaint(self, key: str, author: int | None, error: NotOursError) -> str:
        """What may be the cause."""
        whose = "" if author is None else f" of rank {author}"
        return (
            f"rank {self.rank}: {key!r}{whose} in the store of the process group was not written by this job: {error}. "
            "Give all ranks the same MINDX_JOB_KEY (or _FILE); if they have it, others reach the store's port"
        )
