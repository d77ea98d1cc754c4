"""``mindx-elastic convert``: checkpoints from and to other programs' formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mindx_elastic.cli.common import (
    EXIT_BAD,
    EXIT_NOTHING,
    EXIT_USAGE,
    JSON_SCHEMA,
    JsonOption,
    human_size,
    is_folder,
    say,
    show,
    tell_error,
)
from mindx_elastic.cli.progress import progress_of_bytes

if TYPE_CHECKING:
    from mindx_elastic.convert.conversion import ConversionRequest, Converted

__all__ = ["convert_command"]


def convert_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A checkpoint file or a checkpoint directory.", show_default=False, readable=False
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="The file to write; for dcp the folder.", show_default=False)
    ],
    source_kind: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="torch|mindspore|mindx", help="The format of SOURCE; default: found by its content."
        ),
    ] = None,
    destination_kind: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="torch|dcp|mindspore",
            help="The format to write; default: torch for .pt, .pth, .bin, dcp without a suffix.",
        ),
    ] = None,
    component: Annotated[
        str | None,
        typer.Option(help="The key of SOURCE that holds the model, for example state_dict; default: model."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Keep the optimizer and all the rest, not only the model.")
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(help="Step of a mindx directory; default: the newest that all ranks have."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DESTINATION if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint of this package, torch.save or plain safetensors into DCP, torch.save or plain safetensors.

    \b
    [bold]Formats[/bold]
    dcp        written only: a folder of torch.distributed.checkpoint
    torch      a torch.save file, read with weights_only=True: no code in it runs
    mindspore  plain safetensors: name -> tensor; a folder of them, by its index (Hugging Face's, MindSpore's); no .ckpt
    mindx      read only: a checkpoint directory or file of this package; sharded ones are put together

    Converts the model alone and keeps its names, unless --all is given (torch and dcp).

    DESTINATION is never overwritten without --force, and appears whole or not at all. Each tensor is read when it is
    written, and tensors that are put together from parts go through a scratch file next to DESTINATION, so
    memory for one tensor is enough. Tied weights
    stay tied in torch files; the other formats get one copy for each name.

    \b
    [bold]Exit code[/bold]
    0  DESTINATION was written
    1  SOURCE is damaged, incomplete or needs code to be run, or DESTINATION cannot be written
    2  wrong usage, for example DESTINATION exists
    3  no checkpoint was found

    \b
    [bold]Examples[/bold]
    mindx-elastic convert ckpt weights.pt
    mindx-elastic convert ckpt folder --to dcp --all --step 1200
    mindx-elastic convert ckpt resnet.safetensors --to mindspore
    """
    is_folder(source)  # ends the command where it is neither that nor a file
    from mindx_elastic.convert.conversion import ConversionRequest

    request = ConversionRequest(
        source=source,
        destination=destination,
        source_kind=source_kind,
        destination_kind=destination_kind,
        component=component,
        everything=everything,
        step=step,
        force=force,
    )
    result = _convert_or_exit(request)
    show(_as_dict(request, result), as_json, lambda console, _: say(console, *_lines(request, result)))


def _convert_or_exit(request: ConversionRequest) -> Converted:
    """Convert; an error of this package ends the command with its message and exit code."""
    from mindx_elastic.convert.conversion import convert
    from mindx_elastic.errors import CheckpointError, MindxError, NoUsableCheckpointError

    temps: list[Path] = []

    def on_write(temp: Path, nbytes: int) -> None:
        temps.append(temp)
        bar.update(description="writing", total=nbytes)

    try:
        with (
            progress_of_bytes("reading", None) as bar,
            bar.follow(lambda: sum(map(_written, temps))),
        ):
            return convert(replace(request, on_write=on_write))
    except MindxError as error:
        tell_error(error)
        if isinstance(error, NoUsableCheckpointError):
            raise typer.Exit(EXIT_NOTHING) from None
        raise typer.Exit(EXIT_BAD if isinstance(error, CheckpointError) else EXIT_USAGE) from None


def _written(path: Path) -> int:
    """Bytes in a file, or in the files of a folder, that another thread is writing."""
    try:
        return sum(each.stat().st_size for each in (path.iterdir() if path.is_dir() else (path,)))
    except OSError:  # not begun yet, or renamed: it is done
        return 0


def _as_dict(request: ConversionRequest, result: Converted) -> dict[str, Any]:
    return {
        "schema": JSON_SCHEMA,
        "source": str(request.source),
        "from": result.source_kind,
        "destination": str(request.destination),
        "to": result.destination_kind,
        "tensors": result.num_tensors,
        "size_bytes": result.nbytes,
        "step": result.step,
        "notes": result.notes,
        "load": _how_to_load(request, result),
    }


def _lines(request: ConversionRequest, result: Converted) -> Iterator[str]:
    tensors = "1 tensor" if result.num_tensors == 1 else f"{result.num_tensors} tensors"
    step = "" if result.step is None else f", step {result.step}"
    yield (
        f"{request.source} ({result.source_kind}{step}) -> {request.destination} ({result.destination_kind}): "
        f"{tensors}, {human_size(result.nbytes)}"
    )
    for note in result.notes:
        yield f"note: {note}"
    for line in _how_to_load(request, result):
        yield f"    {line}"


def _how_to_load(request: ConversionRequest, result: Converted) -> list[str]:
    """Python lines."""
    name, model = str(request.destination), '["model"]' if request.everything else ""
    if result.destination_kind == "torch":
        return [f"model.load_state_dict(torch.load({name!r}, weights_only=True){model})"]
    if result.destination_kind == "mindspore":
        in_torch = f"model.load_state_dict(safetensors.torch.load_file({name!r}))"
        return [f'mindspore.load_checkpoint({name!r}, net, format="safetensors")', in_torch]
    state = '{"model": model.state_dict()}' if request.everything else "model.state_dict()"
    return [
        f"state = {state}",
        f"torch.distributed.checkpoint.load(state, checkpoint_id={name!r})",
        f"model.load_state_dict(state{model})",
    ]
