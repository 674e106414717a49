"""Batches to the device."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """The same tree with its tensors on a device; trees are mappings, lists, (named) tuples and attrs objects.

    Everything else is passed through.
    """
    match batch:
        case Tensor():
            return batch.to(device, non_blocking=True)
        case Mapping():
            return {key: to_device(value, device) for key, value in batch.items()}
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(to_device(value, device) for value in batch))
        case list() | tuple():
            return type(batch)(to_device(value, device) for value in batch)
        case _ if attrs.has(type(batch)):
            fields = [field for field in attrs.fields(type(batch)) if field.init]
            return type(batch)(**{field.alias: to_device(getattr(batch, field.name), device) for field in fields})
        case _:
            return batch
