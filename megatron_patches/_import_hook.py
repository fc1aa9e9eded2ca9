"""Change megatron-core modules right after they are imported, before anyone can copy from them."""

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

PACKAGE = "megatron.core"

ModuleChange = Callable[[ModuleType], None]


def is_megatron_module(name: str) -> bool:
    """Whether a module name belongs to megatron-core."""
    return name == PACKAGE or name.startswith(PACKAGE + ".")


class MegatronImportHook(MetaPathFinder):
    """Runs registered changes on megatron-core modules as they finish importing.

    Patches register with ``after_every`` and ``after``; nothing happens until ``install``. The
    installed hook is its own record: ``MegatronImportHook.installed()`` finds it in
    ``sys.meta_path``, so the package needs no global state.

    Attributes:
        names: names of the patches that registered here, in order.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self._changes: list[tuple[str | None, ModuleChange]] = []
        self._contexts: list[Callable[[], AbstractContextManager[object]]] = []

    @staticmethod
    def installed() -> "MegatronImportHook | None":
        """The hook this process uses, or None before ``apply()``."""
        hooks = (finder for finder in sys.meta_path if isinstance(finder, MegatronImportHook))
        return next(hooks, None)

    def install(self, names: tuple[str, ...]) -> None:
        """Start acting on imports, on behalf of the patches ``names``."""
        self.names = names
        sys.meta_path.insert(0, self)

    def after_every(self, change: ModuleChange) -> None:
        """Call ``change`` on every megatron-core module, before the changes of ``after``."""
        self._changes.append((None, change))

    def after(self, module_name: str, change: ModuleChange) -> None:
        """Call ``change`` on one megatron-core module."""
        self._changes.append((module_name, change))

    def during_every(self, context: Callable[[], AbstractContextManager[object]]) -> None:
        """Execute every megatron-core module inside ``context()``."""
        self._contexts.append(context)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a megatron-core module as usual, with a loader that reports back here."""
        if not is_megatron_module(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        # Compiled extensions have another loader, and nothing in them to change.
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _ReportingLoader(spec.loader.name, spec.loader.path, self)
        return spec

    def execute(self, module: ModuleType, run: ModuleChange) -> None:
        """Execute a module's code with ``run``, then make the registered changes."""
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context())
            run(module)
        for module_name, change in self._changes:
            if module_name in (None, module.__name__):
                change(module)


class _ReportingLoader(SourceFileLoader):
    """The usual source loader, which hands the module to the hook."""

    def __init__(self, fullname: str, path: str, hook: MegatronImportHook) -> None:
        super().__init__(fullname, path)
        self._hook = hook

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then let the hook change it."""
        self._hook.execute(module, super().exec_module)
