"""One thread: tests share the machine, and small tensors gain nothing from more."""

import torch

torch.set_num_threads(1)
