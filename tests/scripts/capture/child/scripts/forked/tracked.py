"""Trackers in every way: called by the script, or through accelerate."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process

sys.path.insert(0, ".")
SENDS = "def {}(*args, **kwargs):\n    raise SystemExit('{} was called')\n\n\n"
CLASS = (
    "class {0}:\n    def __init__(self, *args, **kwargs):\n        raise SystemExit('{0} was made')\n\n"
    "    def send(self):\n        raise SystemExit('{0} was sent')\n\n\n"
)
made = {
    "wandb": (("init", "log", "login", "watch"), ("Artifact", "Image")),
    "swanlab": (("init", "log"), ()),
    "mlflow": (("start_run", "log_param", "set_tag", "autolog", "set_tracking_uri"), ("MlflowClient",)),
    "comet_ml": (("start",), ("Experiment",)),
    "neptune": (("init_run",), ("Run",)),
    "aim": ((), ("Run",)),
    "clearml": ((), ("Task",)),
}
for name, (functions, classes) in made.items():
    text = "config = None\n" + "".join(SENDS.format(one, one) for one in functions)
    Path(f"{name}.py").write_text(text + "".join(CLASS.format(one) for one in classes))

import aim  # noqa: E402
import clearml  # noqa: E402
import comet_ml  # noqa: E402
import mlflow  # noqa: E402
import neptune  # noqa: E402
import swanlab  # noqa: E402
import wandb  # noqa: E402

wandb.login(key="mine")
with wandb.init(project="mine", config={"batch": 3, "lr": 0.5}, mode="online") as run:
    wandb.config.update({"more": 7}, allow_val_change=True)
    wandb.config.setdefaults({"batch": 9, "width": 4})
    wandb.config.seed = 11
assert run is wandb.run
assert dict(wandb.config) == {"batch": 3, "lr": 0.5, "more": 7, "width": 4, "seed": 11}
assert not hasattr(wandb.config, "dropout")
assert "dropout" not in wandb.config
wandb.log({"loss": 1.0}, step=1)
wandb.watch(None)
assert isinstance(wandb.Artifact("model", type="model"), wandb.Artifact)
wandb.Artifact("model", type="model").send()
assert swanlab.init(config={"batch": 2}, mode="cloud").config.batch == 2
swanlab.log({})
mlflow.set_tracking_uri("https://tracking.invalid")
mlflow.autolog()
with mlflow.start_run():
    mlflow.log_param("lr", 1)
    mlflow.set_tag("a", "b")
mlflow.MlflowClient("https://tracking.invalid").send()
comet_ml.start().log_metric("a", 1)
comet_ml.Experiment(api_key="key").log_parameters({})
neptune.init_run(mode="async")["loss"].append(1)
aim.Run()["hparams"] = {"lr": 1}
aim.Run().send()
clearml.Task().send()


class Mine(GeneralTracker):
    """A tracker of the script's own."""

    name = "mine"
    requires_logging_directory = False

    @property
    def tracker(self):
        """Nothing may ask for it."""
        raise SystemExit("tracker was asked for")

    @on_main_process
    def store_init_configuration(self, values):
        """Send."""
        raise SystemExit("mine was called")

    @on_main_process
    def log(self, values, step=None, **kwargs):
        """Send."""
        raise SystemExit("mine was called")


accelerator = Accelerator(log_with=[Mine()])
accelerator.init_trackers("mine", config={"lr": 1})
accelerator.trackers[0].log({"loss": 1})
assert accelerator.get_tracker("mine", unwrap=True).config.lr == 1
assert [tracker.name for tracker in accelerator.trackers][:1] == ["mine"]
accelerator.log({"loss": 1}, step=0)

size = int(wandb.config.batch)
net = torch.nn.Linear(int(wandb.config.width), 2)
optimizer = torch.optim.SGD(net.parameters(), lr=wandb.config["lr"])
net, optimizer = accelerator.prepare(net, optimizer)
for batch in torch.utils.data.DataLoader(torch.rand(6, 4), batch_size=size):
    accelerator.backward(net(batch).sum())
    optimizer.step()
