"""Run all tests marked gpu, then the benches, on a machine that has torch and none of our packages.

Packages are taken from their source folders. Pure-Python wheels that the machine lacks are taken from ``.whl/``::

    uv run tools/gpu.py wheels                 # where there is an index: fetch them into .whl/
    python3 tools/gpu.py test bench            # on the GPU machine
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from workspace import ROOT

WHEELS = ROOT / ".whl"
# What packages import at run time and GPU images tend to lack.
MISSING = ("attrs", "cattrs", "rich", "markdown-it-py", "mdurl", "pygments", "typing-extensions")
EXAMPLE = "examples/qwen3_moe/pretrain.py"
CARD = "examples/qwen3_moe/card.toml"


def wheels() -> None:
    """Fetch the wheels at their locked versions."""
    exported = _output("uv", "export", "--quiet", "--all-packages", "--no-hashes", "--no-emit-workspace")
    pins = [line.split(" ")[0] for line in exported.splitlines() if line.split("==")[0] in MISSING]
    pip = ("uv", "run", "--quiet", "--no-project", "--with", "pip", "python", "-m", "pip")
    _run(*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(WHEELS), *pins)


def test() -> None:
    """Run the gpu tests of all packages."""
    _python("-m", "pytest", "-q", "-m", "gpu", "--durations", "5")


def bench() -> None:
    """Train the card on one GPU, and on all of them."""
    _train(EXAMPLE)
    gpus = int(_output(sys.executable, "-c", "import torch; print(torch.cuda.device_count())"))
    if gpus > 1:
        launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(gpus))
        _train(*launch, EXAMPLE, "--mesh.replicate", str(gpus), "--mesh.expert", str(gpus))
        sharded = ("--trainer.dtype", "float32", "--compute_dtype", "bfloat16")
        _train(*launch, EXAMPLE, "--mesh.shard", str(gpus), *sharded)


def _train(*arguments: str) -> None:
    """Train the card in a directory that is removed: its checkpoint has tens of gigabytes."""
    with tempfile.TemporaryDirectory() as directory:
        _python(*arguments, "--config", CARD, "--trainer.directory", directory)


def _python(*arguments: str) -> None:
    """Run Python with our sources and the wheels on its path; go on after a failure and remember it."""
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    path = os.pathsep.join([*sources, str(_unpacked()), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *arguments]
    print("$", " ".join(command), flush=True)
    _codes.append(subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False).returncode)


@functools.cache
def _unpacked() -> Path:
    """Where the wheels are unpacked; anew in each process, since they may have changed."""
    site = WHEELS / "unpacked"
    if found := sorted(map(str, WHEELS.glob("*.whl"))):
        shutil.rmtree(site, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site))
        _run(*pip, *found)
    return site


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


_codes: list[int] = []
_ACTIONS = {"wheels": wheels, "test": test, "bench": bench}


def main() -> int:
    if not sys.argv[1:] or not set(sys.argv[1:]) <= _ACTIONS.keys():
        sys.stderr.write(__doc__ or "")
        return 2
    for name in sys.argv[1:]:
        _ACTIONS[name]()
    return int(any(_codes))


if __name__ == "__main__":
    sys.exit(main())
