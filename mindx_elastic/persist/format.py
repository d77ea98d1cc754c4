"""Reads and writes the header of a checkpoint file, which any stock safetensors reader opens.

::

    8 bytes   length of the JSON text, little endian          (safetensors)
    JSON      {"__metadata__": {...}, "<tensor>": {"dtype": "F32", "shape": [...], "data_offsets": [start, end]}, ...}
    spaces    so that the data starts on a 4096-byte boundary, which direct I/O needs
    data      the tensors without gaps, widest elements first, so that each is aligned to its element

``__metadata__`` is string -> string: ``mindx.schema`` ("1"), ``mindx.checkpoint`` (JSON of `CheckpointInfo`),
``mindx.tree`` (JSON skeleton of the state, see `flatten`), ``mindx.layout`` (JSON, only where tensors are shards),
``mindx.digests`` (JSON, tensor -> xxh3-128 hex of its bytes) and ``mindx.header_digest``: xxh3-128 over all bytes
before the data, itself taken as zeros. So a digest covers every bit of the file, and a header that another program has
rewritten is refused.

A file that replicas have divided among themselves holds some parts of the state only (`core.division`): it has
``mindx.division`` (JSON: the division, and ``parts``, those that it holds) and schema "2", so that older versions
refuse it instead of taking it for a damaged one. Its tree is the whole state's.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import xxhash

from mindx_elastic.core.division import Division
from mindx_elastic.core.fields import Between, Text, read
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Owners, open_trusted
from mindx_elastic.errors import (
    CorruptCheckpointError,
    ForeignCheckpointError,
    StrPath,
    UnsupportedStateError,
    UsageError,
)
from mindx_elastic.persist.dtypes import BY_NAME
from mindx_elastic.persist.entries import TensorEntry, entries_of_text, entry_texts
from mindx_elastic.persist.flatten import Tree
from mindx_elastic.persist.shared_json import SharedJson

__all__ = [
    "DATA_ALIGNMENT",
    "MAX_HEADER_BYTES",
    "MAX_WORLD_SIZE",
    "SCHEMA",
    "SCHEMA_DIVIDED",
    "CheckpointInfo",
    "Header",
    "HeaderDraft",
    "Held",
    "header_of",
    "open_checkpoint",
    "read_header",
    "seal_header",
]

SCHEMA = "1"
SCHEMA_DIVIDED = "2"
"""The schema of files with ``mindx.division``."""
DATA_ALIGNMENT = 4096
MAX_WORLD_SIZE = 1 << 18
"""A plan makes lists of as many ranks as a file claims."""
MAX_HEADER_BYTES = 100_000_000  # the stock reader's bound
NO_DIGEST = "0" * 32
_NO_FILE = (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENODEV)
"""Errors of opening what is no regular file."""

_MAX_TEXT = 1024
_MAX_REASON = 10_000

_DIGESTS = re.compile(r"[0-9a-f]*")  # matched against all at once
_OUR_BEGINNING = b'{"__metadata__":'
_DECODER = json.JSONDecoder()
_DIGESTS_KEY = b'"mindx.digests":'
_HEADER_DIGEST_KEY = b'"mindx.header_digest":'
_HEADER_DIGEST = re.compile(re.escape(_HEADER_DIGEST_KEY) + rb'"([0-9a-f]{32})"')


_Name = Annotated[str, Text(_MAX_TEXT, "[^\ud800-\udfff]*")]
_Line = Annotated[str, Text(_MAX_REASON + 3)]


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Where a checkpoint comes from. Raises UsageError for a rank that the world has not."""

    run_id: _Name
    """The job, the same over all its restarts."""
    world_size: Annotated[int, Between(1, MAX_WORLD_SIZE)]
    """Number of ranks that saved together."""
    rank: int
    """Which of them this file is from."""
    step: int
    """Boundaries passed since the job's very first start."""
    epoch: int
    """From 1; 0 before the first."""
    step_in_epoch: int
    """From 1; 0 before the first."""
    batch_num: int
    """Batches of one epoch."""
    reason: _Line
    """For people: "periodic", "SIGTERM", "flag file", "exception: ValueError: ..."."""
    kind: _Name
    """"periodic", "manual" (the program asked for it), "breakpoint", "request_exit" or "eval"."""
    created: float
    """Unix seconds."""
    resumable: bool = True
    """False: for inspection only, not a boundary's state."""
    attempt: int = 0
    """How often the job had been restarted."""
    coordinates: Mapping[_Name, Annotated[int, Between(-(1 << 63), 1 << 63)]] = field(default_factory=dict)
    """Mesh coordinates of the rank, free form."""
    append_info: Sequence[object] = ()
    """The user's own JSON-able facts."""
    torch_version: _Name = ""
    """Filled in by the writer."""
    flags: Sequence[_Name] = ()
    """Identities of the flag files that have stopped this run, see `platforms.flag_file`."""
    names: Sequence[_Name] = ()
    """What the job calls its files (prefixes): files of a job with none of these names are another job's."""
    unmanaged: Sequence[_Line] = ()
    """What was known against an exact resume of this run, in words: state that no file has."""
    not_kept: _Name = ""
    """For people: names of variables that go on from step to step and are in no file. A fact, no verdict."""
    certificate: Sequence[_Name] = ()
    """What comparisons of this run's resumes have shown, see `core.certificate`."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size <= MAX_WORLD_SIZE:
            raise UsageError(f"checkpoint info: rank {self.rank} of {self.world_size}; {MAX_WORLD_SIZE} ranks at most")
        object.__setattr__(self, "reason", _one_text(self.reason))
        object.__setattr__(self, "append_info", tuple(self.append_info))
        object.__setattr__(self, "flags", tuple(self.flags))
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "unmanaged", tuple(map(_one_text, self.unmanaged)))
        object.__setattr__(self, "certificate", tuple(self.certificate))
        object.__setattr__(self, "coordinates", dict(self.coordinates))

    @property
    def moment(self) -> Moment:
        """Files of one moment belong together. Attempts are branches: the same step of two of them is two states."""
        return self.run_id, self.attempt, self.step

    @property
    def generation(self) -> int:
        """See `start.facts.FileFact`."""
        return max(0, self.coordinates.get("generation", 0))

    def to_json(self) -> str:
        """One JSON object. Raises UnsupportedStateError when `append_info` holds a value that JSON cannot express."""
        try:
            # Only the user's facts may have dataclasses in them; without any, a copy would be made in every snapshot.
            return json.dumps(asdict(self) if self.append_info else vars(self))
        except (TypeError, ValueError, RecursionError) as error:
            raise UnsupportedStateError("append_info", f"{error}; give numbers, strings, lists and dicts") from None

    @classmethod
    def from_json(cls, text: str) -> CheckpointInfo:
        """The inverse of `to_json`; unknown keys are ignored. Raises CorruptCheckpointError when malformed."""
        try:
            values = json.loads(text)
            appended = values.get("append_info", [])
            if not isinstance(appended, list):
                raise ValueError("append_info is not a list")
            return read(cls, values, append_info=appended)
        except (AttributeError, ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"malformed checkpoint info: {error}") from error


def _one_text(reason: str) -> str:
    """A reason that any reader can show: undecodable bytes (in a file name) are escaped, its length is limited."""
    text = reason.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


class Held(NamedTuple):
    """Which parts of a divided state a file holds."""

    division: Division
    parts: tuple[int, ...]
    """Ascending."""
    sample: str = ""
    """A digest of some elements of the whole state: equal in the files of ranks that held the same."""

    @property
    def key(self) -> str:
        """Equal for files whose parts fit together."""
        return f"{self.division.digest}/{self.sample}"


class Header(NamedTuple):
    """Everything before the data section, checked against itself and against the file's size."""

    info: CheckpointInfo
    tree: Tree
    entries: dict[str, TensorEntry]
    """In file order. Never changed: files that say the same of their tensors share it."""
    digests: dict[str, str]
    layout: dict[str, Any]
    """How tensors are sharded; empty where they are whole."""
    data_start: int
    """Offset of the data section in the file, bytes."""
    file_size: int
    """Bytes."""
    held: Held | None = None
    """None: the file holds all of its state."""
    digest: str = ""
    """The digest that the header has of itself."""

    def type_of(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type name and shape of a tensor that the tree refers to, in this file or not. Raises KeyError."""
        if self.held is not None and (divided := self.held.division.tensors.get(name)) is not None:
            return divided.dtype, divided.shape
        entry = self.entries[name]
        return entry.dtype, entry.shape


class HeaderDraft:
    """Headers of files with the same tensors: what is said of each tensor is written once."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        self._entries = ",".join(entry_texts(entries))
        digests = json.dumps(dict.fromkeys(map(attrgetter("name"), entries), NO_DIGEST))
        self._digests = json.dumps(digests)
        self._layout: tuple[Mapping[str, Any] | None, str] = None, ""

    def header(
        self,
        info: CheckpointInfo,
        tree: Tree,
        layout: Mapping[str, Any] | None = None,
        held: Held | None = None,
    ) -> bytes:
        """All bytes before the data section, a multiple of `DATA_ALIGNMENT`, with zeros for all digests.

        The start of the data must be known before it is written, the digests only afterwards: `seal_header` fills them
        in, in place. Raises UnsupportedStateError when the header would be too long for any reader.
        """
        metadata = {  # schema and digest first: a tool that peeks at the first bytes finds them
            "mindx.schema": json.dumps(SCHEMA if held is None else SCHEMA_DIVIDED),
            "mindx.header_digest": json.dumps(NO_DIGEST),
            "mindx.checkpoint": json.dumps(info.to_json()),
            "mindx.tree": json.dumps(json.dumps(tree, separators=(",", ":"))),
            "mindx.digests": self._digests,
        }
        if layout:
            metadata["mindx.layout"] = self._layout_text(layout)
        if held is not None:
            record = {"parts": list(held.parts), "sample": held.sample, **held.division.to_json()}
            metadata["mindx.division"] = json.dumps(json.dumps(record, separators=(",", ":")))
        described = "{" + ",".join([f'"{key}":{value}' for key, value in metadata.items()]) + "}"
        rest = f",{self._entries}" if self._entries else ""
        text = f'{{"__metadata__":{described}{rest}}}'.encode()
        text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
        if len(text) > MAX_HEADER_BYTES:
            problem = f"{len(text)} bytes of values besides the tensors; the format holds {MAX_HEADER_BYTES}"
            raise UnsupportedStateError("state", f"{problem}; keep large tables in tensors or arrays")
        return struct.pack("<Q", len(text)) + text

    def _layout_text(self, layout: Mapping[str, Any]) -> str:
        # A recorder gives the same one as long as it is the same, and replaces it then.
        if self._layout[0] is not layout:
            try:
                self._layout = layout, json.dumps(json.dumps(layout))
            except (TypeError, ValueError) as error:
                raise UnsupportedStateError("layout", f"{error}; give numbers, strings, lists and dicts") from None
        return self._layout[1]


def seal_header(draft: bytes, digests: Mapping[str, str]) -> bytes:
    """The final header: `draft`, or a sealed one, with the tensors' digests (in its own order) and the header's."""
    # The first match is the real one: metadata comes first, and a quote inside any string is escaped.
    raw = bytearray(draft)
    text = json.dumps(json.dumps(digests)).encode()
    start = raw.index(_DIGESTS_KEY) + len(_DIGESTS_KEY)
    raw[start : start + len(text)] = text  # a digest has a fixed width
    start = raw.index(_HEADER_DIGEST_KEY) + len(_HEADER_DIGEST_KEY) + 1
    raw[start : start + len(NO_DIGEST)] = NO_DIGEST.encode()
    raw[start : start + len(NO_DIGEST)] = xxhash.xxh3_128(raw).hexdigest().encode()
    return bytes(raw)


def read_header(path: StrPath, owners: Owners | None = None, shared: SharedJson | None = None) -> Header:
    """Read and check the header of `path`; the tensors' digests are not checked.

    `owners`: the users whose files are trusted here. `shared`: what the headers of one scan have in common. Raises
    FileNotFoundError or another OSError when the file cannot be opened, ForeignCheckpointError for a sound safetensors
    file of another program or a newer version, UntrustedFileError for a file of another user, CorruptCheckpointError
    for everything else, truncation and a symbolic link in the file's place included. Any thread.
    """
    with open_checkpoint(path, owners, shared=shared) as (_, header):
        return header


@contextmanager
def open_checkpoint(
    path: StrPath, owners: Owners | None = None, *, sealed: bool = True, shared: SharedJson | None = None
) -> Iterator[tuple[int, Header]]:
    """Open one file and check its header. Read the data from this descriptor: it is of the file that was checked.

    `owners`: the users whose files are trusted; the owner is read from the descriptor too. None: any owner.
    `sealed`: False where the header may have no digests yet, or another process may be filling them in. `shared`: what
    the headers of one scan have in common.
    """
    try:
        # Follows no link and does not block on a pipe: a user who can plant a name must not choose what is loaded.
        fd = open_trusted(Path(path), owners)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise CorruptCheckpointError(f"{path}: {error.strerror}", path=path) from None
        raise
    try:
        yield fd, _parse(fd, Path(path), sealed, shared)
    finally:
        os.close(fd)


def header_of(raw: bytes, path: Path) -> Header:
    """Check a header that was kept apart from its file, which is, or will be, at `path`: all bytes before the data.

    Raises CorruptCheckpointError and ForeignCheckpointError. Any thread.
    """
    return _parse(raw, path, sealed=True, shared=None)


def _parse(source: int | bytes, path: Path, sealed: bool, shared: SharedJson | None) -> Header:
    """`source`: the file's descriptor, or the header alone."""
    try:
        raw, size = (source, None) if isinstance(source, bytes) else _read_raw(source)
        described, tensors = _split(raw)
        metadata = _metadata(described, raw, sealed=sealed)
        return _checked(tensors, metadata, raw, size, shared)
    except _ForeignError as error:
        raise ForeignCheckpointError(f"{path}: {error}", path=path) from None
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path}: {error}", path=path) from error
    except MemoryError:
        raise  # ours, not the file's
    except Exception as error:
        # Any error that the header's content causes is damage of the file; an OSError here is a failing medium.
        problem = f"damaged header: {error}" if type(error) is ValueError else f"damaged header: {error!r}"
        raise CorruptCheckpointError(f"{path}: {problem:.1000}", path=path) from error


