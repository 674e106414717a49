"""The capability table as text."""

from collections.abc import Iterable

import torch

from ._backend import attention_backends
from ._feature import Feature


def capability_table() -> str:
    """What each registered attention backend can do, as a table in Markdown, the automatic choice's favourite first."""
    classes = sorted(attention_backends.classes.values(), key=lambda c: -1 if c.priority is None else c.priority)
    kinds = [f"`{c.kind}`" for c in reversed(classes)]
    rows = [["", *kinds], ["---", *["---"] * len(kinds)]]
    table = [c.capabilities for c in reversed(classes)]
    rows += [[feature.value, *("✓" if feature in can.features else "–" for can in table)] for feature in Feature]
    rows += [
        ["runs on", *(_listed(can.device_types) for can in table)],
        ["compute capability", *("any" if (c := can.cuda_capability) is None else f"≥ {c[0]}.{c[1]}" for can in table)],
        ["dtypes", *(_listed(map(_name, can.dtypes) if can.dtypes is not None else None) for can in table)],
        ["head dims", *("any" if can.max_head_dim is None else f"≤ {can.max_head_dim}" for can in table)],
        ["install", *("–" if can.install is None else f"`{can.install}`" for can in table)],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _listed(names: Iterable[str] | None) -> str:
    return "any" if names is None else ", ".join(sorted(names))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
