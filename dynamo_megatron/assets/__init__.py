"""What ships with the package: a policy small enough to train in minutes on two CPU cores.

``tools/make_tiny_policy.py`` makes it, and says what it can do and why it is imperfect.
"""

from pathlib import Path

TINY_POLICY = Path(__file__).parent / "tiny_policy"
"""Folder of the tiny policy, in Hugging Face format: give it to ``from_pretrained``."""

BUILTIN_MODELS = {"builtin:tiny": TINY_POLICY}


def model_folder(path: str) -> Path:
    """The folder of a model path; ``builtin:`` names what ships with the package.

    Raises:
        ValueError: there is no such built-in model.
    """
    if path.startswith("builtin:"):
        if path not in BUILTIN_MODELS:
            raise ValueError(
                f"{path}: the built-in models are {', '.join(BUILTIN_MODELS)}. "
                "Use one of them, or a Hugging Face model folder."
            )
        return BUILTIN_MODELS[path]
    return Path(path).expanduser()
