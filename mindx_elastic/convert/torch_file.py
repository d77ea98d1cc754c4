"""Files of ``torch.save``, read with ``weights_only=True`` and nothing else: the content of such a file is a program.

torch's own restricted reader builds tensors and plain containers and refuses everything else by name.
"""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from mindx_elastic.convert.mapped import open_source
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, ForeignCheckpointError, StrPath

__all__ = ["is_torch_file", "load_weights", "read_torch_file", "write_torch_file"]

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80\x02"  # how files before torch 1.6 begin


def is_torch_file(start: bytes) -> bool:
    """Whether a file that begins with `start` may come from ``torch.save``."""
    return start.startswith((_ZIP, _PICKLE))


def read_torch_file(path: StrPath) -> Any:
    """The content. Tensors are mapped, not read, except in files of torch 1.5 and older.

    Raises ForeignCheckpointError where the file holds anything but tensors and plain values, CorruptCheckpointError
    where it is damaged.
    """
    path = Path(path)
    with open(open_source(path), "rb") as file:
        zipped = file.read(len(_ZIP)) == _ZIP
        if zipped:
            _check_zip(file, path)
    return load_weights(str(path), f"{path}", path, mmap=zipped)


def _check_zip(file: IO[bytes], path: Path) -> None:
    """Refuse packed members: torch writes none, and a small file could fill the memory."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CorruptCheckpointError(f"{path}: damaged or cut off: {error}", path=path) from error
    if any(m.compress_type != zipfile.ZIP_STORED or m.file_size != m.compress_size for m in members):
        raise ForeignCheckpointError(f"{path}: packed members, which torch.save does not write", path=path)


def load_weights(source: str | IO[bytes], what: str, path: Path, *, mmap: bool = False) -> Any:
    """``torch.load`` as it may be called here. `what` names the source in errors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old forms; what matters is an error
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except CheckpointError:
        raise
    except Exception as error:  # malformed bytes can raise anything, mostly UnpicklingError
        text = str(error).strip()
        if "nsupported global" in text or "nsupported class" in text or "unsupported GLOBAL" in text:
            name = _refused_name(text)
            raise ForeignCheckpointError(
                f"{what}: holds more than tensors and plain values ({name}), which only running code of the file could "
                "make. Nothing of it was run. Where you trust the file, load it in Python and save its state_dict() "
                "alone",
                path=path,
            ) from None
        line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
        raise CorruptCheckpointError(f"{what}: cannot be read by torch: {line[:300]}", path=path) from error


def _refused_name(text: str) -> str:
    _, found, rest = text.partition("GLOBAL ")
    return rest.split()[0].rstrip(".,") if found and rest else "an object of a class"


def write_torch_file(temp: Path, state: Any) -> None:
    """``torch.save`` of `state` to `temp`; the caller flushes and renames."""
    torch.save(state, temp)
