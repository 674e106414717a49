"""A leaf that keeps an interval of a dim."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
from torch import Tensor

from .._mapper import Group, Mapper
from .._names import Pattern, as_pattern, require_same_fields
from .._spec import Region, TensorSpec
from ._one import bind_one


@attrs.frozen
class Slice:
    """Keeps the interval `[start, stop)` of a dim; the rest of the tensor is not read."""

    input: Pattern = attrs.field(converter=as_pattern)
    output: Pattern = attrs.field(converter=as_pattern)
    start: int = attrs.field(kw_only=True, validator=attrs.validators.ge(0))
    """First index that is kept."""
    stop: int = attrs.field(kw_only=True)
    """First index after those that are kept."""
    dim: int = attrs.field(default=0, kw_only=True, validator=attrs.validators.ge(0))
    """The dim that is cut."""

    def __attrs_post_init__(self) -> None:
        require_same_fields(self.input, self.output)
        if self.stop <= self.start:
            raise ValueError(f"stop must be greater than start, got [{self.start}, {self.stop})")

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        return bind_one(self, names)

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        spec = specs[self.input.name]
        if self.dim >= len(spec.shape) or spec.shape[self.dim] < self.stop:
            raise ValueError(
                f"cannot keep [{self.start}, {self.stop}) of dim {self.dim} of {self.input!r}, which is {spec}"
            )
        length = self.stop - self.start
        return {
            self.output.name: TensorSpec((*spec.shape[: self.dim], length, *spec.shape[self.dim + 1 :]), spec.dtype)
        }

    def pull(self, want: Region) -> Sequence[Region] | None:
        offset = self.start + want.offset[self.dim]
        return [want.renamed(self.input.name).replaced(self.dim, offset, want.shape[self.dim])]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return parts[0]

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.output.name: tensors[self.input.name].narrow(self.dim, self.start, self.stop - self.start)}

    def inverse(self) -> Mapper:
        raise ValueError(f"{self!r} has no inverse: it does not keep the rest of the tensor")
