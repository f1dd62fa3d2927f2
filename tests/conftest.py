"""Settings shared by all tests."""

import os
import sys
from collections.abc import Iterator

# Before torch loads OpenMP: threads that spin while they wait for work would take the cores of other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import matplotlib
import pytest
import torch

matplotlib.use("Agg")
torch.set_num_threads(1)  # pytest-xdist runs one process per core
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start

# The same examples on every run, so that failures can be reproduced.
hypothesis.settings.register_profile("proxmo", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("proxmo")


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_steps() -> Iterator[None]:
    """Compiled steps of all optimizers count towards one limit of recompilations, since they share their code."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
