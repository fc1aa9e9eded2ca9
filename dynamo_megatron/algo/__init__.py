"""The mathematics, as pure functions of tensors and numbers.

No collectives, no Megatron, no configuration: every function can be checked by hand. Shape letters:
P prompts, R rollouts, T tokens, V vocabulary.
"""
