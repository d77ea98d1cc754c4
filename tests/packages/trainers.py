"""Trainers by others: the recipes of docs/trainers.md, each a program of its own."""

from __future__ import annotations

from tests.packages.part import Part

__all__ = ["PARTS"]


def _recipe(package: str, name: str, whole: str, **more: str) -> Part:
    return Part(package=package, name=name, whole=whole, **more)


_TOKENS = """
        from tokenizers import Tokenizer, models, pre_tokenizers
        words = ["[UNK]", "[PAD]", *"abcdefghijklmnop"]
        tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
        tokens.pre_tokenizer = pre_tokenizers.Whitespace()
        text = [" ".join(random.choice(words[2:]) for _ in range(6)) for _ in range(64)]
"""

_KERAS = """
        os.environ["KERAS_BACKEND"] = "torch"
        import keras

        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(4)])
"""

_IGNITE = """
        from ignite.engine import Engine, Events

        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def update(engine, batch):
            model.train()
            opt.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            opt.step()
            return loss.item()

        trainer = Engine(update)
        guard = mx.Guard(model=model, optimizer=opt, loader=loader, NAMEDdirectory=sys.argv[1])
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: guard.step_end(loss=engine.state.output))
        with guard:
            trainer.run(loader, max_epochs=3)
"""

