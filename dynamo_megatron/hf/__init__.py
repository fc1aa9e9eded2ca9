"""The one mapping between Hugging Face and Megatron names: import, export and rollout weights."""
