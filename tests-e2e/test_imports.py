"""What an import of a package loads: nothing of which torch alone would not need most."""

import json
import os
import subprocess
import sys

import pytest

# One process loads torch once and forks for each import, as torch is nearly all of the time. DTensors, which take as
# long, are loaded before the packages that need them.
_PROBE = """
import importlib, json, os, sys, torch

def loaded_by(*names):
    parent, child = os.pipe()
    if os.fork() == 0:
        for name in names:
            importlib.import_module(name)
        with open(child, "w") as stream:
            json.dump(sorted(sys.modules), stream)
        os._exit(0)
    os.close(child)
    with open(parent) as stream:
        return json.load(stream)

assert not torch.cuda.is_available()
found = {}
for name in sys.argv[1:]:
    if name == "torch.distributed.tensor":
        importlib.import_module(name)  # what follows is to need it
    found[name] = loaded_by(name)
print(json.dumps(found))
"""
_DTENSOR = "torch.distributed.tensor"
_CLASSES = {"attr", "attrs"}
# torch 2.11 generates the last one when its fully_shard is imported
_OURS_AND_TORCHS = {"d9d", "torch", "_remote_module_non_scriptable"}
# Each package's third parties (the table of DESIGN.md), and whether it needs DTensors to be imported.
_THIRD_PARTIES = {
    "mesh": (_CLASSES, True),
    "attn": (_CLASSES, False),
    "moe": (_CLASSES, False),
    "ckpt": (_CLASSES, False),
    "parallel": (_CLASSES, True),
    "models": (_CLASSES, True),
    "loop": (_CLASSES, True),
    "loop.config": (_CLASSES | {"cattrs", "cattr", "typing_extensions"}, True),
}


def _names(*, needs_dtensor: bool) -> list[str]:
    return [f"d9d.{name}" for name, (_, needs) in _THIRD_PARTIES.items() if needs == needs_dtensor]


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """All modules that an import loads, by the import, without CUDA."""
    names = ["torch", *_names(needs_dtensor=False), _DTENSOR, *_names(needs_dtensor=True)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", _PROBE, *names], env=environment, stdout=subprocess.PIPE, check=True)
    return {name: set(modules) for name, modules in json.loads(found.stdout).items()}


@pytest.mark.parametrize("package", _THIRD_PARTIES)
def test_an_import_loads_only_the_packages_own_third_parties(loaded, package):
    allowed, needs_dtensor = _THIRD_PARTIES[package]
    more = loaded[f"d9d.{package}"] - loaded[_DTENSOR if needs_dtensor else "torch"]
    tops = {name.partition(".")[0] for name in more} - _OURS_AND_TORCHS - sys.stdlib_module_names
    assert tops <= allowed
    if not needs_dtensor:
        assert _DTENSOR not in more
