"""Pictures in channels_last, bf16, a fused optimizer, weights averaged by EMA, losses summed up on the device."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import mindx_elastic as mx
from tests.natural.tools import done, gpu

device = gpu()
data = TensorDataset(torch.randn(48, 3, 8, 8), torch.randint(4, (48,)))
loader = DataLoader(data, batch_size=8, shuffle=True, pin_memory=torch.cuda.is_available())
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Dropout2d(0.1),
    nn.Conv2d(16, 8, 3, padding=1),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(8, 4),
).to(device, memory_format=torch.channels_last)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
opt = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.02, total_steps=18)
guard = mx.Guard(
    model=model, optimizer=opt, lr_scheduler=schedule, loader=loader, stateful={"ema": ema}, directory=sys.argv[1]
)
with guard:
    for epoch in guard.epochs(3):
        total = torch.zeros((), device=device)
        for x, y in loader:
            images = x.to(device, memory_format=torch.channels_last, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(images), y.to(device, non_blocking=True))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            ema.update_parameters(model)
            schedule.step()
            total += loss.detach()
            guard.step_end(loss=loss)
        print(f"epoch {epoch}: loss {total.item() / len(loader):.3f}")
done(model, ema)
