"""As ``in_place.py``, but the buffers of its modules count as not being in host memory, as those on a GPU."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from mindx_elastic.capture import buffer_block, module_component
from tests.jobs.in_place import Trainer, parse


def _no(tensor: torch.Tensor) -> bool:
    return False


def _yes(tensor: torch.Tensor) -> bool:
    return True


mock.patch.object(buffer_block, "_is_dense", _no).start()
for module in (buffer_block, module_component):
    mock.patch.object(module, "is_on_device", _yes).start()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer(parse()).run()
    dist.destroy_process_group()
