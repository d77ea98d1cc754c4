"""Optimizers, and wrappers around them."""

from __future__ import annotations

from tests.packages.part import Part

__all__ = ["PARTS"]


def _plain(package: str, make: str, name: str = "", **more: str) -> Part:
    """`make`: ``from MODULE import CLASS; ARGUMENTS`` of ``opt = CLASS(ARGUMENTS)``."""
    line, _, arguments = make.partition(";")
    kind = line.split()[-1]
    call = f"opt = {kind}({arguments.strip() or 'model.parameters(), lr=1e-2'})"
    return Part(package=package, name=name or kind, make=f"{line}\n{call}", **more)


PARTS = (
    *(
        _plain("pytorch_optimizer", f"from pytorch_optimizer import {kind}")
        for kind in ("AdEMAMix", "CAME", "Kron", "SOAP", "Shampoo")
    ),
    Part(
        package="pytorch_optimizer",
        name="Lookahead(AdamW)",
        make="from pytorch_optimizer import Lookahead, AdamP\nopt = Lookahead(AdamP(model.parameters(), lr=1e-2), k=5)",
    ),
    Part(
        package="pytorch_optimizer",
        name="SAM",
        make="from pytorch_optimizer import SAM\nopt = SAM(model.parameters(), torch.optim.SGD, lr=1e-2)",
        update="opt.first_step(zero_grad=True); F.cross_entropy(model(x), y).backward(); opt.second_step(zero_grad=True)",
    ),
    Part(
        package="pytorch_optimizer",
        name="ScheduleFreeWrapper",
        make="from pytorch_optimizer import ScheduleFreeWrapper\n"
        "opt = ScheduleFreeWrapper(torch.optim.AdamW(model.parameters(), lr=1e-2)); opt.train()",
    ),
    Part(
        package="torch-optimizer",
        name="Lookahead(Yogi)",
        make="import torch_optimizer\nopt = torch_optimizer.Lookahead(torch_optimizer.Yogi(model.parameters(), lr=1e-2), k=5)",
        want="refused: fails by itself",
    ),
    _plain("torchao", "from torchao.optim import AdamW8bit"),
    _plain("bitsandbytes", "from bitsandbytes.optim import AdamW8bit; model.parameters(), lr=1e-2, min_8bit_size=16"),
    Part(
        package="geoopt",
        name="RiemannianAdam on a ball",
        make="import geoopt\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.net = nn.Linear(16, 4)\n"
        "        self.point = geoopt.ManifoldParameter(torch.rand(4, 4) * 0.1, manifold=geoopt.PoincareBall())\n"
        "    def forward(self, x): return self.net(x) @ self.point\n"
        "model = Net()\nopt = geoopt.optim.RiemannianAdam(model.parameters(), lr=1e-2)",
    ),
    *(
        Part(
            package="heavyball",
            name=kind,
            make="import heavyball\nheavyball.utils.compile_mode = None\n"
            f"opt = heavyball.{kind}(model.parameters(), lr=1e-2)",
        )
        for kind in ("SOAP", "PSGDKron", "Muon", "SFAdamW")
    ),
    *(_plain("timm", f"from timm.optim import {kind}") for kind in ("Adan", "Lamb", "NAdamW", "MADGRAD", "Muon")),
    Part(
        package="timm",
        name="Adahessian",
        make="from timm.optim import Adahessian\nopt = Adahessian(model.parameters(), lr=0.05, update_each=3)",
        backward="loss.backward(create_graph=True)",
    ),
    Part(
        package="schedulefree",
        name="AdamWScheduleFree",
        make="from schedulefree import AdamWScheduleFree\nopt = AdamWScheduleFree(model.parameters(), lr=1e-2); opt.train()",
    ),
    Part(
        package="galore-torch",
        name="GaLoreAdamW, rank 4",
        make="from galore_torch import GaLoreAdamW\n"
        "groups = [{'params': [model[0].weight], 'rank': 4, 'update_proj_gap': 5, 'scale': 1.0, 'proj_type': 'std'},\n"
        "          {'params': [p for p in model.parameters() if p is not model[0].weight]}]\n"
        "opt = GaLoreAdamW(groups, lr=1e-2)",
    ),
    _plain("lion-pytorch", "from lion_pytorch import Lion"),
    _plain("dadaptation", "from dadaptation import DAdaptAdam; model.parameters(), lr=1.0"),
    _plain("prodigyopt", "from prodigyopt import Prodigy; model.parameters(), lr=1.0"),
    Part(
        package="dog-optimizer",
        name="PolynomialDecayAverager",
        make="from dog import DoG, PolynomialDecayAverager\nopt = DoG(model.parameters())\naverager = PolynomialDecayAverager(model)",
        named="stateful={'averager': averager}",
        step="averager.step()",
        result="averager.averaged_model.parameters()",
    ),
    Part(
        package="muon-optimizer",
        name="SingleDeviceMuonWithAuxAdam",
        make="from muon import SingleDeviceMuonWithAuxAdam\n"
        "opt = SingleDeviceMuonWithAuxAdam([\n"
        "    dict(params=[p for p in model.parameters() if p.ndim > 1], use_muon=True, lr=1e-2),\n"
        "    dict(params=[p for p in model.parameters() if p.ndim < 2], use_muon=False, lr=1e-2)])",
    ),
    Part(
        package="agc-optims",
        name="AGC(AdamW)",
        make="from agc_optims.clipper import AGC\nopt = AGC(torch.optim.AdamW(model.parameters(), lr=1e-2))",
        want="refused: Write Guard(optimizer=[..., opt.optimizer], ...)",
    ),
    Part(
        package="agc-optims",
        name="AGC(AdamW), both named",
        make="from agc_optims.clipper import AGC\nopt = AGC(torch.optim.AdamW(model.parameters(), lr=1e-2))",
        named="model=model, optimizer=[opt, opt.optimizer], loader=loader",
    ),
)
