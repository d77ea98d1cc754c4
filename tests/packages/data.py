"""Data sets, loaders and samplers."""

from __future__ import annotations

import re
from pathlib import Path

from tests.packages.part import Part

__all__ = ["PARTS"]

_RAW = "images, labels = data.tensors[0].numpy(), data.tensors[1]\n"

_PAGE = Path(__file__).parents[2] / "docs/your-loop.md"
_PROCESSES = """
class Kept(gym.Wrapper):
    is_over = False

    def reset(self, **options):
        self.is_over = False
        return self.env.reset(**options)

    def step(self, action):
        if self.is_over:  # a resumed process does not know that
            observation, info = self.reset()
            return observation, 0, False, False, info
        result = self.env.step(action)
        self.is_over = result[2] or result[3]
        return result

    @property
    def saved(self):
        return pickle.dumps((self.env, self.is_over))

    @saved.setter
    def saved(self, data):
        self.env, self.is_over = pickle.loads(data)


class Processes(World):
    def __init__(self, env):
        super().__init__(env)
        self.processes = self.layers.pop()

    def state_dict(self):
        return {**super().state_dict(), "processes": self.processes.get_attr("saved")}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.processes.set_attr("saved", state["processes"])
"""
"""The environments of an `AsyncVectorEnv` are in other processes, which alone know that the next step is a reset."""
_WORLD = "import gymnasium as gym\n" + "\n".join(
    block for block in re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.S) if "pickle" in block
)
"""What the page has for environments."""
_REINFORCE = """
    obs, _ = env.reset(seed=0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    last = {"obs": torch.from_numpy(obs).float()}
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = mx.Guard(model=model, optimizer=opt, stateful={"world": World(env), "last": last}, directory=sys.argv[1])
    with guard:
        for step in guard.steps(24):
            policy = torch.distributions.Categorical(logits=model(last["obs"])); action = policy.sample()
            obs, reward, *_ = env.step(action.numpy()); last["obs"] = torch.from_numpy(obs).float()
            opt.zero_grad(); loss = -(policy.log_prob(action) * torch.from_numpy(reward).float()).mean()
            loss.backward(); opt.step(); guard.step_end(loss=loss)
    env.close()
"""

