"""Whether a package is there, found out without importing any of it."""

import importlib.machinery
import importlib.metadata
import importlib.util
import sys

from torch.torch_version import TorchVersion


def is_installed(module: str) -> bool:
    """Whether ``module``, which may be a submodule, could be imported as far as files tell. Never raises.

    Looking up a submodule in the usual way imports its parents, raises without them, and looking up a loaded module
    without a spec raises too.
    """
    if sys.modules.get(module) is not None:
        return True
    name, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        spec = None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        name = f"{name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is not None


def is_recent(requirement: str) -> bool:
    """Whether a distribution is there as ``name>=version`` asks. Never raises."""
    name, _, oldest = requirement.partition(">=")
    try:
        return bool(TorchVersion(importlib.metadata.version(name)) >= oldest)
    except importlib.metadata.PackageNotFoundError:
        return False
