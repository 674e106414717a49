"""Leaves that change dtypes: plain casts, and block-wise quantized weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from .._mapper import Group, Mapper
from .._names import Pattern, as_pattern, matches, require_same_fields
from .._spec import Region, TensorSpec
from ._one import bind_one


@attrs.frozen
class Cast:
    """Converts a tensor to another dtype, rounding as torch does."""

    input: Pattern = attrs.field(converter=as_pattern)
    output: Pattern = attrs.field(converter=as_pattern)
    dtype: torch.dtype = attrs.field(kw_only=True)
    """Of what is made."""
    from_dtype: torch.dtype | None = attrs.field(default=None, kw_only=True)
    """Of what is taken: anything else is refused then, and the inverse casts back to it."""

    def __attrs_post_init__(self) -> None:
        require_same_fields(self.input, self.output)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        return bind_one(self, names)

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        spec = specs[self.input.name]
        if self.from_dtype is not None and spec.dtype != self.from_dtype:
            raise ValueError(f"cannot cast {self.input!r}, which is {spec}: it should be {self.from_dtype}")
        return {self.output.name: TensorSpec(spec.shape, self.dtype)}

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [want.renamed(self.input.name)]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return parts[0].to(self.dtype)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.output.name: tensors[self.input.name].to(self.dtype)}

    def inverse(self) -> Cast:
        if self.from_dtype is None:
            raise ValueError(f"{self!r} has no inverse: give from_dtype, the dtype to cast back to")
        return Cast(self.output, self.input, dtype=self.from_dtype, from_dtype=self.dtype)


def _scale(leaf: Dequantize) -> Pattern:
    return Pattern(leaf.input.text + "_scale_inv")


@attrs.frozen
class Dequantize:
    """Multiplies a weight in blocks by the blocks' scales, as DeepSeek publishes fp8: `weight` and `weight_scale_inv`.

    Blocks are of the last two dims; those at their ends may be smaller. Computes in float32.
    """

    input: Pattern = attrs.field(converter=as_pattern)
    output: Pattern = attrs.field(converter=as_pattern)
    scale: Pattern = attrs.field(default=attrs.Factory(_scale, takes_self=True), kw_only=True, converter=as_pattern)
    """One factor for each block; by default the input's name and `_scale_inv`."""
    block: tuple[int, int] = attrs.field(default=(128, 128), kw_only=True, converter=tuple)
    """Rows and columns of a block."""
    dtype: torch.dtype = attrs.field(default=torch.bfloat16, kw_only=True)
    """Of what is made."""

    def __attrs_post_init__(self) -> None:
        require_same_fields(self.input, self.output, self.scale)
        if len(self.block) != 2 or min(self.block) < 1:
            raise ValueError(f"a block has positive numbers of rows and columns, got {self.block!r}")

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        leaves = [
            attrs.evolve(
                self,
                input=self.input.fill(values),
                output=self.output.fill(values),
                scale=self.scale.fill(values),
            )
            for values in matches([self.input], names)
        ]
        return [Group([leaf.input.name, leaf.scale.name], [leaf.output.name], leaf) for leaf in leaves]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        weight, scale = specs[self.input.name], specs[self.scale.name]
        if len(weight.shape) < 2 or not weight.dtype.is_floating_point or not scale.dtype.is_floating_point:
            raise ValueError(
                f"cannot dequantize {self.input!r}, which is {weight}, by {self.scale!r}, which is {scale}: "
                "they should be floating-point numbers in rows and columns"
            )
        *batch, rows, columns = weight.shape
        expected = (*batch, -(-rows // self.block[0]), -(-columns // self.block[1]))
        if scale.shape != expected:
            raise ValueError(
                f"cannot dequantize {self.input!r}, which is {weight}, in blocks of {self.block} by {self.scale!r}, "
                f"which is {scale}: its shape should be {list(expected)}"
            )
        return {self.output.name: TensorSpec(weight.shape, self.dtype)}

    def pull(self, want: Region) -> Sequence[Region] | None:
        scale = want.renamed(self.scale.name)
        for dim, size in zip((len(want.shape) - 2, len(want.shape) - 1), self.block):
            first, last = want.offset[dim] // size, -(-(want.offset[dim] + want.shape[dim]) // size)
            scale = scale.replaced(dim, first, last - first)
        return [want.renamed(self.input.name), scale]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        weight, scale = parts
        return self._multiply(weight, scale, (want.offset[-2] % self.block[0], want.offset[-1] % self.block[1]))

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.output.name: self._multiply(tensors[self.input.name], tensors[self.scale.name], (0, 0))}

    def inverse(self) -> Mapper:
        raise ValueError(f"{self!r} has no inverse: quantizing anew would give other numbers")

    def _multiply(self, weight: Tensor, scale: Tensor, start: tuple[int, int]) -> Tensor:
        """The product, where the weight begins at `start` within the first block."""
        factors = scale.to(torch.float32)
        for dim, size, first in zip((-2, -1), self.block, start):
            factors = factors.repeat_interleave(size, dim).narrow(dim, first, weight.shape[dim])
        return weight.to(torch.float32).mul_(factors).to(self.dtype)
