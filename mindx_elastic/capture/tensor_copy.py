"""The copy of one tensor that is in no state_dict, made again when the tensor has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mindx_elastic.capture.dtensors import local_part

__all__ = ["TensorCopy", "sums_of"]

_SMALL = 1 << 12  # bytes; compared in about a microsecond
_FIRST = 10
_WITH_ADDRESS = frozenset((torch.Tensor, torch.nn.Parameter))
"""Subclasses may have no own memory."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class TensorCopy:
    """Trusts the tensor's version counter, and looks from time to time whether it may.

    Code can change a tensor without the counter (`.data`, a numpy array of the same memory). `recheck` compares the
    contents, and so do renewals: the first ten, then 16, 32, 64, ...; all of a small tensor where `closely`. Once they
    have found that, each renewal copies.
    """

    def __init__(self, tensor: torch.Tensor, *, is_original: bool = False, closely: bool = False) -> None:
        """is_original: every start builds it again, so that it is copied only once it has changed."""
        self.tensor = tensor
        self.value: torch.Tensor | None = None
        """The copy; None: the tensor has not changed since the program built it."""
        self.has_changed = False
        """The tensor has been copied again since."""
        self._always = tensor.is_inference()  # it has no counter
        self._version = -1 if self._always else tensor._version
        self._description = self._describe()
        self._renewals = 0
        self._compares = closely and tensor.nbytes <= _SMALL and tensor.device.type == "cpu"
        self._sum = sums_of([tensor]) if is_original else [0]
        if not is_original:
            self._copy()

    @property
    def is_stale(self) -> bool:
        """The tensor's counter has moved since the copy, or it has none; or the tensor has other memory now or means
        something else by it (``.data = ...``), which moves no counter."""
        return self._always or self._version != self.tensor._version or self._description != self._describe()

    def _describe(self) -> tuple[object, ...]:
        tensor = self.tensor
        if type(tensor) not in _WITH_ADDRESS or tensor.layout is not torch.strided:
            return tensor.dtype, tensor.shape
        return tensor.dtype, tensor.shape, tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg()

    def renew(self) -> None:
        """A boundary: copy the tensor if it has changed."""
        if self.is_stale:
            self._copy()
            self.has_changed = True
            return
        count = self._renewals = self._renewals + 1
        if self._compares or count <= _FIRST or count & (count - 1) == 0:
            self.recheck()

    def recheck(self) -> None:
        """Compare the contents. For a moment in which the tensor is as at the boundary."""
        if not self._always and not self._is_same():
            self._always = self.has_changed = True
            self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        self.value = self.tensor.detach().clone()
        self._description = self._describe()
        if not self._always:
            self._version = self.tensor._version

    @torch.no_grad()
    def _is_same(self) -> bool:
        if self.value is None:
            return sums_of([self.tensor]) == self._sum
        if self.value.dtype != self.tensor.dtype:
            return False
        return torch.equal(local_part(self.value), local_part(self.tensor))


@torch.no_grad()
def sums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each, all its bytes, taken as numbers; 0 for what has none of its own. Other values have another sum, but for
    a few that cancel each other out. Waits once for each device."""
    found = [0] * len(tensors)
    on_devices: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(map(local_part, tensors)):
        if tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta) and tensor.numel():
            total = _words(tensor).sum(dtype=torch.int64)
            on_devices.setdefault(total.device, []).append((number, total))
    for sums in on_devices.values():
        for (number, _), total in zip(sums, torch.stack([each for _, each in sums]).tolist(), strict=True):
            found[number] = total
    return found


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(_WORDS.get(flat.element_size(), torch.int32))
