"""As ``in_place.py``, but the buffers of its modules count as not being in host memory, as those on a GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindx_elastic.capture import buffer_block, module_component
from tests.jobs.in_place import Trainer, parse

setattr(buffer_block, "_is_dense", lambda tensor: False)  # noqa: B010
for module in (buffer_block, module_component):
    setattr(module, "is_on_device", lambda tensor: True)  # noqa: B010


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer(parse()).run()
    dist.destroy_process_group()
