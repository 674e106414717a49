"""A leaf that calls a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from .._mapper import Group, Mapper
from .._names import Pattern, as_patterns, matches, require_same_fields
from .._spec import TensorSpec

Function = Callable[..., Sequence[Tensor]]
SpecFunction = Callable[..., Sequence[TensorSpec]]


def _name(function: Callable[..., object] | None) -> str:
    return str(getattr(function, "__qualname__", function))  # partials and callable objects have none


@attrs.frozen
class Apply(Mapper):
    """Calls a function with whole tensors, in the order of `inputs`, for those of `outputs` in their order.

    `Apply(["{i}.a", "{i}.b"], ["{i}.c"], lambda a, b: [a @ b], specs=lambda a, b: [TensorSpec(a.shape, a.dtype)])`

    A rank that holds a part of an output reads all inputs; write a leaf of your own where that is too much.
    """

    inputs: tuple[Pattern, ...] = attrs.field(converter=as_patterns)
    outputs: tuple[Pattern, ...] = attrs.field(converter=as_patterns)
    function: Function = attrs.field(repr=_name)
    """It may be called on any rank at any time, and must depend on its arguments alone."""
    specs: SpecFunction = attrs.field(kw_only=True, repr=False)
    """The outputs' specs from those of the inputs. A ValueError of it is a problem of the plan."""
    undo: Function | None = attrs.field(default=None, kw_only=True, repr=False)
    """The inputs from the outputs; without it there is no inverse."""
    undo_specs: SpecFunction | None = attrs.field(default=None, kw_only=True, repr=False)
    """Its specs."""

    def __attrs_post_init__(self) -> None:
        if not self.outputs:
            raise ValueError("a function makes one or more tensors: use Drop where there is nothing to make")
        require_same_fields(*self.outputs, *self.inputs)
        if not self.inputs and self.outputs[0].fields:
            raise ValueError(f"there are no names from which fields of {self.outputs[0]!r} could be told: use Repeat")
        if (self.undo is None) != (self.undo_specs is None):
            raise ValueError("give both undo and undo_specs, or neither")

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        leaves = [
            attrs.evolve(
                self,
                inputs=[input_.fill(values) for input_ in self.inputs],
                outputs=[output.fill(values) for output in self.outputs],
            )
            for values in (matches(self.inputs, names) if self.inputs else [{}])
        ]
        return [
            Group([input_.name for input_ in leaf.inputs], [output.name for output in leaf.outputs], leaf)
            for leaf in leaves
        ]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return self._named(self.specs(*(specs[input_.name] for input_ in self.inputs)))

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._named(self.function(*(tensors[input_.name] for input_ in self.inputs)))

    def inverse(self) -> Mapper:
        if self.undo is None or self.undo_specs is None:
            raise ValueError(f"{self!r} has no inverse: give undo and undo_specs")
        return Apply(
            self.outputs, self.inputs, self.undo, specs=self.undo_specs, undo=self.function, undo_specs=self.specs
        )

    def _named(self, results: Sequence[Any]) -> dict[str, Any]:
        if not isinstance(results, (list, tuple)) or len(results) != len(self.outputs):
            found = f"{len(results)} results" if isinstance(results, (list, tuple)) else type(results).__name__
            raise ValueError(f"{self!r} should make a list of {len(self.outputs)}, got {found}")
        return {output.name: result for output, result in zip(self.outputs, results)}
