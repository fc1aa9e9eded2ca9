"""What ships with the package: a policy small enough to train in minutes on two CPU cores.

``tools/make_tiny_policy.py`` makes it, and says what it can do and why it is imperfect.
"""

from pathlib import Path

TINY_POLICY = Path(__file__).parent / "tiny_policy"
"""Folder of the tiny policy, in Hugging Face format: give it to ``from_pretrained``."""
