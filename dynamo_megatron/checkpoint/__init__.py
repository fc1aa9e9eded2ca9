"""Checkpoints of a whole run, and the policy in Hugging Face format."""
