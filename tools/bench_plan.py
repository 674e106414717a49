"""Processor time to plan a checkpoint of 100,000 names, from specs in memory, with one mapper written in several ways.

    python tools/bench_plan.py [names]

Each expert has three fp8 weights and their scales, which are dequantized, concatenated and stacked. `loop` is the time
of a fixed loop of plain Python in the same run, to compare machines; `half` that of half as many names.
"""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Mapping

import torch

from d9d.ckpt import (
    Concatenate,
    Dequantize,
    Identity,
    Mapper,
    Parallel,
    PlanError,
    Prefix,
    Rename,
    Repeat,
    Sequential,
    Stack,
    TensorSpec,
    plan,
)

EXPERTS = 256
WEIGHTS = {"gate": (256, 384), "up": (256, 384), "down": (384, 256)}


def main() -> None:
    """Plan, and print what was measured."""
    layers = max(2, int(sys.argv[1] if len(sys.argv) > 1 else 100_000) // (6 * EXPERTS))
    source, half = checkpoint(layers), checkpoint(layers // 2)
    loop = seconds(lambda: sum(number % 7 for number in range(5_000_000)))
    print(f"{len(source):,} names; loop {loop:.2f} s")
    forms: dict[str, Callable[[int], Mapper]] = {
        "identity": lambda _: Identity(),
        "patterns": lambda _: experts("model.layers.{l}."),
        "repeat": lambda _: Repeat("model.layers.{l}.", experts("")),
        "leaf by leaf": lambda count: Parallel(*(experts(f"model.layers.{each}.") for each in range(count))),
        "prefixes": lambda count: Prefix(
            "model.", Parallel(*(Prefix(f"layers.{each}.", experts("")) for each in range(count)))
        ),
    }
    for name, form in forms.items():
        made = [source, half] if name == "identity" else [stacked(layers), stacked(layers // 2)]
        whole = seconds(lambda: plan(source, form(layers), made[0]))  # noqa: B023  # called here
        part = seconds(lambda: plan(half, form(layers // 2), made[1]))  # noqa: B023
        print(f"{name:<13} {whole:6.2f} s  half {part:6.2f} s")
    planned = plan(source, forms["repeat"](layers), stacked(layers))
    print(f"bytes to read {seconds(lambda: planned.bytes_to_read):6.2f} s, {planned.bytes_to_read / 1e9:.2f} GB")
    print(f"table         {seconds(lambda: str(planned)):6.2f} s")
    print(f"picture       {seconds(planned.svg):6.2f} s")
    print(f"select        {seconds(lambda: planned.select(['model.layers.1.down'])):6.2f} s for one tensor")
    print(f"wrong prefix  {seconds(lambda: refused(source)):6.2f} s for {len(source):,} names on both sides")
    print(f"peak memory   {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:6.0f} MiB")


def seconds(call: Callable[[], object]) -> float:
    """The time of this process that a call takes, whatever else the machine does."""
    start = time.process_time()
    call()
    return time.process_time() - start


def checkpoint(layers: int) -> dict[str, TensorSpec]:
    """Names and specs on disk."""
    specs = {}
    for layer in range(layers):
        for expert in range(EXPERTS):
            for name, (rows, columns) in WEIGHTS.items():
                full = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                specs[full] = TensorSpec([rows, columns], torch.float8_e4m3fn)
                specs[full + "_scale_inv"] = TensorSpec([rows // 128, columns // 128], torch.float32)
    return specs


def stacked(layers: int) -> Mapping[str, TensorSpec]:
    """Names and specs of the model."""
    shapes = {"gate_up": [EXPERTS, 512, 384], "down": [EXPERTS, 384, 256]}
    return {
        f"model.layers.{layer}.{name}": TensorSpec(shape, torch.bfloat16)
        for layer in range(layers)
        for name, shape in shapes.items()
    }


def experts(prefix: str) -> Mapper:
    """One into the other, under a prefix."""
    each = prefix + "mlp.experts.{e}."
    return Sequential(
        Parallel(*(Dequantize(f"{each}{w}_proj.weight", f"{each}{w}_proj.weight") for w in WEIGHTS)),
        Concatenate([f"{each}gate_proj.weight", f"{each}up_proj.weight"], f"{each}gate_up", sizes=(256, 256)),
        Parallel(
            Stack(f"{each}gate_up", f"{prefix}gate_up", count=EXPERTS),
            Stack(f"{each}down_proj.weight", f"{prefix}down", count=EXPERTS),
        ),
    )


def refused(source: Mapping[str, TensorSpec]) -> None:
    """Plans with a prefix that the target lacks."""
    fields = "{l}.mlp.experts.{e}.{w}.{kind}"
    with contextlib.suppress(PlanError):
        plan(source, Rename(f"model.layers.{fields}", f"layers.{fields}"), source)
        raise AssertionError("it should be refused")


if __name__ == "__main__":
    main()