class _ForeignError(Exception):
    pass


def _read_raw(fd: int) -> tuple[bytes, int]:
    """The header, and the size of the file."""
    prefix, size = os.pread(fd, 8, 0), os.fstat(fd).st_size
    if len(prefix) < 8:
        raise ValueError(f"the file has only {size} bytes")
    (length,) = struct.unpack("<Q", prefix)
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ValueError(f"impossible header length {length}; not a safetensors file, or damaged")
    if length > size - 8:
        raise ValueError(f"header of {length} bytes in a file of {size}; truncated, or not a safetensors file")
    text = b""
    while len(text) < length:
        piece = os.pread(fd, length - len(text), 8 + len(text))
        if not piece:
            raise ValueError("truncated while it was read")
        text += piece
    return prefix + text, size


def _split(raw: bytes) -> tuple[Any, str]:
    """The metadata of a header, and the text of what it says of its tensors. Raises ValueError for what is not JSON."""
    if not raw.startswith(_OUR_BEGINNING, 8):
        if b"mindx." in raw:
            raise ValueError("it does not begin as we write it: another program has rewritten it, or bits have changed")
        raise _ForeignError("not written by mindx_elastic (it does not begin with metadata)")
    text = raw[8:].decode("utf-8", "surrogatepass")
    metadata, end = _DECODER.raw_decode(text, len(_OUR_BEGINNING))
    return metadata, text[end:]


