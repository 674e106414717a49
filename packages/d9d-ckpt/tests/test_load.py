"""Loading into plain tensors in one process."""

from collections.abc import Iterator

import attrs
import pytest
import torch
from safetensors.torch import save_file

from d9d.ckpt import (
    Cast,
    Concatenate,
    Group,
    Identity,
    Parallel,
    PlanError,
    Region,
    Rename,
    Reshape,
    Sequential,
    Source,
    Stack,
    TensorSpec,
    Tie,
    Transpose,
    Unstack,
    convert,
    export,
    load,
    open_checkpoint,
    plan,
)


class CountingSource(Source):
    """Tensors in memory; remembers what was read."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.regions: list[Region] = []

    def __getitem__(self, name: str) -> TensorSpec:
        return TensorSpec.of(self.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def read(self, region: Region) -> torch.Tensor:
        self.regions.append(region)
        return self.tensors[region.name][region.slices]


def test_fills_parameters_in_place(tmp_path):
    experts = {f"e.{i}.w": torch.randn(2, 3) for i in range(12)}
    save_file({**experts, "norm": torch.tensor(2.0), "unused": torch.zeros(1)}, tmp_path / "model.safetensors")
    weight, norm = torch.nn.Parameter(torch.zeros(12, 2, 3)), torch.nn.Parameter(torch.zeros(()))
    pointer = weight.data_ptr()
    mapper = Parallel(Stack("e.{i}.w", "experts", count=12), Identity("norm"))
    load(open_checkpoint(tmp_path), mapper, {"experts": weight, "norm": norm}, waive=["unused"])
    assert torch.equal(weight, torch.stack([experts[f"e.{i}.w"] for i in range(12)]))
    assert weight.data_ptr() == pointer
    assert norm.item() == 2


def test_tied_names_may_share_a_tensor():
    source = CountingSource({"embed": torch.randn(4, 2)})
    tensor = torch.zeros(4, 2)
    load(source, Parallel(Rename("embed", "embed"), Rename("embed", "head")), {"embed": tensor, "head": tensor})
    assert torch.equal(tensor, source.tensors["embed"])


def test_a_tied_head_is_written_once_and_an_untied_one_not_overwritten(tmp_path):  # case 26
    tied = Parallel(Tie("model.embed.weight", ["embed.weight", "head.weight"]), Rename("model.norm", "norm"))
    disk = {"model.embed.weight": torch.randn(4, 2), "model.norm": torch.ones(2)}
    save_file(disk, tmp_path / "model.safetensors")
    state = {"embed.weight": torch.empty(4, 2), "head.weight": torch.empty(4, 2), "norm": torch.empty(2)}
    load(open_checkpoint(tmp_path), tied, state)
    assert torch.equal(state["head.weight"], disk["model.embed.weight"])
    for number, names in enumerate([["embed.weight", "head.weight", "norm"], ["embed.weight", "norm"]]):
        out = tmp_path / str(number)
        export({name: state[name] for name in names}, tied.inverse(), out, max_shard_bytes=16)
        found = open_checkpoint(out)
        assert dict(found) == {name: TensorSpec.of(tensor) for name, tensor in disk.items()}
        assert "head" not in (out / "model.safetensors.index.json").read_text()
        assert torch.equal(found.read(Region("model.embed.weight", [0, 0], [4, 2])), disk["model.embed.weight"])
    state["head.weight"] = state["head.weight"] + 1
    with pytest.raises(ValueError, match="'head.weight' differs from 'embed.weight', to which it is tied"):
        export(state, tied.inverse(), tmp_path / "untied")
    assert not (tmp_path / "untied").exists()
    save_file({**disk, "lm_head.weight": torch.randn(4, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match="neither used nor waived: 'lm_head.weight'"):
        load(open_checkpoint(tmp_path), tied, state)


OF_ONE = {
    "tied": Tie("w", ["a", "b", "c"]),
    "laid out differently": Sequential(
        Tie("w", ["a", "x", "y"]),
        Parallel(Identity("a"), Transpose("x", "b"), Reshape("y", "c", input_shape=(4, 2), output_shape=(8,))),
    ),
    "cast": Sequential(Cast("w", "x", dtype=torch.bfloat16), Tie("x", ["a", "b"])),
    "copied": Sequential(
        Cast("w", "x", dtype=torch.float16), Cast("x", "y", dtype=torch.float64), Tie("y", ["a", "b"])
    ),
    "of two": Sequential(
        Tie("w.{i}", ["l.{i}", "r.{i}"]), Stack("l.{i}", "a", count=2), Stack("r.{i}", "b", count=2, dim=1)
    ),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_what_is_made_of_the_same_is_read_once(name, tmp_path):
    mapper = OF_ONE[name]
    names = ["w.0", "w.1"] if name == "of two" else ["w"]
    source = CountingSource({name: torch.randn(4, 2) for name in names})
    expected = mapper.bind(source)[0].mapper.apply(source.tensors)
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    told = []
    load(source, mapper, state, progress=lambda *args: told.append(args))
    assert told[-1] == (plan(source, mapper).bytes_to_read,) * 2
    convert(source, mapper, tmp_path / "written", max_shard_bytes=1)
    assert [region.name for region in source.regions] == names * 2
    written = open_checkpoint(tmp_path / "written")
    for output, tensor in expected.items():
        assert torch.equal(state[output], tensor)
        assert torch.equal(written.read(Region.whole(output, written[output])), tensor)


def test_tied_tensors_of_different_dtypes_or_of_common_memory_have_their_own_values():
    source = CountingSource({"w": torch.randn(4, 2)})
    tie = Tie("w", ["a", "x"])
    state = {"a": torch.zeros(4, 2), "b": torch.zeros(4, 2, dtype=torch.bfloat16)}
    load(source, Sequential(tie, Parallel(Identity("a"), Cast("x", "b", dtype=torch.bfloat16))), state)
    assert torch.equal(state["a"], source.tensors["w"])
    assert torch.equal(state["b"], source.tensors["w"].bfloat16())
    memory = torch.zeros(5, 2)
    load(source, tie, {"a": memory[:4], "x": memory[1:]})
    assert torch.equal(memory[1:], source.tensors["w"])
    assert torch.equal(memory[0], source.tensors["w"][0])


def test_a_stage_reads_exactly_its_own(tmp_path):  # case 36
    source = CountingSource({f"layers.{i}": torch.full((2,), float(i)) for i in range(4)})
    target = {name: source[name] for name in source}
    state = {"layers.2": torch.zeros(2), "layers.3": torch.zeros(2)}
    load(source, Identity(), state, target=target)
    assert [region.name for region in source.regions] == ["layers.2", "layers.3"]
    assert state["layers.3"].tolist() == [3, 3]


def test_groups_are_read_in_natural_order():
    source = CountingSource({f"w{i}": torch.zeros(1) for i in (10, 9, 1)})
    load(source, Identity(), {name: torch.ones(1) for name in source})
    assert [region.name for region in source.regions] == ["w1", "w9", "w10"]


def test_nothing_is_written_when_anything_is_wrong():
    source = CountingSource({"a": torch.ones(2), "b": torch.ones(2)})
    state = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(PlanError, match=r"made as \[2\] float32, but the target has \[3\] float32: 'b'"):
        load(source, Identity(), state)
    with pytest.raises(PlanError, match=r"'b' is \[3\] float32, but in the target \[2\] float32"):
        load(source, Identity(), state, target=dict(source))
    assert not source.regions
    assert state["a"].tolist() == [0, 0]


class Sorted:
    """A leaf from outside: sorts, which does not commute with slicing."""

    def bind(self, names):
        return [Group(["x"], ["y"], self)]

    def infer(self, specs):
        return {"y": specs["x"]}

    def pull(self, want):
        return None

    def assemble(self, want, parts):
        raise AssertionError("pull has no answer")

    def apply(self, tensors):
        return {"y": tensors["x"].sort().values}

    def inverse(self):
        raise ValueError("Sorted has no inverse")


def test_leaves_that_cannot_be_sliced_take_the_whole_group():
    source = CountingSource({"x": torch.tensor([3, 1, 2])})
    state = {"y": torch.zeros(3, dtype=torch.int64)}
    load(source, Sorted(), state)
    assert state["y"].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="Sorted has no inverse"):
        Parallel(Sorted(), Unstack("a", "b.{i}", count=1)).inverse()


def test_a_leaf_that_makes_the_wrong_shape_is_named():
    class Broken(Sorted):
        def pull(self, want):
            return [want.renamed("x")]

        def assemble(self, want, parts):
            return parts[0][:1]  # would broadcast

    with pytest.raises(ValueError, match=r"Broken object .* made \[1\] of"):
        load(CountingSource({"x": torch.ones(3)}), Broken(), {"y": torch.zeros(3)})


def test_concatenated_inputs_are_read_once():
    source = CountingSource({"gate": torch.randn(2, 3), "up": torch.randn(2, 3)})
    state = {"gate_up": torch.zeros(4, 3)}
    load(source, Concatenate(["gate", "up"], "gate_up", sizes=(2, 2)), state)
    assert torch.equal(state["gate_up"], torch.cat([source.tensors["gate"], source.tensors["up"]]))
    assert [region.numel for region in source.regions] == [6, 6]


@pytest.mark.parametrize("columns", [slice(2, 6), slice(None, None, 2)])
def test_a_reshaped_tensor_goes_into_strided_memory(tmp_path, columns):
    tensor = torch.randn(2, 3, 4)
    save_file({"a": tensor}, tmp_path / "w.safetensors")
    around = torch.zeros(6, 8)
    reshape = Reshape("a", "b", input_shape=(2, 3, 4), output_shape=(6, 4))
    for mapper in (reshape, Sequential(Rename("a", "c"), attrs.evolve(reshape, input="c"))):
        around.zero_()
        load(open_checkpoint(tmp_path), mapper, {"b": around[:, columns]})
        assert torch.equal(around[:, columns], tensor.reshape(6, 4))
        assert around.count_nonzero() == tensor.numel()


def test_tensors_without_memory_of_their_own_are_all_listed(tmp_path):
    save_file({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, tmp_path / "w.safetensors")
    source = open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"on meta have no memory .*\['a', 'b'\]"):
        load(source, Identity(), {name: torch.empty(2, 3, device="meta") for name in "ab"})
    plain = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"expanded tensors share their memory.*\['b'\]"):
        load(source, Identity(), {"a": plain, "b": torch.zeros(3).expand(2, 3)})
    with pytest.raises(ValueError, match=r"sparse layout .*\['b'\]"):
        load(source, Identity(), {"a": plain, "b": torch.zeros(2, 3).to_sparse()})
    with pytest.raises(ValueError, match=r"sparse layout .*\['b'\]"):
        export({"a": plain, "b": torch.zeros(2, 3).to_sparse()}, Identity(), tmp_path / "out")
    assert not plain.any()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.nn.Linear(1, 1), r"got a Linear: give its state_dict\(\)"),
        ({"a": torch.ones(2), "step": 3}, "'step' is a int"),
        ({"a": torch.ones(2), 1: torch.ones(2)}, "the name 1 is no string"),
    ],
)
def test_what_is_no_tensor_is_named(state, message, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match=message):
        load(open_checkpoint(tmp_path), Identity(), state)
    with pytest.raises(TypeError, match=message):
        export(state, Identity(), tmp_path / "out")
