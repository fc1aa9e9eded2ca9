"""DynaMO reinforcement learning with verifiable rewards on Megatron-Core.

Source: DynaMO, arXiv:2602.19208.
"""

__version__ = "0.1.0"
