"""Settings shared by all tests."""

import hypothesis
import matplotlib
import torch

matplotlib.use("Agg")
torch.set_num_threads(1)  # pytest-xdist runs one process per core

# The same examples on every run, so that failures can be reproduced.
hypothesis.settings.register_profile("proxmo", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("proxmo")
