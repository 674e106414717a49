"""What holds for every mapper: slices are parts of the whole, specs are those of what is made, inverses undo."""

import torch
from hypothesis import strategies as st

from d9d.ckpt import Parallel, Region, TensorSpec

DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.float8_e4m3fn]


def bits(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def assert_same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bits(found), bits(expected))


def tensor_of(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 120, shape, generator=generator).to(torch.float32).to(dtype)


def region_of(draw, name, shape):
    bounds = [sorted(draw(st.tuples(*2 * [st.integers(0, length - 1)]))) for length in shape]
    return Region(name, [low for low, _ in bounds], [high - low + 1 for low, high in bounds])


def regions_of(draw, name, tensor):
    """All of a tensor, and some parts: drawn, or the last half of each dim."""
    yield Region.whole(name, TensorSpec.of(tensor))
    if draw is None:
        starts = [length // 2 for length in tensor.shape]
        yield Region(name, starts, [length - start for start, length in zip(starts, tensor.shape)])
    else:
        yield from (region_of(draw, name, tensor.shape) for _ in range(3))


def check(mapper, tensors, draw=None, *, exact=True):
    """What a mapper makes of tensors, after comparing specs and regions; `exact` counts what is read."""
    made = {}
    for group in mapper.bind(list(tensors)):
        inputs = {name: tensors[name] for name in group.inputs}
        specs = {name: TensorSpec.of(tensor) for name, tensor in inputs.items()}
        outputs = group.mapper.apply(inputs)
        assert outputs.keys() == set(group.outputs)
        assert group.mapper.infer(specs) == {name: TensorSpec.of(tensor) for name, tensor in outputs.items()}
        for name, output in outputs.items():
            if not output.numel():
                continue
            for want in regions_of(draw, name, output):
                needs = group.needs(want, specs)
                read = {region: tensors[region.name][region.slices] for region in needs}
                assert all(tensor.shape == region.shape for region, tensor in read.items()), (
                    "regions lie within tensors"
                )
                assert_same(group.make(want, read), output[want.slices])
                if exact:
                    assert sum(region.numel for region in needs) == want.numel, "no byte more than asked"
        made |= outputs
    return made


def check_inverse(mapper, made, tensors):
    restored = Parallel(mapper.inverse()).apply(made)
    assert restored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(restored[name], tensor)
