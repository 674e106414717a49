"""The certificate: what is right passes, and each planted fault is caught and named."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from d9d.mesh import DistContext, MeshConfig, all_gather_objects
from d9d.parallel import (
    CertificateError,
    LossSum,
    ShardPolicy,
    certify,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
)
from d9d.parallel.certify import Quantity, StepResult, default_loop, every_mesh, parse_mesh
from d9d.parallel.certify.__main__ import main

VOCABULARY, WIDTH, EXPERTS = 11, 6, 4
AS_STORED = ShardPolicy(compute_dtype=None, reduce_dtype=None)


# What a user brings: a model, its layout, its loss, and a loop written by hand.


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        total = Sum.apply(gradient, ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return Sum.apply(gradient, ctx.group), None


class Experts(nn.Module):
    """Every expert sees every token."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.group = EXPERTS, None
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def expert_parameters(self):
        yield self.weight

    def set_expert_group(self, group, *, dispatcher=None) -> None:
        self.group = group

    def held(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        if self.group is None:
            return torch.einsum("te,th,ehg->tg", share, x, self.weight).tanh()
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        x, share = (Gather.apply(t, self.group) for t in (x, share))
        y = torch.einsum("te,th,ehg->tg", share.chunk(size, -1)[rank], x, self.held())
        return Sum.apply(y, self.group).chunk(size)[rank].tanh()


class Tied(nn.Module):
    experts_class = Experts

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = self.experts_class()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        return self.head(x + self.experts(x))


def lay_out(module: Tied, context: DistContext) -> None:
    config = context.config
    if config.pipeline * config.context * config.tensor > 1:
        raise ValueError("laid out over replicate, shard and expert only")
    if config.expert > 1:
        experts = context.mesh("expert")["ep_replicate", "ep_shard", "ep"]
        parallelize_expert_parallel(module.experts, experts, policy=AS_STORED if config.shard > 1 else None)
    dense = context.mesh("dense")["dp_replicate", "dp_cp_shard"]
    # The router would else be a part of the experts' unit, which does not take it.
    for unit in [module.experts.router, [module.embed, module.head], module]:
        if config.shard == 1:
            parallelize_replicate(module, dense)
        elif config.replicate == 1:
            parallelize_fsdp(unit, dense["dp_cp_shard"], policy=AS_STORED)
        else:
            parallelize_hsdp(unit, dense, shard_dim="dp_cp_shard", policy=AS_STORED)


def loss_sum(module: nn.Module, batch: tuple[Tensor, Tensor]) -> LossSum:
    ids, labels = batch
    total = F.cross_entropy(module(ids), labels.flatten(), ignore_index=-100, reduction="sum")
    return LossSum(total, (labels != -100).sum())


def split(batch: tuple[Tensor, Tensor], index: int, count: int) -> tuple[Tensor, Tensor]:
    return tuple(tensor.tensor_split(count)[index] for tensor in batch)


def make_batch(valid=(1, 5, 3, 2, 4, 0, 5, 1)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(VOCABULARY, (2, len(valid), 5), generator=generator)
    for row, count in enumerate(valid):
        labels[row, count:] = -100
    return ids, labels


def sound(**changes):
    """The arguments of `certify`, with one thing changed."""
    return {"model": Tied, "parallelize": lay_out, "loss": loss_sum, "split": split, "batch": make_batch(), **changes}


def leave_plain(module: nn.Module, context: DistContext) -> None:
    assert context.config.replicate == context.world_size


def by_hand(module, loss, optimizer, context, *, reduced=slice(None), zeroes=True, norm_over_ranks=False, average=1):
    """Replicas of plain tensors, summed in two buckets: nothing of this package."""
    parameters = list(module.parameters())
    buckets = [parameters[:2], parameters[2:]]

    def step(microbatches, *, max_norm):
        if zeroes:
            module.zero_grad()
        total = torch.zeros(2, dtype=torch.float64)
        for microbatch in microbatches:
            found = loss(module, microbatch)
            found.sum.backward()
            total += torch.stack([found.sum.detach(), found.weight.double()])
        dist.all_reduce(total)
        for bucket in buckets[reduced]:
            flat = torch.cat([p.grad.flatten() for p in bucket])
            dist.all_reduce(flat)
            for parameter, gradient in zip(bucket, flat.split([p.numel() for p in bucket])):
                parameter.grad.copy_(gradient.view_as(parameter) / average)
        norm_squared = sum((p.grad / total[1]).square().sum() for p in parameters)
        if norm_over_ranks:
            dist.all_reduce(norm_squared)
        norm = norm_squared.sqrt()
        for parameter in parameters:
            parameter.grad *= (1.0 if max_norm is None else min(1.0, max_norm / norm)) / total[1]
        optimizer.step()
        return StepResult(total=LossSum(*total.unbind()), norm=norm)

    return step


def by_hand_case(**changes):
    return sound(**{"parallelize": leave_plain, "loop": by_hand, **changes})


# What passes.


def test_layouts_that_are_right_pass_and_refused_ones_are_no_passes():
    impossible = MeshConfig(replicate=4, expert=3)
    meshes = [*every_mesh(4, ["replicate", "shard", "expert"]), MeshConfig(tensor=4), impossible]
    certificate = certify(**sound(), meshes=meshes)
    assert [layout.verdict for layout in certificate.layouts] == ["passed"] * 9 + ["refused"] * 2
    for layout in certificate.layouts[:9]:
        assert {c.rank for c in layout.comparisons} == {0, 1, 2, 3}
        assert {c.microbatches for c in layout.comparisons} == {1, 2}
        names = {c.name for c in layout.comparisons if c.quantity is Quantity.GRADIENT}
        assert names == {
            "embed.weight",
            "head.weight",
            "experts.weight",
            "experts.router.weight",
            "experts.router.bias",
        }
        assert {c.quantity for c in layout.comparisons} == set(Quantity)
    certificate.check(allow_refused=True)
    with pytest.raises(CertificateError, match="tensor 4 was refused: laid out over replicate, shard and expert only"):
        certificate.check()
    report = str(certificate)
    assert "9 passed, 0 failed, 2 refused" in report
    assert "mesh.expert = 3 does not fold" in report
    assert "| replicate 2 · shard 2 · expert 4 | 4 | passed |" in certificate.markdown()
    assert "| tensor 4 | 4 | refused: laid out over" in certificate.markdown()
    assert "experts.router.bias" in certificate.parameters()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, foreach=False)


def test_a_loop_that_uses_nothing_of_this_package_passes():
    certify(**by_hand_case(optimizer=adamw), meshes=[MeshConfig(replicate=2)]).check()


# Planted faults. Each is one line in what a user would write.


def failure_of(mesh: MeshConfig, case, **options) -> str:
    """What the certificate says of the one mesh, which must fail."""
    certificate = certify(**case, meshes=[mesh], **options)
    assert certificate.layouts[0].verdict == "failed"
    with pytest.raises(CertificateError) as raised:
        certificate.check(allow_refused=True)
    assert str(raised.value).splitlines()[0] in str(certificate)
    assert raised.value.certificate is certificate
    return str(raised.value)


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
    assert "gradient   head.weight" in said or "gradient   embed.weight" in said or "of 5" in said
    assert "ratio 0.2500" in said
    assert "1/4: averaged, or not summed, over the 4 data ranks" in said
    said = failure_of(MeshConfig(replicate=2), by_hand_case(loop=by_hand_averaged))
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
    [line] = [line for line in said.splitlines() if "gradient " in line]
    assert line.split() == ["gradient", "experts.weight", "ratio", "2.0000", "error", "1.0e+00", "alone", "of", "5"]
    assert "2: summed once too often, or not divided, over" in said
    assert "the 2 ranks of ep" in said


def by_hand_skipping(*arguments):
    return by_hand(*arguments, reduced=slice(1, None))


def test_a_skipped_bucket():
    said = failure_of(MeshConfig(replicate=2), by_hand_case(loop=by_hand_skipping))
    [line] = [line for line in said.splitlines() if "gradient " in line]
    assert "2 that fail, of 5" in line or "3 that fail, of 5" in line
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
    [line] = [line for line in said.splitlines() if "gradient " in line]
    assert line.split() == ["gradient", "row.bias", "ratio", "2.0000", "error", "1.0e+00", "alone", "of", "4"]
    assert "the 2 ranks of tp" in said
    said = failure_of(MeshConfig(tensor=2), regression(model=BiasedRegression), **options)
    [line] = [line for line in said.splitlines() if "share " in line]
    assert "data rank 0" in line


def split_with_a_slip(batch, index, count):
    return split(batch, 0 if index == 2 else index, count)


def fed_by_the_first_rank(module, loss, optimizer, context):
    step = default_loop(module, loss, optimizer, context)
    return lambda microbatches, *, max_norm: step(all_gather_objects(list(microbatches))[0], max_norm=max_norm)


def test_a_data_rank_fed_the_wrong_slice():
    said = failure_of(MeshConfig(replicate=4), sound(split=split_with_a_slip))
    [line] = [line for line in said.splitlines() if "share " in line]
    assert "all data ranks together" in line
    assert "of 4 parts of the batch 0, 2 are not all different" in said
    said = failure_of(MeshConfig(replicate=2), sound(loop=fed_by_the_first_rank))
    [line] = [line for line in said.splitlines() if "share " in line]
    assert "data rank 1" in line
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


# What cannot be certified.


def test_what_proves_nothing_or_cannot_be_run_is_refused():
    mesh = [MeshConfig(replicate=2)]
    with pytest.raises(ValueError, match="loss is <function .*lambda.* give a function"):
        certify(**sound(loss=lambda module, batch: None), meshes=mesh)
    with pytest.raises(ValueError, match="leaves a degree open"):
        certify(**sound(), meshes=[MeshConfig(replicate=-1)])
    with pytest.raises(ValueError, match=r"the batch has a weight of 0.0"):
        certify(**sound(batch=make_batch((0, 0))), meshes=mesh)
    with pytest.raises(ValueError, match="there is no degree experts"):
        every_mesh(2, ["experts"])
    with pytest.raises(ValueError, match="'replicas=2' in the mesh 'replicas=2' is not one of pipeline=N"):
        parse_mesh("replicas=2")


def test_notes_say_what_is_not_tested():
    even = (torch.arange(8).view(4, 2), torch.arange(8).view(4, 2))
    certificate = certify(**sound(batch=even), meshes=[MeshConfig(replicate=2)], microbatches=[1])
    certificate.check()
    assert "Note: 2 parts of the batch weigh the same, so a mean of their means would pass." in str(certificate)


# The command line, and a function and a package of one name.


def command_line(arguments, capsys) -> tuple[int, str]:
    code = main(arguments)
    return code, capsys.readouterr().out


def test_the_command_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("""
from torch import nn, randn, tensor
from d9d.parallel import LossSum, parallelize_replicate
def build(): return nn.Linear(3, 1)
def lay_out(module, context): parallelize_replicate(module, context.mesh("dense")["dp_replicate"])
def loss(module, x): return LossSum(module(x).square().sum(), tensor(len(x)))
def split(x, index, count): return x.tensor_split(count)[index]
def subject(): return dict(model=build, parallelize=lay_out, loss=loss, split=split, batch=randn(5, 3))
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["mine:subject", "--meshes", "replicate=2", "--parameters"]) == 0
    report = capsys.readouterr().out
    assert "1 passed, 0 failed, 0 refused" in report
    assert "weight" in report.splitlines()[-2]
    assert main(["mine:subject", "--ranks", "2", "--meshes", "replicate=2", "--markdown"]) == 1
    assert "| shard 2 | 2 | failed |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["mine:subject"])
    assert "there is no mesh: give --meshes or --ranks" in capsys.readouterr().err


# One process loads torch once and forks for each order, as torch is nearly all of the time.
_ORDERS = """
import os, sys, torch.distributed.tensor, runpy

def command_line():
    sys.argv[1:] = ["--help"]
    try:
        runpy.run_module("d9d.parallel.certify", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert end.code == 0

for order in range(3):
    if os.fork() == 0:
        if order == 0:
            import d9d.parallel.certify
        if order == 1:
            from d9d.parallel.certify import Certificate
        if order == 2:
            command_line()
        from d9d.parallel import certify
        assert certify.__name__ == "certify", certify
        command_line()
        from d9d.parallel import certify as again
        assert again is certify
        sys.exit()
    assert os.wait()[1] == 0
"""


def test_the_name_of_function_and_package_means_the_function_in_any_order():
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", _ORDERS]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert found.stdout.count("usage: python -m d9d.parallel.certify") == 4
