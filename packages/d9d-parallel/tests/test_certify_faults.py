"""Planted faults, each one line in what a user would write: the certificate catches and names them."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from d9d.mesh import DistContext, MeshConfig, all_gather_objects
from d9d.parallel import CertificateError, LossSum, ShardPolicy, certify, parallelize_fsdp
from d9d.parallel.certify import StepResult, default_loop

sys.path.insert(0, str(Path(__file__).parent))
from certified_models import AS_STORED, WIDTH, Experts, Tied, by_hand, by_hand_case, lay_out, loss_sum, sound, split


def failure_of(mesh: MeshConfig, case, **options) -> str:
    """What the certificate says of the one mesh, which must fail."""
    certificate = certify(**case, meshes=[mesh], **options)
    assert certificate.layouts[0].verdict == "failed"
    with pytest.raises(CertificateError) as raised:
        certificate.check(allow_refused=True)
    assert str(raised.value).splitlines()[0] in str(certificate)
    assert raised.value.certificate is certificate
    return str(raised.value)


def line_of(said: str, kind: str) -> str:
    """The one line about gradients, say, without its columns."""
    [line] = [line for line in said.splitlines() if f" {kind} " in line]
    return " ".join(line.split())


def averaged(module: Tied, context: DistContext) -> None:
    lay_out(module, context)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(context.world_size)


def by_hand_averaged(*arguments):
    return by_hand(*arguments, average=2)


def loss_mean(module: nn.Module, batch: tuple[Tensor, Tensor]) -> LossSum:
    loss = loss_sum(module, batch)
    return LossSum(loss.sum / loss.weight.clamp(min=1), loss.weight)


def test_mean_for_sum():
    said = failure_of(MeshConfig(shard=4), sound(parallelize=averaged))
    assert line_of(said, "gradient").endswith("ratio 0.2500 error 7.5e-01 the worst of 5 that fail, of 5")
    assert line_of(said, "norm") == "norm ratio 0.2500 error 7.5e-01"
    assert "1/4: averaged, or not summed, over the 4 data ranks" in said
    said = failure_of(MeshConfig(replicate=2), by_hand_case(loop=by_hand_averaged))
    assert line_of(said, "gradient").endswith("ratio 0.5000 error 5.0e-01 the worst of 5 that fail, of 5")
    assert "1/2: averaged, or not summed, over the 2 data ranks" in said
    said = failure_of(MeshConfig(replicate=2), sound(loss=loss_mean))
    assert "do not add up to the batch, or the loss is no sum over samples" in said


class ExpertsTimesEp(Experts):
    def held(self) -> Tensor:
        """Right in forward; the gradient is that of two uses."""
        return 2 * self.weight - self.weight.detach()


class TiedTimesEp(Tied):
    experts_class = ExpertsTimesEp


def test_expert_gradient_times_ep():
    said = failure_of(MeshConfig(replicate=4, expert=2), sound(model=TiedTimesEp))
    assert line_of(said, "gradient") == "gradient experts.weight ratio 2.0000 error 1.0e+00 alone of 5"
    assert "2: summed once too often, or not divided, over" in said
    assert "the 2 ranks of ep" in said


def by_hand_skipping(*arguments):
    return by_hand(*arguments, reduced=slice(1, None))


def test_a_skipped_bucket():
    said = failure_of(MeshConfig(replicate=2), by_hand_case(loop=by_hand_skipping))
    assert line_of(said, "gradient").endswith(" 3 that fail, of 5")  # two tensors, of which one has two names
    assert "ranks disagree, with ratios from " in said
    assert "not summed over ranks?" in said
    assert "ranks hold different bits and will drift apart" in said


def by_hand_counting_replicas(*arguments):
    return by_hand(*arguments, norm_over_ranks=True)


def test_a_norm_that_counts_replicas():
    said = failure_of(MeshConfig(replicate=2), by_hand_case(loop=by_hand_counting_replicas))
    headline, norm, guess = said.splitlines()[:3]
    assert headline == "replicate 2 failed in step 1, with 1 microbatch a data rank:"
    assert norm.split() == ["norm", "ratio", "1.4142", "error", "4.1e-01"]
    assert "√2: counted once for each of the 2 data ranks" in guess
    assert "gradient" not in said


class RowParallel(nn.Module):
    """Splits its input features over ranks; the bias is added by each of them, which is once too often."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 4))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.group = None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return F.linear(x, self.weight, self.bias)
        x = x.chunk(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]
        partial = F.linear(x, self.weight.to_local(), self.bias.to_local())
        total = partial.detach().clone()
        dist.all_reduce(total, group=self.group)
        return partial + (total - partial).detach()


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row, self.out = RowParallel(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.row(x).tanh())