PARTS = (
    *(
        _recipe("pytorch-ignite", f"Engine{', not named' * (not named)}", _IGNITE.replace("NAMED", named), want=want)
        for named, want in (('stateful={"trainer": trainer}, ', "equal"), ("", "refused"))
    ),
    _recipe(
        "fastai",
        "Learner.fit(start_epoch=)",
        """
        import fastai.callback.progress
        from fastai.callback.core import Callback
        from fastai.data.core import DataLoaders
        from fastai.learner import Learner
        from fastai.optimizer import OptimWrapper

        class Boundary(Callback):
            order = 100  # behind the other callbacks

            def after_batch(self):
                if self.training:
                    guard.step_end(loss=self.loss)

        learn = Learner(
            DataLoaders(loader, DataLoader(data, batch_size=32)),
            model,
            loss_func=F.cross_entropy,
            opt_func=lambda params, **_: OptimWrapper(params, torch.optim.AdamW),
        )
        learn.create_opt()
        guard = mx.Guard(model=model, optimizer=learn.opt.opt, loader=loader, directory=sys.argv[1])
        with guard, learn.no_bar():
            learn.fit(3, lr=1e-2, cbs=Boundary(), start_epoch=max(0, guard.position.epoch - 1))
        """,
    ),
    Part(
        package="keras",
        name="3 on torch, a loop of its own",
        make=_KERAS,
        loss="F.cross_entropy(model(x, training=True), y)",
    ),
    Part(
        package="keras",
        name="3 on torch, its own optimizer",
        make=_KERAS
        + """
        class Variables:
            def __init__(self, optimizer):
                self.optimizer = optimizer

            def state_dict(self):
                return {v.path: v.value.detach() for v in self.optimizer.variables}

            def load_state_dict(self, state):
                for v in self.optimizer.variables:
                    v.assign(state[v.path])

        adam = keras.optimizers.Adam(1e-2)
        adam.build(model.trainable_variables)
        """,
        whole="""
        guard = mx.Guard(model=model, loader=loader, stateful={"adam": Variables(adam)}, directory=sys.argv[1])
        with guard:
            for epoch in guard.epochs(3):
                for x, y in loader:
                    model.zero_grad()
                    loss = F.cross_entropy(model(x, training=True), y)
                    loss.backward()
                    with torch.no_grad():
                        adam.apply([v.value.grad for v in model.trainable_variables])
                    guard.step_end(loss=loss)
        """,
    ),
    _recipe(
        "mmengine",
        "Runner.train",
        """
        from mmengine.hooks import Hook
        from mmengine.model import BaseModel
        from mmengine.optim import OptimWrapper
        from mmengine.runner import Runner

        class Net(BaseModel):
            def __init__(self):
                super().__init__()
                self.net = model

            def forward(self, x, y, mode="loss"):
                return {"loss": F.cross_entropy(self.net(x), y)}

        class Boundary(Hook):
            priority = "LOWEST"

            def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
                guard.step_end(loss=outputs["loss"])

        net = Net()
        opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
        runner = Runner(
            net,
            work_dir=sys.argv[1] + "-mmengine",
            train_dataloader=loader,
            train_cfg={"by_epoch": True, "max_epochs": 3},
            optim_wrapper=OptimWrapper(opt),
            custom_hooks=[Boundary()],
            default_hooks={"checkpoint": None, "sampler_seed": None},
            randomness={"seed": 0},
        )
        place = mx.attributes(runner.train_loop, "_epoch")
        guard = mx.Guard(model=net, optimizer=opt, loader=loader, stateful={"place": place}, directory=sys.argv[1])
        with guard:
            runner.train_loop._iter = guard.step
            runner.train()
        """,
    ),
    _recipe(
        "skorch",
        "NeuralNet.fit_loop",
        """
        import skorch
        from skorch.callbacks import Callback

        class Boundary(Callback):
            def on_batch_end(self, net, training=False, loss=None, **_):
                if training:
                    guard.step_end(loss=loss)

        class Net(skorch.NeuralNet):
            def get_iterator(self, dataset, training=False):
                return loader if training else super().get_iterator(dataset, training)

        net = Net(model, nn.CrossEntropyLoss, optimizer=torch.optim.AdamW, lr=1e-2, train_split=None,
                  callbacks=[("boundary", Boundary())], callbacks__print_log=None).initialize()
        guard = mx.Guard(model=net.module_, optimizer=net.optimizer_, loader=loader, directory=sys.argv[1])
        with guard:
            net.fit_loop(data, epochs=3 - max(0, guard.position.epoch - 1))
        model = net.module_
        """,
    ),
    _recipe(
        "stable-baselines3",
        "PPO.learn, a boundary at each rollout's begin",
        """
        import pickle

        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import BaseCallback

        class World:
            def __init__(self, env):
                self.env = env

            def state_dict(self):
                return {"env": pickle.dumps(vars(self.env))}

            def load_state_dict(self, state):  # a pickle runs code: only where nobody else can write to the directory
                vars(self.env).update(pickle.loads(state["env"]))

        class Boundary(BaseCallback):
            def _on_step(self):
                return True

            def _on_rollout_start(self):
                if self.model._n_updates > updates:  # the first one has no update behind it
                    guard.step_end()

            def _on_training_end(self):
                guard.step_end()

        agent = PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=16, n_epochs=2, seed=0, device="cpu")
        agent._setup_learn(32 * 24)
        place = mx.attributes(agent, "num_timesteps", "_n_updates", "_last_obs", "_last_episode_starts",
                              "_current_progress_remaining", "_num_timesteps_at_start", "ep_info_buffer")
        guard = mx.Guard(model=agent.policy, optimizer=agent.policy.optimizer, directory=sys.argv[1],
                         stateful={"place": place, "world": World(agent.env)})
        with guard:
            updates = agent._n_updates
            agent.learn(32 * 24 - agent.num_timesteps, callback=Boundary(), reset_num_timesteps=False)
        model = agent.policy
        """,
    ),
    _recipe(
        "trl",
        "SFTTrainer",
        _TOKENS
        + """
        import transformers
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        from mindx_elastic.integrations.transformers import ElasticTraining

        class Trainer(ElasticTraining, SFTTrainer):
            pass

        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]")
        config = transformers.GPT2Config(vocab_size=18, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
        args = SFTConfig(output_dir=sys.argv[1], max_length=8, num_train_epochs=3, per_device_train_batch_size=8, report_to=[],
                         save_strategy="no", use_cpu=True, seed=0, bf16=False)
        trainer = Trainer(model=model, args=args, train_dataset=Dataset.from_dict({"text": text}), processing_class=tokenizer)
        trainer.train()
        """,
    ),
    _recipe(
        "sentence-transformers",
        "SentenceTransformerTrainer",
        _TOKENS
        + """
        from datasets import Dataset
        from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
        from sentence_transformers.losses import MultipleNegativesRankingLoss
        from sentence_transformers.models import StaticEmbedding

        from mindx_elastic.integrations.transformers import ElasticTraining

        class Trainer(ElasticTraining, SentenceTransformerTrainer):
            pass

        model = SentenceTransformer(modules=[StaticEmbedding(tokens, embedding_dim=8)], device="cpu")
        pairs = Dataset.from_dict({"anchor": text, "positive": [t[::-1] for t in text]})
        args = SentenceTransformerTrainingArguments(output_dir=sys.argv[1], num_train_epochs=3, per_device_train_batch_size=8,
                                                    report_to=[], save_strategy="no", use_cpu=True, seed=0)
        trainer = Trainer(model=model, args=args, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model))
        trainer.train()
        """,
    ),
    _recipe(
        "lightning-fabric",
        "Fabric.setup and setup_dataloaders",
        """
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=1)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        net, fopt = fabric.setup(model, opt)
        guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
        with guard:
            for epoch in guard.epochs(3):
                for x, y in loader:
                    fopt.zero_grad()
                    loss = F.cross_entropy(net(x), y)
                    fabric.backward(loss)
                    fopt.step()
                    guard.step_end(loss=loss)
        """,
    ),
)
