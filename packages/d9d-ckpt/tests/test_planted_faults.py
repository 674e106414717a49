"""The coverage proof on random mappers: nothing is found in valid ones, and every planted fault is."""

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from d9d.ckpt import (
    Apply,
    Cast,
    Chunk,
    Concatenate,
    Constant,
    Dequantize,
    Drop,
    Identity,
    Mapper,
    Parallel,
    PlanError,
    Prefix,
    Rename,
    Repeat,
    Reshape,
    SelectChild,
    Sequential,
    Slice,
    Squeeze,
    Stack,
    TensorSpec,
    Tie,
    Transpose,
    Unsqueeze,
    Unstack,
    plan,
)

BF16, F32, F8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def f32(*shape):
    return TensorSpec(shape, F32)


@attrs.define
class Case:
    """A mapper and, written down by hand, what it takes and makes."""

    mapper: Mapper
    source: dict
    target: dict
    origins: dict
    """Source names by what is made of them; of those that are left out a shape may be anything."""


def case(mapper, source, target, *, strict=True):
    return Case(mapper, source, target, {name: list(target) for name in source} if strict else {})


def leaf(u, kind, n):  # noqa: C901  # a list of cases
    """A case all of whose names begin with `u`."""
    many = {f"{u}.{i}.a": f32(2, 3) for i in range(n)}
    match kind:
        case "rename":
            return case(Rename(f"{u}.a", f"{u}.b"), {f"{u}.a": f32(2)}, {f"{u}.b": f32(2)})
        case "pattern":
            origins = {f"{u}.{i}.a": [f"{u}.b.{i}"] for i in range(n)}
            target = {f"{u}.b.{i}": f32(2, 3) for i in range(n)}
            return Case(Rename(f"{u}.{{i}}.a", f"{u}.b.{{i}}"), many, target, origins)
        case "identity":
            return Case(Identity(f"{u}.{{i}}.a"), many, dict(many), {name: [name] for name in many})
        case "child":
            made = {name.removeprefix(f"{u}."): spec for name, spec in many.items()}
            made = {f"c{u}.{name}": spec for name, spec in made.items()}
            return case(SelectChild(f"{u}."), {f"{u}.{name}": spec for name, spec in made.items()}, made)
        case "stack":
            return case(Stack(f"{u}.{{i}}.a", f"{u}.b", count=n), many, {f"{u}.b": f32(n, 2, 3)})
        case "unstack":
            target = {f"{u}.{i}.b": f32(2, 3) for i in range(n)}
            return case(Unstack(f"{u}.a", f"{u}.{{i}}.b", count=n, dim=1), {f"{u}.a": f32(2, n, 3)}, target)
        case "concatenate":
            return case(Concatenate(list(many), f"{u}.b", sizes=[3] * n, dim=1), many, {f"{u}.b": f32(2, 3 * n)})
        case "chunk":
            mapper = Chunk(f"{u}.a", [f"{u}.b.{i}" for i in range(n)], sizes=range(1, n + 1))
            target = {f"{u}.b.{i}": f32(i + 1, 4) for i in range(n)}
            return case(mapper, {f"{u}.a": f32(n * (n + 1) // 2, 4)}, target)
        case "transpose":
            return case(Transpose(f"{u}.a", f"{u}.a", dims=(0, 2)), {f"{u}.a": f32(2, 3, 4)}, {f"{u}.a": f32(4, 3, 2)})
        case "reshape":
            mapper = Reshape(f"{u}.a", f"{u}.b", input_shape=(2 * n, 3), output_shape=(n, 6))
            return case(mapper, {f"{u}.a": f32(2 * n, 3)}, {f"{u}.b": f32(n, 6)})
        case "squeeze":
            return case(Squeeze(f"{u}.a", f"{u}.b", dim=1), {f"{u}.a": f32(2, 1)}, {f"{u}.b": f32(2)})
        case "unsqueeze":
            return case(Unsqueeze(f"{u}.a", f"{u}.b", dim=1), {f"{u}.a": f32(2)}, {f"{u}.b": f32(2, 1)})
        case "slice":
            mapper = Slice(f"{u}.a", f"{u}.b", start=1, stop=n + 1)
            return case(mapper, {f"{u}.a": f32(n + 4, 2)}, {f"{u}.b": f32(n, 2)})
        case "cast":
            mapper = Cast(f"{u}.a", f"{u}.b", dtype=BF16)
            return case(mapper, {f"{u}.a": f32(2, n)}, {f"{u}.b": TensorSpec([2, n], BF16)})
        case "dequantize":
            source = {f"{u}.w": TensorSpec([130, 7], F8), f"{u}.w_scale_inv": f32(2, 1)}
            return case(Dequantize(f"{u}.w", f"{u}.w"), source, {f"{u}.w": TensorSpec([130, 7], BF16)})
        case "tie":
            names = [f"{u}.b.{i}" for i in range(n)]
            return case(Tie(f"{u}.a", names), {f"{u}.a": f32(3)}, dict.fromkeys(names, f32(3)))
        case "constant":
            return case(Constant(f"{u}.b", shape=(n,), dtype=F32), {}, {f"{u}.b": f32(n)})
        case "drop":
            return case(Drop(f"{u}.{{i}}.a"), many, {}, strict=False)
        case "apply":
            mapper = Apply(list(many), [f"{u}.b"], lambda *x: [sum(x)], specs=lambda *x: [x[-1]])
            last = list(many)[-1:]
            return Case(mapper, many, {f"{u}.b": f32(2, 3)}, {name: [f"{u}.b"] for name in last})
        case "chain":
            mapper = Sequential(
                Concatenate([f"{u}.{{i}}.a", f"{u}.{{i}}.c"], f"{u}.{{i}}.d", sizes=(2, 2)),
                Transpose(f"{u}.{{i}}.d", f"{u}.{{i}}.d"),
                Stack(f"{u}.{{i}}.d", f"{u}.b", count=n),
            )
            source = {**many, **{f"{u}.{i}.c": f32(2, 3) for i in range(n)}}
            return case(mapper, source, {f"{u}.b": f32(n, 3, 4)})
    raise AssertionError(kind)


KINDS = ["rename", "pattern", "identity", "child", "stack", "unstack", "concatenate", "chunk", "transpose", "reshape",
         "squeeze", "unsqueeze", "slice", "cast", "dequantize", "tie", "constant", "drop", "apply",
         "chain"]  # fmt: skip


def moved(inner, old, new, mapper):
    """The case under prefixes."""
    return Case(
        mapper,
        {old + name: spec for name, spec in inner.source.items()},
        {new + name: spec for name, spec in inner.target.items()},
        {old + name: [new + made for made in names] for name, names in inner.origins.items()},
    )


def merged(mapper, cases):
    found = Case(mapper, {}, {}, {})
    for each in cases:
        found.source |= each.source
        found.target |= each.target
        found.origins |= each.origins
    return found


@st.composite
def cases(draw):
    """Two to five leaves, under prefixes and for layers, side by side or one after the other."""
    parts = []
    for number in range(draw(st.integers(2, 5))):
        inner = leaf(f"u{number}", draw(st.sampled_from(KINDS)), draw(st.integers(1, 11)))
        match draw(st.integers(0, 4)):
            case 0:
                inner = moved(inner, "old.", "new.", Prefix("old.", inner.mapper, output="new."))
            case 1:
                layers = draw(st.integers(1, 3))
                repeat = Repeat(f"m{number}.{{l}}.", inner.mapper, output=f"n{number}.{{l}}.", count=layers)
                each = [moved(inner, f"m{number}.{layer}.", f"n{number}.{layer}.", repeat) for layer in range(layers)]
                inner = merged(repeat, each)
            case 2 if inner.target:
                name = draw(st.sampled_from(sorted(inner.target)))
                inner.mapper = Sequential(inner.mapper, Rename(name, f"z{number}"))
                inner.target[f"z{number}"] = inner.target.pop(name)
                for names in inner.origins.values():
                    if name in names:  # a problem may tell either
                        names.append(f"z{number}")
        parts.append(inner)
    mappers = [part.mapper for part in parts]
    if draw(st.booleans()):
        return merged(Parallel(*mappers), parts)
    middle = draw(st.integers(0, len(mappers)))
    return merged(Sequential(Parallel(*mappers[:middle]), *mappers[middle:]), parts)


def problems(given_case, **kwargs):
    try:
        plan(given_case.source, given_case.mapper, given_case.target, **kwargs)
    except PlanError as error:
        return list(error.problems)
    return []


def check_faults(valid, data):
    assert problems(valid) == []
    check_invented_names(valid, data)
    if valid.target:
        check_targets(valid, data)
    if valid.origins:
        check_sources(valid, data)


def check_invented_names(valid, data):
    hole = attrs.evolve(valid, target={**valid.target, "hole.w": f32(1)})
    assert problems(hole) == ["in the target, but not made: 'hole.w'"]
    surplus = attrs.evolve(valid, source={**valid.source, "surplus.w": f32(1)})
    assert problems(surplus) == ["in the source, but neither used nor waived: 'surplus.w'"]
    assert problems(surplus, waive=["surplus.{w}"]) == []
    both = attrs.evolve(hole, source=surplus.source)
    assert problems(both) == [problems(surplus)[0], problems(hole)[0]], "one fault hides another"
    lost = attrs.evolve(valid, mapper=Parallel(valid.mapper, Rename("lost.w", "lost.v")))
    lost.target = {**valid.target, "lost.v": f32(1)}
    assert problems(lost) == ["needed, but not in the source: 'lost.w'"]


def check_targets(valid, data):
    name = data.draw(st.sampled_from(sorted(valid.target)), label="target")
    others = {other: spec for other, spec in valid.target.items() if other != name}
    typo = name + "x"
    found = problems(attrs.evolve(valid, target={**others, typo: valid.target[name]}))
    assert found == [
        f"made, but not in the target: {name!r} (nearest: {typo!r})",
        f"in the target, but not made: {typo!r} (nearest: {name!r})",
    ]
    spec = valid.target[name]
    wrong = TensorSpec([*spec.shape, 77], spec.dtype)
    found = problems(attrs.evolve(valid, target={**others, name: wrong}))
    assert found == [f"made as {spec}, but the target has {wrong}: {name!r}"]
    more = {**valid.source, "extra.w": spec}
    (found,) = problems(attrs.evolve(valid, source=more, mapper=Parallel(valid.mapper, Rename("extra.w", name))))
    assert found.startswith(f"made twice: {name!r}")
    (found,) = problems(attrs.evolve(valid, source=more, mapper=Sequential(valid.mapper, Rename("extra.w", name))))
    assert f"makes [{name!r}], which exist already" in found
    double = Parallel(valid.mapper, Rename("extra.w", name), Rename("lost.w", "lost.v"))
    assert len(problems(attrs.evolve(valid, source=more, mapper=double))) == 3, "one fault hides another"


def check_sources(valid, data):
    name = data.draw(st.sampled_from(sorted(valid.origins)), label="source")
    made = [name, *valid.origins[name]]
    others = {other: spec for other, spec in valid.source.items() if other != name}
    told = [repr(each.split(".", cut)[-1]) for each in made for cut in range(3)]  # errors name prefixes apart
    for fault in ("hole", "typo", "shape"):
        source = dict(others)
        if fault == "typo":
            source[name + "_"] = valid.source[name]
        if fault == "shape":
            spec = valid.source[name]
            source[name] = TensorSpec([*spec.shape, 77], spec.dtype)
        found = problems(attrs.evolve(valid, source=source))
        assert any(any(part in line for part in told) for line in found), (fault, name, found)
        if fault == "typo":
            assert any("_'" in line for line in found), found
    first = valid.source.keys() - others.keys()
    takes_again = Sequential(valid.mapper, Rename(*first, "again"))
    found = problems(attrs.evolve(valid, mapper=takes_again))
    if name not in valid.target:
        assert found == [f"Rename(input={name!r}, output='again') takes [{name!r}], which an earlier mapper took"] or (
            found[1:] and f"takes [{name!r}], which an earlier mapper took" in found[0]
        )


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.data())
def test_every_planted_fault_is_found_and_nothing_else(valid, data):
    check_faults(valid, data)


@pytest.mark.long
@settings(deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.data())
def test_every_planted_fault_in_a_thousand_mappers(valid, data):
    check_faults(valid, data)
