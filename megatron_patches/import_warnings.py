"""Do not repeat, at every import, what a CPU-only host lacks.

Failure:  eight warnings per process (``Transformer Engine and Apex are not installed. Falling back
    to ...``, and megatron-core's deprecations of its own modules), errors under
    ``python -W error`` and pytest's ``filterwarnings = error``.
Trigger:  importing megatron-core where neither Transformer Engine nor Apex can be installed.
Safe because: only these messages are dropped, only while a megatron-core module is being imported.
    The fallbacks they announce are the ones that a CPU-only host must use.
Upstream: intended.
Delete when: megatron-core imports without a warning on such a host.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_patches._guard import require_cpu_only_host
from megatron_patches._import_hook import MegatronImportHook

NAME = "import_warnings"

_EXPECTED = (
    (UserWarning, r"Transformer Engine and Apex are not installed\. Falling back to"),
    (UserWarning, r"Apex is not installed\. Falling back to Torch Norm"),
    (DeprecationWarning, r"The following imports from `dynamic_context\.py` will be removed"),
    (DeprecationWarning, r"The 'megatron\.core\.transformer\.custom_layers\.transformer_engine'"),
)


def apply(hook: MegatronImportHook) -> None:
    """Register the filters, for the time of each module's import."""
    require_cpu_only_host(NAME)
    hook.during_every(_expected_warnings_ignored)


@contextmanager
def _expected_warnings_ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        for category, message in _EXPECTED:
            warnings.filterwarnings("ignore", message, category)
        yield
