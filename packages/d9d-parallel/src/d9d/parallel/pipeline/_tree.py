"""What a tree of tensors looks like, apart from the numbers in it."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten


@attrs.frozen
class TensorSpec:
    """Shape and dtype of a tensor that is not there yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: "Tensor | TensorSpec") -> "TensorSpec":
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor of this kind, uninitialized."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


Constant: TypeAlias = bool | int | float | str | None
"""What a tree may hold between its tensors."""


@attrs.frozen
class Opaque:
    """A leaf of a tree that is neither a tensor nor a constant: only its type is known to other ranks."""

    type: str

    def __str__(self) -> str:
        return f"an object of {self.type}"


@attrs.frozen
class TreeForm:
    """Structure of a tree, as torch's pytrees see it, and what its leaves are. Picklable."""

    leaves: tuple[TensorSpec | Constant | Opaque, ...]
    structure: TreeSpec

    @classmethod
    def of(cls, tree: Any) -> "TreeForm":
        """That of a tree of tensors, constants, and `TensorSpec` in place of tensors."""
        leaves, structure = tree_flatten(tree)
        return cls(tuple(map(_form_of_leaf, leaves)), structure)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors among the leaves."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @property
    def carriers(self) -> tuple[TensorSpec, ...]:
        """The tensors that bring gradients back when they travel between stages: the floating ones."""
        return tuple(spec for spec in self.tensors if _is_floating(spec))

    def carriers_of(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those among the tensors of such a tree that are `carriers`."""
        return [tensor for tensor, spec in zip(tensors, self.tensors) if _is_floating(spec)]

    @property
    def opaque(self) -> str | None:
        """The first leaf that is an `Opaque`, in words."""
        named = zip(self._names(), self.leaves)
        return next((f"{name or 'it'} is {leaf}" for name, leaf in named if isinstance(leaf, Opaque)), None)

    def build(self, tensors: Iterable[Tensor | TensorSpec]) -> Any:
        """The tree with these tensors, or with what stands for them."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)

    def difference(self, expected: "TreeForm") -> str | None:
        """The first thing in which this form is not as expected, in words: "['ids'] is …, and not …"."""
        if self == expected:
            return None
        if self.structure != expected.structure:
            return f"its structure is {self.structure}, and not {expected.structure}"
        pairs = zip(self._names(), self.leaves, expected.leaves)
        return next(f"{n or 'it'} is {_in_words(a)}, and not {_in_words(b)}" for n, a, b in pairs if a != b)

    def _names(self) -> Sequence[str]:
        """Where each leaf is: "['ids']", ".hidden[0]"; empty if it is the whole tree."""
        numbered = tree_unflatten(range(len(self.leaves)), self.structure)
        return [keystr(path) for path, _ in tree_flatten_with_path(numbered)[0]]


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of its leaves."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _is_floating(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def _form_of_leaf(leaf: object) -> TensorSpec | Constant | Opaque:
    match leaf:
        case Tensor() | TensorSpec():
            return TensorSpec.of(leaf)
        case None | bool() | int() | float() | str():
            return leaf
        case _:
            return Opaque(f"{type(leaf).__module__}.{type(leaf).__qualname__}")


def _in_words(leaf: TensorSpec | Constant | Opaque) -> str:
    return str(leaf) if isinstance(leaf, TensorSpec | Opaque) else repr(leaf)