def _metadata(metadata: Any, raw: bytes, *, sealed: bool) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is not a map of strings")
    schema = metadata.get("mindx.schema")
    if schema is None and b"mindx." not in raw:
        raise _ForeignError("not written by mindx_elastic (no mindx.schema in its metadata)")
    found = _HEADER_DIGEST.search(raw)
    if found is not None and (not sealed or _digest_of(raw, *found.span(1)) == found[1].decode()):
        if schema not in (SCHEMA, SCHEMA_DIVIDED):
            raise _ForeignError(
                f"schema {schema}; this version reads {SCHEMA} and {SCHEMA_DIVIDED}: install a newer mindx_elastic"
            )
        return metadata
    raise ValueError("its digest does not match: bits have changed, or another program has rewritten it")


def _digest_of(raw: bytes, start: int, end: int) -> str:
    """The digest of a header, of which one stands from `start` to `end`."""
    digest = xxhash.xxh3_128(raw[:start] + NO_DIGEST.encode())
    digest.update(memoryview(raw)[end:])
    return digest.hexdigest()


def _checked(
    tensors: str, metadata: Mapping[str, str], raw: bytes, size: int | None, shared: SharedJson | None
) -> Header:
    entries = entries_of_text(tensors)
    last = next(reversed(entries.values()), None)
    data_start, data_size = len(raw), 0 if last is None else last.end
    size = data_start + data_size if size is None else size
    if size != data_start + data_size:
        raise ValueError(f"the file has {size} bytes instead of {data_start + data_size}; truncated or overwritten")
    digests = json.loads(metadata["mindx.digests"])
    texts = digests.values()
    is_sound = set(map(len, texts)) <= {len(NO_DIGEST)} and _DIGESTS.fullmatch("".join(texts))
    if digests.keys() != entries.keys() or not is_sound:
        raise ValueError("the digests do not belong to the tensors")
    layout = _loads(metadata.get("mindx.layout", "{}"), "layout", shared)
    if not isinstance(layout, dict):
        raise ValueError("the layout is not a JSON object")
    tree = _loads(metadata["mindx.tree"], "tree", shared)  # of any depth: who walks it knows a limit
    info = CheckpointInfo.from_json(metadata["mindx.checkpoint"])
    held = None
    if metadata["mindx.schema"] == SCHEMA_DIVIDED:
        held = _held(json.loads(metadata["mindx.division"]), entries)
    return Header(info, tree, entries, digests, layout, data_start, size, held, metadata["mindx.header_digest"])


