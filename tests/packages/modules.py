"""Losses, modules, environments and trainers' parts with a state of their own."""

from __future__ import annotations

from tests.packages.part import Part

__all__ = ["PARTS"]

_MEMORY = """
from pytorch_metric_learning.losses import CrossBatchMemory, NTXentLoss
bank = CrossBatchMemory(NTXentLoss(), 4, memory_size=40)
"""

PARTS = (
    *(
        Part(
            package="pytorch-metric-learning",
            name=f"CrossBatchMemory{', not named' * (not named)}",
            make=_MEMORY,
            named=named,
            loss="bank(model(x), y)",
            want=want,
        )
        for named, want in (("stateful={'bank': bank}", "equal"), ("", "told: bank"))
    ),
    Part(
        package="pytorch-metric-learning",
        name="ArcFaceLoss with an optimizer of its own",
        make="from pytorch_metric_learning.losses import ArcFaceLoss\narc = ArcFaceLoss(4, 4)\n"
        "opt = torch.optim.AdamW([*model.parameters(), *arc.parameters()], lr=1e-2)",
        named="model=[model, arc], optimizer=opt, loader=loader",
        loss="arc(model(x), y)",
        result="arc.parameters()",
    ),
    *(
        Part(
            package="peft",
            name=name,
            make="import warnings; warnings.simplefilter('ignore')\n"
            "from peft import get_peft_model, LoraConfig, AdaLoraConfig\n"
            "class Net(nn.Module):\n"
            "    def __init__(self):\n        super().__init__(); self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)\n"
            "    def forward(self, x): return self.b(self.a(x).relu())\n"
            f"model = get_peft_model(Net(), {config})",
            update=update,
            want=want,
        )
        for name, config, update, want in (
            ("LoRA", "LoraConfig(target_modules=['a', 'b'], r=4, lora_dropout=0.1)", "opt.step()", "equal"),
            (
                "AdaLoRA",
                "AdaLoraConfig(target_modules=['a', 'b'], init_r=6, target_r=3, tinit=2, tfinal=4, deltaT=2, total_step=24)",
                "opt.step(); model.base_model.update_and_allocate(guard.step)",
                "equal",
            ),
        )
    ),
    Part(
        package="vector-quantize-pytorch",
        name="VectorQuantize with averaged codes",
        make="from vector_quantize_pytorch import VectorQuantize\n"
        "vq = VectorQuantize(dim=16, codebook_size=32, decay=0.8, kmeans_init=True, threshold_ema_dead_code=1)",
        named="model=[model, vq], optimizer=opt, loader=loader",
        loss="F.cross_entropy(model((q := vq(x[:, None]))[0][:, 0]), y) + q[2].sum()",
        result="vq.state_dict().values()",
    ),
    Part(
        package="opacus",
        name="PrivacyEngine.make_private",
        make="import warnings; warnings.simplefilter('ignore')\nfrom opacus import PrivacyEngine\n"
        "model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))\n"
        "loader = DataLoader(data, batch_size=8, shuffle=True)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=1e-2)\n"
        "engine = PrivacyEngine()\n"
        "model, opt, loader = engine.make_private(module=model, optimizer=opt, data_loader=loader, "
        "noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False)",
        named="model=model, optimizer=opt, loader=loader, stateful={'accountant': engine.accountant}",
        result="[engine.get_epsilon(1e-5)]",
    ),
    Part(
        package="gpytorch",
        name="ExactGP",
        make="import gpytorch\nloader = [(data.tensors[0], data.tensors[1].float())] * 8\n"
        "class GP(gpytorch.models.ExactGP):\n"
        "    def __init__(self, x, y, likelihood):\n        super().__init__(x, y, likelihood)\n"
        "        self.mean, self.kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()\n"
        "    def forward(self, x): return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))\n"
        "model = GP(*loader[0], gpytorch.likelihoods.GaussianLikelihood())\n"
        "mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)",
        named="model=model, optimizer=opt",
        whole="""
        opt = torch.optim.AdamW(model.parameters(), lr=1e-1)
        guard = mx.Guard(model=model, optimizer=opt, directory=sys.argv[1])
        x, y = loader[0]
        with guard:
            for step in guard.steps(24):
                opt.zero_grad(); loss = -mll(model(x), y); loss.backward(); opt.step(); guard.step_end(loss=loss)
        """,
    ),
    Part(
        package="pyro-ppl",
        name="SVI with ClippedAdam, the param store",
        make="import pyro, pyro.distributions as dist\nfrom pyro.infer import SVI, Trace_ELBO\n"
        "pyro.set_rng_seed(0); pyro.clear_param_store()\n"
        "def prior(x, y):\n    w = pyro.sample('w', dist.Normal(torch.zeros(16), 1.0).to_event(1))\n"
        "    with pyro.plate('n', len(x)): pyro.sample('y', dist.Normal(x @ w, 1.0), obs=y.float())\n"
        "def guide(x, y):\n    m = pyro.param('m', torch.zeros(16)); pyro.sample('w', dist.Normal(m, 0.1).to_event(1))\n"
        "adam = pyro.optim.ClippedAdam({'lr': 1e-2})\nsvi = SVI(prior, guide, adam, Trace_ELBO())\n"
        "svi.loss(prior, guide, *next(iter(DataLoader(data, batch_size=8))))",
        whole="""
        model = pyro.get_param_store()
        class Pyro:
            def state_dict(self): return {"params": {k: v.detach().clone() for k, v in model.named_parameters()}, "opt": adam.get_state()}
            def load_state_dict(self, s):
                for k, v in model.named_parameters(): v.data.copy_(s["params"][k])
                adam.set_state(s["opt"])
        guard = mx.Guard(loader=loader, stateful={"pyro": Pyro()}, directory=sys.argv[1])
        with guard:
            for epoch in guard.epochs(3):
                for x, y in loader:
                    loss = svi.step(x, y); guard.step_end()
        model = nn.ParameterList([v for _, v in model.named_parameters()])
        """,
    ),
    Part(
        package="spikingjelly",
        name="LIFNode with a state that goes on, named",
        make="from spikingjelly.activation_based import neuron, functional\n"
        "model = nn.Sequential(nn.Linear(16, 32), neuron.LIFNode(), nn.Linear(32, 4))",
        step="functional.detach_net(model)",
        named="stateful={'spikes': model[1]}",
    ),
    Part(
        package="spikingjelly",
        name="LIFNode with a state that goes on",
        make="from spikingjelly.activation_based import neuron, functional\n"
        "model = nn.Sequential(nn.Linear(16, 32), neuron.LIFNode(), nn.Linear(32, 4))",
        step="functional.detach_net(model)",
        want="told: step 13 is not the one of the stopped process",
        note="the potentials are in a dict inside of the model. Name the layer too",
    ),
    Part(
        package="torch-geometric",
        name="GCN with NeighborLoader-free batches",
        make="from torch_geometric.data import Data\nfrom torch_geometric.loader import DataLoader as GraphLoader\n"
        "from torch_geometric.nn import GCNConv, global_mean_pool\n"
        "graphs = [Data(x=torch.randn(5, 16), edge_index=torch.randint(0, 5, (2, 8)), y=torch.tensor(i % 4)) for i in range(64)]\n"
        "loader = GraphLoader(graphs, batch_size=8, shuffle=True)\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.c = GCNConv(16, 4)\n"
        "    def forward(self, b): return global_mean_pool(self.c(b.x, b.edge_index), b.batch)\n"
        "model = Net()",
        batch="batch",
        loss="F.cross_entropy(model(batch), batch.y)",
    ),
)