PARTS = (
    Part(
        package="albumentations",
        name="Compose(seed=) in the data set, 2 workers",
        make=_RAW + "import albumentations as A\n"
        "class Images(torch.utils.data.Dataset):\n"
        "    def __init__(self): self.t = A.Compose([A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.5)], seed=137)\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, i):\n"
        "        image = images[i].reshape(4, 4, 1)\n"
        "        return torch.from_numpy(self.t(image=image)['image'].reshape(16).copy()), labels[i]\n"
        "loader = DataLoader(Images(), batch_size=8, shuffle=True, num_workers=2)",
    ),
    Part(
        package="datasets",
        name="a map-style data set, with_format('torch')",
        make="import datasets\ntable = datasets.Dataset.from_dict({'x': data.tensors[0].tolist(), 'y': data.tensors[1].tolist()}).with_format('torch')\n"
        "loader = DataLoader(table, batch_size=8, shuffle=True)",
        batch="b",
        loss="F.cross_entropy(model(b['x']), b['y'])",
    ),
    Part(
        package="datasets",
        name="a shuffled IterableDataset",
        make="import datasets\ntable = datasets.Dataset.from_dict({'x': data.tensors[0].tolist(), 'y': data.tensors[1].tolist()}).with_format('torch')\n"
        "stream = table.to_iterable_dataset(num_shards=4).shuffle(seed=0, buffer_size=16)\nloader = DataLoader(stream, batch_size=8)",
        batch="b",
        head="stream.set_epoch(epoch)",
        loss="F.cross_entropy(model(b['x']), b['y'])",
    ),
    *(
        Part(
            package="webdataset",
            name=f"WebDataset with shuffle(16{seed})",
            make="import webdataset as wds, pathlib\nfolder = pathlib.Path(os.path.dirname(sys.argv[0])) / 'shards'\nfolder.mkdir(exist_ok=True)\n"
            "if not (folder / '0.tar').exists():\n"
            "    for s in range(2):\n"
            "        with wds.TarWriter(str(folder / f'{s}.tar')) as sink:\n"
            "            for i in range(32 * s, 32 * s + 32): sink.write({'__key__': f'{i:03}', 'x.pth': data.tensors[0][i], 'y.cls': int(data.tensors[1][i])})\n"
            f"stream = wds.WebDataset([str(folder / '0.tar'), str(folder / '1.tar')], shardshuffle=2{seed}).shuffle(16{seed}).decode().to_tuple('x.pth', 'y.cls')\n"
            "loader = DataLoader(stream, batch_size=8)",
            want="equal" if seed else "told: not bit for bit the uninterrupted run",
        )
        for seed in ("", ", seed=0")
    ),
    Part(
        package="mosaicml-streaming",
        name="StreamingDataLoader",
        make="import numpy as np\nfrom streaming import MDSWriter, StreamingDataset, StreamingDataLoader\n"
        "folder = os.path.join(os.path.dirname(sys.argv[0]), 'mds')\n"
        "if not os.path.exists(folder):\n"
        "    with MDSWriter(out=folder, columns={'x': 'ndarray', 'y': 'int'}) as out:\n"
        "        for i in range(64): out.write({'x': data.tensors[0][i].numpy(), 'y': int(data.tensors[1][i])})\n"
        "stream = StreamingDataset(local=folder, predownload=8, shuffle=True, shuffle_seed=0, batch_size=8, num_canonical_nodes=1)\n"
        "loader = StreamingDataLoader(stream, batch_size=8)",
        batch="b",
        loss="F.cross_entropy(model(b['x']), b['y'])",
        want="equal",
    ),
    Part(
        package="litdata",
        name="StreamingDataLoader",
        make="import litdata\nfolder = os.path.join(os.path.dirname(sys.argv[0]), 'lit')\n"
        "rows = [(a, b) for a, b in zip(data.tensors[0], data.tensors[1])]\n"
        "def sample(i): return {'x': rows[i][0], 'y': int(rows[i][1])}\n"
        "if not os.path.exists(folder):\n"
        "    from litdata.streaming.cache import Cache\n    cache = Cache(folder, chunk_size=16)\n"
        "    for i in range(64): cache[i] = sample(i)\n    cache.done(); cache.merge()\n"
        "stream = litdata.StreamingDataset(folder, shuffle=True, seed=0)\n"
        "loader = litdata.StreamingDataLoader(stream, batch_size=8, num_workers=0)",
        batch="b",
        loss="F.cross_entropy(model(b['x']), b['y'])",
        want="equal",
    ),
    Part(
        package="torchdata",
        name="StatefulDataLoader, no workers",
        make="from torchdata.stateful_dataloader import StatefulDataLoader\nloader = StatefulDataLoader(data, batch_size=8, shuffle=True)",
    ),
    Part(
        package="torchdata",
        name="nodes.Loader over a shuffled sampler",
        make="import torchdata.nodes as tn\nfrom torch.utils.data import RandomSampler, default_collate\n"
        "node = tn.MapperWrapper(data, RandomSampler(data)) if hasattr(tn, 'MapperWrapper') else tn.Mapper(tn.SamplerWrapper(RandomSampler(data)), data.__getitem__)\n"
        "loader = tn.Loader(tn.Mapper(tn.Batcher(node, 8), default_collate))",
        want="told",
    ),
    Part(
        package="grain",
        name="MapDataset.to_iter_dataset, its iterator in stateful",
        make="import grain\nrows = [(a.numpy(), int(b)) for a, b in zip(*data.tensors)]\n"
        "stream = grain.MapDataset.source(rows).shuffle(seed=0).repeat(3).batch(8).to_iter_dataset()\nbatches = iter(stream)\n"
        "class Batches:\n    def state_dict(self): return batches.get_state()\n    def load_state_dict(self, s): batches.set_state(s)",
        whole="""
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guard = mx.Guard(model=model, optimizer=opt, stateful={"batches": Batches()}, directory=sys.argv[1])
        with guard:
            for step in guard.steps(24):
                x, y = map(torch.as_tensor, next(batches))
                opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step(); guard.step_end(loss=loss)
        """,
    ),
    Part(
        package="pytorch-metric-learning",
        name="MPerClassSampler",
        make="from pytorch_metric_learning.samplers import MPerClassSampler\n"
        "loader = DataLoader(data, batch_size=8, sampler=MPerClassSampler(data.tensors[1], m=2, batch_size=8, length_before_new_iter=64))",
    ),
    Part(
        package="torchrl",
        name="ReplayBuffer with LazyTensorStorage",
        make="from torchrl.data import ReplayBuffer, LazyTensorStorage\nfrom tensordict import TensorDict\n"
        "buffer = ReplayBuffer(storage=LazyTensorStorage(40), batch_size=8)\n"
        "buffer.extend(TensorDict({'x': torch.randn(8, 16), 'y': torch.zeros(8, dtype=torch.long)}, [8]))",
        named="stateful={'buffer': buffer}",
        loss="(buffer.extend(TensorDict({'x': x, 'y': y}, [8])), F.cross_entropy(model((b := buffer.sample())['x']), b['y']))[1]",
    ),
    *(
        Part(package="gymnasium", name=name, make=_WORLD + _PROCESSES + make, whole=_REINFORCE.replace("World", world))
        for name, world, make in (
            ("SyncVectorEnv", "World", "env = gym.make_vec('CartPole-v1', num_envs=4, vectorization_mode='sync')"),
            (
                "SyncVectorEnv with running means and a function around it",
                "World",
                "from gymnasium.wrappers import vector\n"
                "env = gym.make_vec('CartPole-v1', num_envs=4, vectorization_mode='sync')\n"
                "env = vector.NormalizeReward(vector.NormalizeObservation(vector.RecordEpisodeStatistics(env)))\n"
                "env = vector.TransformReward(env, lambda reward: reward / 2)",
            ),
            (
                "AsyncVectorEnv with running means around it, an episode over at the stop",
                "Processes",
                "env = gym.vector.AsyncVectorEnv([lambda: Kept(gym.make('CartPole-v1', max_episode_steps=12))] * 4)\n"
                "env = gym.wrappers.vector.NormalizeObservation(env)",
            ),
        )
    ),
)
