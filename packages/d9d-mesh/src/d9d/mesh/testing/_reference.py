"""Functions by where they are defined, so that another process finds them."""

import contextlib
import importlib
import importlib.util
import inspect
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs


@attrs.frozen
class Reference:
    """A function or class at the top of an importable file."""

    path: str
    module: str
    name: str

    @classmethod
    def to(cls, what: Any, *, role: str) -> "Reference":
        """Refer to a function or class.

        Args:
            what: The function or class.
            role: What it is for; for the error.

        Raises:
            ValueError: Another process could not find it.
        """
        module, name = str(getattr(what, "__module__", "")), str(getattr(what, "__qualname__", "<locals>"))
        try:
            is_there = reduce(getattr, name.split("."), sys.modules[module]) is what
            path = inspect.getfile(what)
        except (KeyError, AttributeError, TypeError):
            is_there, path = False, ""
        if not is_there or not Path(path).is_file():
            raise ValueError(
                f"{role} is {what!r}, which the ranks cannot find, being processes of their own: give a function (or "
                "class) defined at the top of a file, no lambda, partial, method or nested function"
            )
        return cls(str(Path(path).resolve()), module, name)

    def resolve(self) -> Any:
        """What is referred to, after loading its file where this process has not."""
        return reduce(getattr, self.name.split("."), self._load())

    def _load(self) -> ModuleType:
        # A script is not run again there: multiprocessing has loaded it under another name.
        name = "__mp_main__" if self.module == "__main__" else self.module
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            if Path(getattr(module, "__file__", None) or "").resolve() == Path(self.path):
                return module
        # It is no module by this name here, as a test that pytest has imported.
        spec = importlib.util.spec_from_file_location(name, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        # Its parents may be folders, not packages; pickle imports the first of them all the same.
        sys.modules.setdefault(name.partition(".")[0], ModuleType(name.partition(".")[0]))
        spec.loader.exec_module(module)
        return module
