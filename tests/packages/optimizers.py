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


_GROUPS = "[{'params': [p for p in model.parameters() if p.ndim > 1]}, {'params': [p for p in model.parameters() if p.ndim < 2]}]"

PARTS = (
    *(
        _plain("pytorch_optimizer", f"from pytorch_optimizer import {kind}")
        for kind in ("AdEMAMix", "CAME", "Kron", "SOAP", "Shampoo")
    ),
    _plain(
        "pytorch_optimizer", "from pytorch_optimizer import Ranger21; model.parameters(), num_iterations=24, lr=1e-2"
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
        package="pytorch_optimizer",
        name="GaLore, rank 4",
        make="from pytorch_optimizer import GaLore\n"
        "groups = [{'params': [model[0].weight], 'rank': 4, 'update_proj_gap': 5, 'scale': 1.0, 'projection_type': 'std'},\n"
        "          {'params': [p for p in model.parameters() if p is not model[0].weight]}]\n"
        "opt = GaLore(groups, lr=1e-2)",
    ),
    Part(
        package="torch-optimizer",
        name="Lookahead(Yogi)",
        make="import torch_optimizer\nopt = torch_optimizer.Lookahead(torch_optimizer.Yogi(model.parameters(), lr=1e-2), k=5)",
        want="refused: fails by itself",
    ),
    *(
        _plain("torch-optimizer", f"from torch_optimizer import {kind}")
        for kind in ("AdaBound", "Lamb", "NovoGrad", "QHAdam", "RAdam", "Apollo")
    ),
    _plain("torchao", "from torchao.optim import AdamW8bit"),
    _plain("bitsandbytes", "from bitsandbytes.optim import AdamW8bit; model.parameters(), lr=1e-2, min_8bit_size=16"),
    _plain("geoopt", "from geoopt.optim import RiemannianAdam"),
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
    _plain("parameterfree", "from parameterfree import KT; model.parameters()"),
    _plain("parameterfree", "from parameterfree import COCOB; model.parameters()"),
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
    Part(
        package="apollo-torch",
        name="APOLLOAdamW, rank 4",
        make="from apollo_torch import APOLLOAdamW\n"
        "groups = [{'params': [model[0].weight], 'rank': 4, 'proj': 'random', 'scale_type': 'tensor', 'scale': 1.0,\n"
        "           'update_proj_gap': 5, 'proj_type': 'std'},\n"
        "          {'params': [p for p in model.parameters() if p is not model[0].weight]}]\n"
        "opt = APOLLOAdamW(groups, lr=1e-2)",
    ),
    _plain("lion-pytorch", "from lion_pytorch import Lion"),
    _plain("dadaptation", "from dadaptation import DAdaptAdam; model.parameters(), lr=1.0"),
    _plain("prodigyopt", "from prodigyopt import Prodigy; model.parameters(), lr=1.0"),
    _plain(
        "adabelief-pytorch",
        "from adabelief_pytorch import AdaBelief; model.parameters(), lr=1e-2, print_change_log=False",
    ),
    _plain("adan-pytorch", "from adan_pytorch import Adan"),
    _plain("came-pytorch", "from came_pytorch import CAME"),
    Part(
        package="torchcontrib",
        name="SWA(SGD)",
        make="from torchcontrib.optim import SWA\n"
        "opt = SWA(torch.optim.SGD(model.parameters(), lr=1e-2), swa_start=4, swa_freq=2, swa_lr=5e-3)",
        want="failed: has no attribute 'defaults'",
        note="zero_grad() of torch 2.13 fails with it, also without a guard: its class is older than `defaults`",
        result="[v['swa_buffer'] for v in opt.state.values() if 'swa_buffer' in v]",
    ),
    Part(
        package="magma-optimizer",
        name="Magma(AdamW)",
        make="from magma import Magma\nopt = Magma(torch.optim.AdamW(model.parameters(), lr=1e-2))",
    ),
    # --- not tried before ---
    _plain("madgrad", "from madgrad import MADGRAD"),
    _plain("adamp", "from adamp import AdamP"),
    _plain("adabound", "from adabound import AdaBound"),
    _plain("pytorch-ranger", "from pytorch_ranger import Ranger"),
    _plain(
        "ranger21", "from ranger21 import Ranger21; model.parameters(), lr=1e-2, num_epochs=3, num_batches_per_epoch=8"
    ),
    _plain("sophia-opt", "from sophia_opt import SophiaG; model.parameters(), lr=1e-2", update="opt.step(bs=8)"),
    _plain("torch-optimi", "from optimi import StableAdamW; model.parameters(), lr=1e-2, triton=False"),
    _plain("dog-optimizer", "from dog import DoG; model.parameters()"),
    Part(
        package="dog-optimizer",
        name="PolynomialDecayAverager",
        make="from dog import DoG, PolynomialDecayAverager\nopt = DoG(model.parameters())\naverager = PolynomialDecayAverager(model)",
        named="stateful={'averager': averager}",
        step="averager.step()",
        result="averager.averaged_model.parameters()",
    ),
    _plain("ano-optimizer", "from ano_optimizer.ano_pytorch import Ano"),
    _plain("core-optimizer", "from core_optimizer import CoRe; model.parameters()"),
    _plain("open-lars", "from open_lars import LARS; model.parameters(), lr=1e-2"),
    _plain("adafactor8bit", "from adafactor8bit import Adafactor8Bit; model.parameters()"),
    _plain("fanos-optimizer", "from fanos import FANoS; model.parameters()"),
    _plain("casmo-optimizer", "from casmo import CASMO; model.parameters()"),
    _plain("pytorch-swats", "from swats import SWATS"),
    _plain("rangerlite", "from rangerlite import RangerLite; model.parameters()"),
    Part(
        package="muon-optimizer",
        name="SingleDeviceMuonWithAuxAdam",
        make="from muon import SingleDeviceMuonWithAuxAdam\n"
        "opt = SingleDeviceMuonWithAuxAdam([\n"
        "    dict(params=[p for p in model.parameters() if p.ndim > 1], use_muon=True, lr=1e-2),\n"
        "    dict(params=[p for p in model.parameters() if p.ndim < 2], use_muon=False, lr=1e-2)])",
    ),
    _plain("echomuon", "from echomuon import EchoMuon; [p for p in model.parameters() if p.ndim == 2], lr=1e-2"),
    _plain("omnimuon", "from omnimuon import OmniMuon"),
    _plain("optimuon", "from optimuon import Muon; [p for p in model.parameters() if p.ndim > 1], lr=1e-2"),
    _plain("lightly", "from lightly.utils.lars import LARS; model.parameters(), lr=1e-2"),
    _plain("adamod", "from adamod import AdaMod"),
    _plain("relativistic-adam", "from relativistic_adam import RelativisticAdam"),
    _plain("topological-adam", "from topological_adam import TopologicalAdam"),
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
    Part(
        package="salsa-optimizer",
        name="SaLSA",
        make="from salsa.SaLSA import SaLSA\nopt = SaLSA(model.parameters())",
        backward="pass",
        update="opt.step(lambda backwards=False: F.cross_entropy(model(x), y))",
        note="it seeds numpy by the clock, which the steps show; the weights do not",
    ),
    Part(
        package="efficient-polling-lr-scheduler",
        name="EfficientPollingSGD",
        make="from efficient_polling_lr_scheduler import EfficientPollingSGD, make_closure\n"
        "opt = EfficientPollingSGD(model, lr=1e-2)",
        backward="pass",
        update="opt.step(make_closure(model, F.cross_entropy, x, y))",
    ),
)
