"""Leaves from outside: `mypy --strict` accepts them as mappers, inherited from the protocol or not."""

import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from d9d.ckpt import Group, Mapper, Parallel, Region, Rename, TensorSpec, load, open_checkpoint, plan


@attrs.frozen
class Scale:
    """Multiplies one tensor by a factor; does not inherit from anything, and commutes with slicing."""

    name: str
    factor: float

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        return [Group([self.name], [self.name], self)] if self.name in names else []

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        if not specs[self.name].dtype.is_floating_point:
            raise ValueError(f"cannot scale {self.name!r}, which is {specs[self.name]}")
        return specs

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [want]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] * self.factor

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.name: tensors[self.name] * self.factor}

    def inverse(self) -> "Scale":
        return Scale(self.name, 1 / self.factor)


class Centre(Mapper):
    """Takes the mean away, for which it needs all of the tensor: inherits what says so."""

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        return [Group(["x"], ["y"], self)]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return {"y": specs["x"]}

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"y": tensors["x"] - tensors["x"].mean()}

    def inverse(self) -> Mapper:
        raise ValueError("Centre has no inverse")


MAPPER: Mapper = Parallel(Scale("w", 2.0), Centre(), Rename("a", "b"))


def test_leaves_of_third_parties_load_and_explain(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2), "x": torch.tensor([1.0, 3.0]), "a": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    state = {"w": torch.empty(2), "y": torch.empty(2), "b": torch.empty(1)}
    load(open_checkpoint(tmp_path), MAPPER, state)
    assert {name: tensor.tolist() for name, tensor in state.items()} == {"w": [2, 2], "y": [-1, 1], "b": [0]}
    planned = plan(open_checkpoint(tmp_path), MAPPER, {name: TensorSpec.of(state[name]) for name in state})
    assert planned.explain("w").splitlines() == [
        "w [2] float32 ← Scale(name='w', factor=2.0)",
        "└─ w [2] float32: all 8 B of model.safetensors",
    ]
    assert planned.explain("y").startswith("y [2] float32 ← Centre")
    with pytest.raises(ValueError, match="Centre has no inverse"):
        MAPPER.inverse()


@pytest.mark.long
def test_leaves_of_third_parties_are_typed() -> None:
    subprocess.run([sys.executable, "-m", "mypy", "--strict", __file__], check=True, cwd=Path(__file__).parents[3])
