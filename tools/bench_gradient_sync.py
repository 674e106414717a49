"""What GradientSync costs in Python, per parameter and backward, above an empty post-accumulate hook.

    uv run tools/bench_gradient_sync.py

Parameters of one element, laid out by parallelize_replicate on a mesh of one rank: all that takes time is overhead.
The reference is backward of the same modules as plain ones, accumulating into gradients that are there, each
parameter with an empty hook. The best of many backwards that take turns.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from d9d.mesh import DistContext, MeshConfig
from d9d.parallel import GradientSync, parallelize_replicate


class Scales(nn.Module):
    """So many parameters of one element, each used once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(_Scale() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by all of them."""
        return torch.cat([scale(x) for scale in self.scales]).sum()


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=41)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.ones(1)

    plain = Scales(arguments.parameters)
    for parameter in plain.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
        parameter.grad = torch.zeros_like(parameter)

    with DistContext.launch(MeshConfig(), "cpu") as ctx:
        module = Scales(arguments.parameters)
        parallelize_replicate(module, ctx.mesh("dense")["dp_replicate"])
        sync = GradientSync([list(module.parameters())])

        def accumulate() -> float:
            loss = module(x)
            with sync.microbatch(0, last=False):  # begins the step
                pass
            with sync.microbatch(0, last=False):
                return _seconds(loss.backward)

        def last() -> float:
            loss = module(x)

            def backward() -> None:
                with sync.microbatch(0, last=True):
                    loss.backward()

            return _seconds(backward)

        kinds: dict[str, Callable[[], float]] = {
            "empty hook": lambda: _seconds(plain(x).backward),
            "a microbatch": accumulate,
            "the last microbatch": last,
            "finish": lambda: _seconds(sync.finish),
            "begin": lambda: _seconds(lambda: _begin(sync)),
        }
        taken: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(arguments.repeats):
            for name, kind in kinds.items():
                taken[name].append(kind() / arguments.parameters * 1e6)
    best = {name: min(values) for name, values in taken.items()}
    reference = best.pop("empty hook")
    print(f"µs per parameter, {arguments.parameters} parameters; backward with an empty hook {reference:.2f}")
    for name in ("a microbatch", "the last microbatch"):
        print(f"  {name:<20} +{best[name] - reference:.2f} (× {best[name] / reference:.2f})")
    print(f"  once a step: begin {best['begin']:.2f}, finish {best['finish']:.2f}")


def _begin(sync: GradientSync) -> None:
    with sync.microbatch(0, last=False):
        pass


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
