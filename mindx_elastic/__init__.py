"""Elastic training for PyTorch: stop anywhere, resume bit for bit."""

from mindx_elastic import data as data
from mindx_elastic import errors as errors
from mindx_elastic.errors import GracefulExit as GracefulExit
from mindx_elastic.guard import Guard as Guard
from mindx_elastic.policy import ExitPolicy as ExitPolicy
from mindx_elastic.policy import PeriodicPolicy as PeriodicPolicy
