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
            package="lightly",
            name=f"NTXentLoss with a memory bank{', not named' * (not named)}",
            make="from lightly.loss import NTXentLoss\nbank = NTXentLoss(memory_bank_size=(32, 4))",
            named=named,
            loss="bank(model(x), model(x + 0.1 * torch.randn_like(x)))",
            want=want,
        )
        for named, want in (("stateful={'bank': bank}", "equal"), ("", "told: bank"))
    ),
    Part(
        package="lightly",
        name="DINOLoss",
        make="from lightly.loss import DINOLoss\ndino = DINOLoss(output_dim=4, warmup_teacher_temp_epochs=2)",
        named="stateful={'dino': dino}",
        loss="dino([model(x).detach(), model(-x).detach()], [model(x), model(-x)], epoch=epoch - 1)",
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
        package="loralib",
        name="MergedLinear",
        make="import loralib\nmodel = nn.Sequential(loralib.Linear(16, 32, r=4, lora_dropout=0.1), nn.ReLU(), nn.Linear(32, 4))\n"
        "loralib.mark_only_lora_as_trainable(model)\n"
        "opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)",
    ),
    Part(
        package="lycoris-lora",
        name="LoHa",
        make="from lycoris import create_lycoris, LycorisNetwork\n"
        "LycorisNetwork.apply_preset({'target_module': ['Linear']})\n"
        "net = create_lycoris(model, 1.0, linear_dim=4, linear_alpha=2.0, algo='loha'); net.apply_to()\n"
        "opt = torch.optim.AdamW(net.parameters(), lr=1e-2)",
        named="model=[model, net], optimizer=opt, loader=loader",
        result="net.state_dict().values()",
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
        package="vector-quantize-pytorch",
        name="ResidualVQ with quantize_dropout",
        make="from vector_quantize_pytorch import ResidualVQ\n"
        "vq = ResidualVQ(dim=16, codebook_size=8, num_quantizers=3, quantize_dropout=True)",
        named="model=[model, vq], optimizer=opt, loader=loader",
        loss="F.cross_entropy(model((q := vq(x[:, None]))[0][:, 0]), y) + q[2].sum()",
        result="vq.state_dict().values()",
    ),
    Part(
        package="byol-pytorch",
        name="BYOL",
        make="from byol_pytorch import BYOL\n"
        "model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 8))\n"
        "byol = BYOL(model, image_size=16, hidden_layer=-1, projection_size=8, projection_hidden_size=16)\n"
        "opt = torch.optim.AdamW(byol.parameters(), lr=1e-2)",
        named="model=byol, optimizer=opt, loader=loader",
        loss="byol(torch.rand(8, 3, 16, 16))",
        step="byol.update_moving_average()",
        result="byol.state_dict().values()",
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
        package="e3nn",
        name="equivariant network with BatchNorm",
        make="from e3nn import o3, nn as enn\n"
        "model = nn.Sequential(o3.Linear('16x0e', '8x0e + 4x1o'), enn.BatchNorm('8x0e + 4x1o'), o3.Linear('8x0e + 4x1o', '4x0e'))",
    ),
    Part(
        package="torchjd",
        name="UPGrad of two losses",
        make="import torchjd\nfrom torchjd.aggregation import UPGrad\nfrom torchjd.autojac import backward, jac_to_grad\nagg = UPGrad()",
        loss="torch.stack([F.cross_entropy(out := model(x), y), out.pow(2).mean()])",
        backward="backward(loss); jac_to_grad(model.parameters(), agg); loss = loss.sum()",
    ),
    Part(
        package="torchjd",
        name="GradVac, which counts and draws",
        make="from torchjd.aggregation import GradVac\nfrom torchjd.autojac import backward, jac_to_grad\nagg = GradVac()",
        named="stateful={'agg': agg}",
        loss="torch.stack([F.cross_entropy(out := model(x), y), out.pow(2).mean()])",
        backward="backward(loss); jac_to_grad(model.parameters(), agg); loss = loss.sum()",
    ),
    Part(
        package="snntorch",
        name="Leaky neurons with hidden states",
        make="import snntorch\nspike = snntorch.Leaky(beta=0.9, learn_beta=True, init_hidden=True)\n"
        "model = nn.Sequential(nn.Linear(16, 32), spike, nn.Linear(32, 4))",
        loss="(spike.reset_mem(), F.cross_entropy(sum(model(x) for _ in range(3)), y))[1]",
    ),
    Part(
        package="spikingjelly",
        name="LIFNode, reset in each step",
        make="from spikingjelly.activation_based import neuron, functional\n"
        "model = nn.Sequential(nn.Linear(16, 32), neuron.LIFNode(), nn.Linear(32, 4))",
        loss="F.cross_entropy(sum(model(x) for _ in range(3)), y)",
        step="functional.reset_net(model)",
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
        package="torchattacks",
        name="PGD adversarial training",
        make="import torchattacks\nattack = torchattacks.PGD(model, eps=0.1, alpha=0.05, steps=2)",
        loss="F.cross_entropy(model(attack(x.clamp(0, 1), y)), y)",
    ),
    Part(
        package="x-transformers",
        name="AutoregressiveWrapper",
        make="from x_transformers import TransformerWrapper, Decoder, AutoregressiveWrapper\n"
        "model = AutoregressiveWrapper(TransformerWrapper(num_tokens=32, max_seq_len=16, "
        "attn_layers=Decoder(dim=16, depth=1, heads=2, layer_dropout=0.1)), mask_prob=0.1)",
        loss="model((x.abs() * 10).long() % 32)",
    ),
    Part(
        package="entmax",
        name="Entmax15Loss",
        make="from entmax import Entmax15Loss\ncriterion = Entmax15Loss()",
        loss="criterion(model(x), y)",
    ),
    Part(
        package="torchdiffeq",
        name="odeint_adjoint",
        make="from torchdiffeq import odeint_adjoint\n"
        "class F1(nn.Module):\n    def __init__(self):\n        super().__init__(); self.l = nn.Linear(16, 16); self.nfe = 0\n"
        "    def forward(self, t, x):\n        self.nfe += 1\n        return self.l(x).tanh()\n"
        "func = F1(); head = nn.Linear(16, 4); model = nn.ModuleList([func, head])",
        loss="F.cross_entropy(head(odeint_adjoint(func, x, torch.tensor([0.0, 1.0]), method='rk4')[-1]), y)",
    ),
    Part(
        package="higher",
        name="MAML inner loop",
        make="import higher\nmodel = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))",
        loss="0",
        backward="inner = torch.optim.SGD(model.parameters(), lr=0.1)\n            "
        "with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (fm, diff):\n                "
        "diff.step(F.cross_entropy(fm(x[:4]), y[:4])); loss = F.cross_entropy(fm(x[4:]), y[4:]); loss.backward()",
    ),
    Part(
        package="torchopt",
        name="MetaAdam",
        make="import torchopt\nmodel = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))\n"
        "opt = torchopt.Adam(model.parameters(), lr=1e-2)",
    ),
    Part(
        package="kornia",
        name="AugmentationSequential in the step",
        make="import kornia.augmentation as K\naug = K.AugmentationSequential(K.RandomHorizontalFlip(p=0.5), K.RandomRotation(15.0, p=0.5))",
        loss="F.cross_entropy(model(aug(x.reshape(8, 1, 4, 4)).reshape(8, 16)), y)",
    ),
    Part(
        package="denoising-diffusion-pytorch",
        name="GaussianDiffusion1D",
        make="from denoising_diffusion_pytorch import Unet1D, GaussianDiffusion1D\n"
        "model = GaussianDiffusion1D(Unet1D(dim=8, dim_mults=(1, 2), channels=1), seq_length=16, timesteps=10)",
        loss="model(x[:, None].sigmoid())",
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
    Part(
        package="cooper-optim",
        name="SimultaneousOptimizer with a multiplier",
        make="import cooper\nfrom cooper import ConstraintState, CMPState\n"
        "class CMP(cooper.ConstrainedMinimizationProblem):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.norm = cooper.Constraint(constraint_type=cooper.ConstraintType.INEQUALITY, "
        "formulation_type=cooper.formulations.Lagrangian, multiplier=cooper.multipliers.DenseMultiplier(num_constraints=1))\n"
        "    def compute_cmp_state(self, x, y):\n"
        "        return CMPState(loss=F.cross_entropy(model(x), y), observed_constraints={self.norm: ConstraintState("
        "violation=(sum(p.pow(2).sum() for p in model.parameters()) - 1).reshape(1))})\n"
        "cmp = CMP(); opt = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
        "dual = torch.optim.SGD(cmp.dual_parameters(), lr=1e-2, maximize=True)\n"
        "both = cooper.optim.SimultaneousOptimizer(cmp=cmp, primal_optimizers=opt, dual_optimizers=dual)",
        named="model=model, optimizer=[opt, dual], loader=loader, stateful={'cmp': cmp}",
        loss="0",
        backward="loss = both.roll(compute_cmp_state_kwargs={'x': x, 'y': y}).loss",
        update="pass",
        result="cmp.dual_parameters()",
    ),
    Part(
        package="torch-pruning",
        name="MagnitudePruner with growing regularisation",
        make="import torch_pruning as tp\n"
        "model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))\n"
        "pruner = tp.pruner.GrowingRegPruner(model, torch.randn(1, 16), importance=tp.importance.GroupMagnitudeImportance(), pruning_ratio=0.5, ignored_layers=[model[2]])",
        update="pruner.regularize(model); opt.step()",
        want="equal",
    ),
)
