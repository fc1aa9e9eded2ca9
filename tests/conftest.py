"""One import of Megatron-Core for all tests; forked ranks inherit it."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hypothesis import settings

import megatron_patches

# Forking after OpenMP has run several threads can hang the child.
torch.set_num_threads(1)
megatron_patches.apply()

# No deadline: a busy machine is not a failure. Derandomised: a red run is red for everyone.
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("steady")