class BiasedRegression(Regression):
    def __init__(self) -> None:
        super().__init__()
        nn.init.ones_(self.row.bias)


def split_rows(module: Regression, context: DistContext) -> None:
    mesh = context.mesh("dense")["tp"]
    module.row.group = mesh.get_group()
    for name, placement in (("weight", Shard(1)), ("bias", Replicate())):
        setattr(module.row, name, nn.Parameter(distribute_tensor(getattr(module.row, name).data, mesh, [placement])))


def sums_biases_over_ranks(module, loss, optimizer, context):
    """Whatever all ranks add to is summed over them."""

    def step(microbatches, *, max_norm):
        module.zero_grad()
        found = loss(module, microbatches[0])
        (found.sum / found.weight).backward()
        dist.all_reduce(module.row.bias.grad.to_local())
        norms = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in module.parameters()]
        optimizer.step()
        return StepResult(total=found.detach(), norm=torch.cat([n.flatten() for n in norms]).norm())

    return step


def squares(module: nn.Module, batch: tuple[Tensor, Tensor]) -> LossSum:
    x, y = batch
    return LossSum((module(x)[:, 0] - y).square().sum(), torch.tensor(len(y)))


def regression(**changes):
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6.0)
    case = {"model": Regression, "parallelize": split_rows, "loss": squares, "loop": sums_biases_over_ranks}
    return {**sound(batch=batch), **case, **changes}


def test_a_bias_added_twice():
    """Case 16."""
    options = {"microbatches": [1], "max_norms": [None, None]}
    said = failure_of(MeshConfig(tensor=2), regression(), **options)
    assert said.startswith("tensor 2 failed in step 1")
    assert line_of(said, "gradient") == "gradient row.bias ratio 2.0000 error 1.0e+00 alone of 4"
    assert "the 2 ranks of tp" in said
    said = failure_of(MeshConfig(tensor=2), regression(model=BiasedRegression), **options)
    assert line_of(said, "share").startswith("share data rank 0 ")


def split_with_a_slip(batch, index, count):
    return split(batch, 0 if index == 2 else index, count)


def fed_by_the_first_rank(module, loss, optimizer, context):
    step = default_loop(module, loss, optimizer, context)
    return lambda microbatches, *, max_norm: step(all_gather_objects(list(microbatches))[0], max_norm=max_norm)


def test_a_data_rank_fed_the_wrong_slice():
    said = failure_of(MeshConfig(replicate=4), sound(split=split_with_a_slip))
    assert line_of(said, "share").startswith("share all data ranks together ")
    assert "of 4 parts of the batch 0, 2 are not all different" in said
    said = failure_of(MeshConfig(replicate=2), sound(loop=fed_by_the_first_rank))
    assert line_of(said, "share").startswith("share data rank 1 ")
    assert "its loop computed the loss of something else than its part of the batch" in said


def in_two_units(module: Tied, context: DistContext) -> None:
    mesh = context.mesh("dense")["dp_cp_shard"]
    for unit in (module.embed, module.head, module):
        parallelize_fsdp(unit, mesh, policy=AS_STORED)


def test_an_untied_head():
    said = failure_of(MeshConfig(shard=2), sound(parallelize=in_two_units))
    headline, tie, guess = said.splitlines()[:3]
    assert headline == "shard 2 failed before the first step, with 1 microbatch a data rank:"
    assert tie.split()[:4] == ["tie", "embed.weight", "=", "head.weight"]
    assert "lay out the modules that share it in one call" in guess


class DrawnByRank(Tied):
    def __init__(self) -> None:
        torch.manual_seed(dist.get_rank())
        super().__init__()


def test_unequal_initial_weights():
    said = failure_of(MeshConfig(replicate=2), by_hand_case(model=DrawnByRank))
    assert said.startswith("replicate 2 failed before the first step")
    assert "initial weight" in said
    assert "weights depend on the rank or the layout" in said


def by_hand_with_old_gradients(*arguments):
    return by_hand(*arguments, zeroes=False)


def in_single_precision(module: Tied, context: DistContext) -> None:
    for unit in [[module.embed, module.head], module]:
        parallelize_fsdp(unit, context.mesh("dense")["dp_cp_shard"], policy=ShardPolicy(compute_dtype=torch.float32))


def test_faults_of_later_steps_and_of_dtypes_are_told_apart():
    said = failure_of(MeshConfig(replicate=2), by_hand_case(loop=by_hand_with_old_gradients))
    assert said.startswith("replicate 2 failed in step 2, with 1 microbatch a data rank")
    said = failure_of(MeshConfig(shard=2), sound(parallelize=in_single_precision))
    assert "about the rounding of float32: is anything computed, summed or stored in it?" in said
