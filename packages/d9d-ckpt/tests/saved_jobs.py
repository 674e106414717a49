"""What tests of job checkpoints save and look at."""

import torch


def save(checkpoints, step, tensors=None, **kwargs):
    tensors = {"w": torch.full((3,), float(step))} if tensors is None else tensors
    checkpoints.save(step, tensors, **{"shared": {}, "per_rank": {}, **kwargs})


def steps(root):
    return sorted(path.name for path in root.iterdir())


def loaded(checkpoint):
    state = {"w": torch.zeros(3)}
    checkpoint.load(state)
    return state["w"].tolist()


STATE = {
    "bool": torch.tensor([True, False, True]),
    "zero_dim": torch.tensor(3.5, dtype=torch.float64),
    "step": torch.tensor(7),
    "bf16": torch.randn(3, 4).bfloat16(),
    "empty": torch.zeros(0, 4),
    "strided": torch.randn(4, 3).T,
    "parameter": torch.nn.Parameter(torch.randn(2)),
}