def _loads(text: str, kind: str, shared: SharedJson | None) -> Any:
    return json.loads(text) if shared is None else shared.loads(text, kind)


def _held(record: Any, entries: Mapping[str, TensorEntry]) -> Held:
    division = Division.from_json(record)
    parts = tuple(record["parts"])
    if not all(type(part) is int and 0 <= part < division.count for part in parts) or list(parts) != sorted({*parts}):
        raise ValueError("the parts of a divided state that the file claims to hold do not exist")
    for name, tensor in division.tensors.items():
        if tensor.dtype not in BY_NAME:
            raise ValueError(f"tensor {name:.80}: unknown type {tensor.dtype!r:.80}")
    pieces = division.pieces(parts)
    for name, whole, piece in pieces:
        entry, tensor = entries.get(name), division.tensors[whole]
        if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape_of(piece)):
            raise ValueError(f"tensor {name:.80} is not the piece of a divided state that it should be")
    stray = (division.tensors.keys() & entries.keys()) - {name for name, _, _ in pieces}
    if stray:
        raise ValueError(f"tensor {min(stray):.80} is here, and the file should not hold it")
    sample = record["sample"]
    if not isinstance(sample, str) or len(sample) > _MAX_TEXT:
        raise ValueError("the sample of a divided state is not a text")
    return Held(division, parts, sample)
