"""The policy in Megatron-Core: model, forward step, optimizer, weights out."""
