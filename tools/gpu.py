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
from pathlib import Path

from workspace import ROOT

WHEELS = ROOT / ".whl"
# What packages import at run time and GPU images tend to lack.
MISSING = (
    *("attrs", "cattrs", "cut-cross-entropy", "rich", "markdown-it-py", "mdurl", "pygments", "typing-extensions"),
    *("execnet", "pytest-xdist"),  # for the options in pyproject.toml
)
SAMPLES = 4
"""Of the card, on each GPU in a step."""
LAYOUTS = {
    2: ("replicate=2", "shard=2", "replicate=2,expert=2", "shard=2,expert=2"),
    4: ("replicate=4", "shard=4", "replicate=2,shard=2", "replicate=4,expert=4", "shard=4,expert=2"),
}


def wheels() -> None:
    """Fetch the wheels at their locked versions."""
    exported = _output(
        "uv", "export", "--quiet", "--all-packages", "--no-hashes", "--no-emit-workspace", "--all-extras"
    )
    pins = [line.split(" ")[0] for line in exported.splitlines() if line.split("==")[0] in MISSING]
    pip = ("uv", "run", "--quiet", "--no-project", "--with", "pip", "python", "-m", "pip")
    _run(*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(WHEELS), *pins)


def test() -> None:
    """Run the gpu tests of all packages."""
    _python("-m", "pytest", "-q", "-n", "0", "-m", "gpu", "--durations", "5")


def bench() -> None:
    """Head, attention, experts; the card on one GPU and, under several layouts, on all; pipelines; GradientSync."""
    _python("tools/bench_head.py")
    _python("tools/bench_attention.py")
    _python("tools/bench_moe.py")
    _python("tools/bench_gradient_sync.py")
    card = ("--trainer.microbatch", str(SAMPLES), "--trainer.global_batch")
    _python("tools/bench_layouts.py", *card, str(SAMPLES))
    gpus = int(_output(sys.executable, "-c", "import torch; print(torch.cuda.device_count())"))
    if gpus > 1:
        _python("tools/bench_layouts.py", *card, str(SAMPLES * gpus))
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus))
        for layout in LAYOUTS[gpus]:
            _python(*launch, "tools/bench_layouts.py", layout, *card, str(SAMPLES * gpus))
        _python(*launch, "tools/bench_moe.py")
        _python(*launch, "tools/bench_pipeline.py")


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
