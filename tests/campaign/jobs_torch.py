"""The example train_torch.py as the trainer of a campaign of jobs. torchrun starts it; with --fork N it does so by itself.

    jobs_torch.py [--fork N] [options of train_torch.py] [--nan STEP]

Most of the time of a job of torchrun goes into imports. With --fork, the launcher of torchrun imports everything once, and
its N ranks are copies of it. With --nan, a weight becomes NaN in that step.
"""

import random
import runpy
import sys
from pathlib import Path

import numpy
import torch.distributed.fsdp  # noqa: F401 (before the fork)

import ckptdelta

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/train_torch.py"


def taken(option):
    """Takes an option and its value out of the command line. Returns the value, or 0."""
    if option not in sys.argv:
        return 0
    at = sys.argv.index(option)
    value = int(sys.argv[at + 1])
    del sys.argv[at:at + 2]
    return value


def spoil(at):
    """The step that trains calls Session.step once it has changed the weights."""
    made, step, models = ckptdelta.Session.__init__, ckptdelta.Session.step, []

    def __init__(self, *args, model, **kwargs):
        made(self, *args, model=model, **kwargs)
        models.append(model)

    def step_with_fault(self, *args, **kwargs):
        if self.at + 1 == at:
            self.fence()
            first = next(models[-1].parameters()).detach()
            first = first.to_local() if hasattr(first, "to_local") else first
            first.view(-1)[:1] = float("nan")
        return step(self, *args, **kwargs)

    ckptdelta.Session.__init__, ckptdelta.Session.step = __init__, step_with_fault


def train(words, nan):
    sys.argv = words
    random.seed(1)
    numpy.random.seed(1)
    if nan:
        spoil(nan)
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def launch(ranks, *args):
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    import torch._dynamo  # noqa: F401 (the first optimizer imports it)
    elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
                                start_method="fork"), train)(*args)


if __name__ == "__main__":
    copies, bad_step = taken("--fork"), taken("--nan")
    if copies:
        launch(copies, sys.argv, bad_step)
    else:
        train(sys.argv, bad_step)
