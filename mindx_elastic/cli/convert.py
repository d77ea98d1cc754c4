"""``mindx-elastic convert``: weights for other programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mindx_elastic.cli.common import (
    EXIT_BAD,
    EXIT_NOTHING,
    EXIT_USAGE,
    is_folder,
    make_console,
    say,
    tell_error,
)
from mindx_elastic.core.printable import human_size

if TYPE_CHECKING:
    from mindx_elastic.convert.conversion import ConversionRequest, Converted

__all__ = ["convert_command"]


def convert_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint directory of this package, or one file.",
            show_default=False,
            readable=False,
        ),
    ],
    destination: Annotated[
        Path,
        typer.Argument(
            metavar="DESTINATION",
            help="The file to write: .pt, .pth or .bin for torch, .safetensors for plain safetensors.",
            show_default=False,
        ),
    ],
    component: Annotated[str, typer.Option(help="The part of the checkpoint that is the model.")] = "model",
    step: Annotated[
        int | None, typer.Option(help="The step to take.", show_default="the newest that all ranks have")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DESTINATION if it exists.")] = False,
) -> None:
    """Convert a checkpoint of this package into a torch.save file or plain safetensors: name -> tensor.

    Converts the model alone and keeps its names. A model in parts (sharded, pipeline stages) is put together.

    The files are read and checked as by a start, and need memory for what is converted. DESTINATION is never
    overwritten without --force, and appears whole or not at all. Tied weights get one copy each in safetensors.

    \b
    [bold]Exit code[/bold]
    0  DESTINATION was written
    1  SOURCE is damaged, incomplete or not of this package, or DESTINATION cannot be written
    2  wrong usage, for example DESTINATION exists
    3  no checkpoint was found

    \b
    [bold]Examples[/bold]
    mindx-elastic convert ckpt weights.pt
    mindx-elastic convert ckpt resnet.pt --step 1200
    mindx-elastic convert ckpt resnet.safetensors
    """
    is_folder(source)  # ends the command where it is neither that nor a file
    from mindx_elastic.convert.conversion import ConversionRequest, convert
    from mindx_elastic.errors import CheckpointError, MindxError, NoUsableCheckpointError

    try:
        request = ConversionRequest(source=source, destination=destination, component=component, step=step, force=force)
        result = convert(request)
    except MindxError as error:
        tell_error(error)
        if isinstance(error, NoUsableCheckpointError):
            raise typer.Exit(EXIT_NOTHING) from None
        raise typer.Exit(EXIT_BAD if isinstance(error, CheckpointError) else EXIT_USAGE) from None
    say(make_console(), *_lines(request, result))


def _lines(request: ConversionRequest, result: Converted) -> Iterator[str]:
    tensors = "1 tensor" if result.num_tensors == 1 else f"{result.num_tensors} tensors"
    written = f"{request.destination} ({request.kind}): {tensors}, {human_size(result.nbytes)}"
    yield f"{request.source} (step {result.step}) -> {written}"
    for note in result.notes:
        yield f"note: {note}"
    name = str(request.destination)
    if request.kind == "torch":
        yield f"    model.load_state_dict(torch.load({name!r}, weights_only=True))"
        return
    yield f'    mindspore.load_checkpoint({name!r}, net, format="safetensors")'
    yield f"    model.load_state_dict(safetensors.torch.load_file({name!r}))"
