"""One thread: the machines that run these tests have few cores, and sums must not depend on their number."""

import torch

torch.set_num_threads(1)
