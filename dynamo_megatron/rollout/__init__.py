"""Sampling from the policy, and the check that sampler and trainer are the same policy."""
