"""`Model` and the callbacks, under the names that MindSpore users know."""

from mindx_elastic.train.callbacks import Callback as Callback
from mindx_elastic.train.callbacks import CallbackParams as CallbackParams
from mindx_elastic.train.callbacks import RunContext as RunContext
from mindx_elastic.train.checkpoint import CheckpointConfig as CheckpointConfig
from mindx_elastic.train.checkpoint import ExceptionCheckpoint as ExceptionCheckpoint
from mindx_elastic.train.checkpoint import ModelCheckpoint as ModelCheckpoint
from mindx_elastic.train.metrics import Metric as Metric
from mindx_elastic.train.model import Model as Model
from mindx_elastic.train.monitors import LossMonitor as LossMonitor
from mindx_elastic.train.monitors import TimeMonitor as TimeMonitor
from mindx_elastic.train.request_exit import OnRequestExit as OnRequestExit
from mindx_elastic.train.step import TrainOneStep as TrainOneStep
from mindx_elastic.train.tft import OptTFTWrapper as OptTFTWrapper
from mindx_elastic.train.tft import TFTRegister as TFTRegister

__all__ = [
    "Model",
    "TrainOneStep",
    "Callback",
    "CallbackParams",
    "RunContext",
    "ExceptionCheckpoint",
    "ModelCheckpoint",
    "CheckpointConfig",
    "OnRequestExit",
    "TFTRegister",
    "OptTFTWrapper",
    "LossMonitor",
    "TimeMonitor",
    "Metric",
]
