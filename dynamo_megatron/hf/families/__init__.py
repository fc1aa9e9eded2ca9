"""The families of models that can be trained. Another one is a small file here and a name below.

What differs between families in how tensors are named and fused is in ``hf.mapping``, by the
features of the architecture and not by the family.
"""

from dynamo_megatron.hf.families.llama import LLAMA
from dynamo_megatron.hf.families.qwen2 import QWEN2
from dynamo_megatron.hf.families.qwen3 import QWEN3

FAMILIES = {family.model_type: family for family in (QWEN2, QWEN3, LLAMA)}
"""By the ``model_type`` of config.json."""
