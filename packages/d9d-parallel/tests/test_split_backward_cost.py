"""What a split backward pass computes in which part, what it keeps in between, and what it says when it cannot."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_world
from d9d.parallel import GradientSync, parallelize_replicate
from d9d.parallel.pipeline._backward import backward, backward_inputs
from d9d.parallel.pipeline._join import Branch, join


class Calls(TorchDispatchMode):
    """Counts calls of operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counter: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counter[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Alive(TorchDispatchMode):
    """Knows the storages that operations made and that are alive, but those of some given tensors."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self._given = {t.untyped_storage()._cdata for t in given}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._given:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.elements())
        return out

    def elements(self, dtype: torch.dtype = torch.float64) -> float:
        """The number of elements, if all are of one dtype."""
        return sum(size for storage, size in self._made.values() if not storage.expired()) / dtype.itemsize


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _stack(blocks: int, hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(hidden, 2) for _ in range(blocks)]).double()


def _random(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(requires_grad)


def test_between_the_parts_a_layer_keeps_its_input_and_the_gradient_of_its_output():
    blocks, tokens, hidden = 3, (2, 5), 6
    model = _stack(blocks, hidden)
    x, dy = _random(*tokens, hidden, requires_grad=True), _random(*tokens, hidden)
    with Alive(x, dy, *model.parameters()) as alive:
        y = get_gradient_edge(model(x))
        (dx,), rest = backward_inputs([y], [dy], [x])
        del y
        between = alive.elements() - dx.numel()
        rest.run()
        after = alive.elements() - dx.numel()
    # In hidden states, for norm1, qkv, out, norm2, up, down; the first input and the last gradient are given.
    inputs, gradients = 1 + 1 + 1 + 1 + 1 + 4, 1 + 3 + 1 + 1 + 4 + 1
    states = blocks * (inputs + gradients) - 2
    positions = tokens[0] * tokens[1]
    deviations = blocks * 4 * positions  # means and deviations of two norms
    outlines = blocks * 4  # one number instead of each transposed weight
    assert between == states * positions * hidden + deviations + outlines
    assert after == sum(p.numel() for p in model.parameters())


def test_the_input_pass_frees_as_it_goes():
    layers, states = 10, 12
    model = nn.Sequential(
        *[module for _ in range(layers) for module in (nn.Linear(4, 4), nn.Tanh(), nn.GELU())]
    ).double()
    x, dy = _random(states, 4, requires_grad=True), _random(states, 4)
    with Alive(x, dy, *model.parameters()) as alive:
        y = get_gradient_edge(model(x))
        before = alive.elements()
        rest = backward_inputs([y], [dy], [x])[1]
        assert alive.peak < before + 4 * x.numel()
        del y, rest


def test_weights_cast_for_one_microbatch_are_freed_with_the_input_pass():
    model, x, dy = nn.Linear(6, 64), torch.randn(2, 6, requires_grad=True), torch.randn(2, 64).bfloat16()
    with Alive(x, dy, *model.parameters()) as alive:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        (dx,), rest = backward_inputs([y], [dy], [x])
        del y, dx
        assert alive.elements(torch.bfloat16) == x.numel() + 1
        rest.run()
    assert model.weight.grad.shape == (64, 6)


def test_a_weight_pass_that_never_runs_frees_everything():
    model, x = _stack(1, 6), _random(2, 5, 6, requires_grad=True)
    with Alive(x, *model.parameters()) as alive:
        rest = backward_inputs([model(x).sum()], [None], [x])[1]
        assert alive.elements() > 0
        del rest
        assert alive.elements() == 0


def _counts(forward: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Counter[str], Counter[str]]:
    y = forward(x)
    with Calls() as first:
        rest = backward_inputs([y.sum()], [None], [x] if x.requires_grad else [])[1]
    with Calls() as second:
        rest.run()
    return first.counter, second.counter


@pytest.mark.parametrize("shared", [False, True])
def test_each_gradient_is_computed_once(shared):
    layers = [nn.Linear(4, 4) for _ in range(5)]
    model = nn.Sequential(*([layers[0]] * 5 if shared else layers))
    first, second = _counts(model, torch.randn(3, 4, requires_grad=True))
    assert (first["mm"], second["mm"]) == (5, 5)


def test_the_first_stage_computes_everything_in_the_weight_pass():
    first, second = _counts(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4))
    assert (first["mm"], second["mm"]) == (0, 3)


def test_frozen_weights_cost_nothing():
    first, second = _counts(nn.Linear(4, 4).requires_grad_(requires_grad=False), torch.randn(3, 4, requires_grad=True))
    assert (first["mm"], second["mm"]) == (1, 0)


class Fused(torch.autograd.Function):
    """Computes both gradients at once, as a Python function does."""

    calls = 0

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        Fused.calls += 1
        x, w = ctx.saved_tensors
        return dy @ w.t(), x.t() @ dy


def test_a_python_function_runs_once_and_its_weight_gradient_waits_for_the_weight_pass():
    x, w = _random(3, 4, requires_grad=True), _random(4, 4, requires_grad=True)
    Fused.calls = 0
    with Alive(x, w) as alive:
        y = Fused.apply(x.sin(), w)
        (dx,), rest = backward_inputs([y.sum()], [None], [x])
        del y
        assert (Fused.calls, w.grad) == (1, None)
        assert alive.elements() == dx.numel() + w.numel()
        rest.run()
    assert Fused.calls == 1
    assert torch.equal(w.grad, x.detach().sin().t() @ torch.ones(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("trained", ["x", "w", "xw"])
def test_a_joined_operation_computes_each_gradient_in_its_part(trained):
    x, w = _random(3, 4, requires_grad="x" in trained), _random(4, 4, requires_grad="w" in trained)
    calls: Counter[str] = Counter()

    def input_gradient(dy: tuple[Tensor], w: Tensor) -> tuple[Tensor]:
        calls["x"] += 1
        return (dy[0] @ w.t(),)

    def weight_gradient(dy: tuple[Tensor], x: Tensor) -> tuple[Tensor]:
        calls["w"] += 1
        return (x.t() @ dy[0],)

    with torch.no_grad():
        y = x @ w
    (y,) = join(
        [y],
        Branch(operands=[x], gradient=input_gradient, saved=[w]),
        Branch(operands=[w], gradient=weight_gradient, saved=[x]),
    )
    dy = _random(3, 4)
    gradients, rest = backward_inputs([y], [dy], [x] if x.requires_grad else [])
    assert calls == Counter(trained.replace("w", ""))
    rest.run()
    assert calls == Counter(trained)
    if x.requires_grad:
        assert torch.equal(gradients[0], dy @ w.t())
    if w.requires_grad:
        assert torch.equal(w.grad, x.t() @ dy)


def test_join_wants_outputs_that_were_not_recorded():
    x = _random(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"output 0 of join was recorded .* torch.no_grad"):
        join([x * 2], Branch(operands=[x], gradient=lambda dy: (dy[0] * 2,)))


def test_a_joined_output_that_its_gradient_reads_is_freed():
    x = _random(3, requires_grad=True)
    with Alive(x) as alive:
        with torch.no_grad():
            y = x.exp()
        (y,) = join([y], Branch(operands=[x], gradient=lambda dy, y: (dy[0] * y,), saved=[y]))
        assert alive.elements() >= 3
        del y
        assert alive.elements() == 0


def test_a_checkpointed_block_is_recomputed_once_in_each_part():
    x, runs = _random(2, 4, requires_grad=True), Counter()
    layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).double()
    layers.register_forward_hook(lambda *_: runs.update(["forward"]))
    y = checkpoint(layers, x, use_reentrant=False)
    rest = backward_inputs([y.sum()], [None], [x])[1]
    # Recomputation stops early, before the hook: count what it computes last.
    with Calls() as calls:
        rest.run()
    assert runs["forward"] == 1
    assert calls.counter["gelu"] == 2


def test_weights_changed_in_a_checkpointed_block_are_recomputed_together():
    x = _random(2, 4, requires_grad=True)
    weights = [_random(4, 4, requires_grad=True) for _ in range(4)]

    def block(x: Tensor) -> Tensor:
        for w in weights:
            x = torch.tanh(x @ w.exp())
        return x

    rest = backward_inputs([checkpoint(block, x, use_reentrant=False).sum()], [None], [x])[1]
    with Calls() as calls:
        rest.run()
    assert calls.counter["exp"] <= 2 * len(weights)


def test_a_tensor_changed_in_place_between_the_parts_is_found():
    x, layer = _random(2, 4, requires_grad=True), nn.Linear(4, 4).double()
    hidden = x * 2
    rest = backward_inputs([layer(hidden).sum()], [None], [x])[1]
    hidden.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rest.run()


def test_module_hooks_run_once_and_see_the_same():
    seen: list[tuple[Tensor | None, ...]] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    for module in model:
        module.register_full_backward_pre_hook(lambda _, dy: seen.append(dy))
        module.register_full_backward_hook(lambda _, dx, dy: seen.append(dx + dy))
    x, dy = _random(3, 4, requires_grad=True), _random(3, 4)
    backward([model(x)], [dy], [x])
    expected, seen = seen, []
    backward_inputs([model(x)], [dy], [x])[1].run()
    assert len(seen) == len(expected) == 6
    assert all(
        torch.equal(a, b) for now, then in zip(seen, expected, strict=True) for a, b in zip(now, then, strict=True)
    )


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("weight_only", [False, True])
def test_anomaly_mode_finds_nan_in_either_part(weight_only):
    x, w = _random(3, 4, requires_grad=True), _random(4, requires_grad=True)
    dy = _random(3, 4)
    with torch.autograd.detect_anomaly():
        backward_inputs([x * w], [dy], [x])[1].run()
        assert torch.equal(w.grad, (dy * x.detach()).sum(0))
        if weight_only:
            with torch.no_grad():
                x[0] = torch.nan
            rest = backward_inputs([x * w], [dy], [x])[1]
        else:
            rest = None
            with torch.no_grad():
                w[0] = torch.nan
        with pytest.raises(RuntimeError, match="'MulBackward0' returned nan values"):
            (rest or backward_inputs([x * w], [dy], [x])[1]).run()


def _replicated() -> None:
    def train(run: Callable[[Tensor, Tensor, Tensor], None]) -> list[Tensor]:
        torch.manual_seed(0)
        model = _stack(1, 4)
        parallelize_replicate(model, DistContext.launch(MeshConfig(replicate=2), "cpu").mesh("dense")["dp_replicate"])
        sync = GradientSync([list(model.parameters())], grad_dtype=torch.float64)
        torch.manual_seed(dist.get_rank())
        for microbatch in range(2):
            x, dy = _random(1, 3, 4, requires_grad=True), _random(1, 3, 4)
            with torch.autograd.detect_anomaly(), sync.microbatch(0, last=microbatch == 1):
                run(model(x), dy, x)
        sync.finish()
        return [p.grad.full_tensor() for p in model.parameters()]

    whole = train(lambda y, dy, x: backward([y], [dy], [x]))
    split = train(lambda y, dy, x: backward_inputs([y], [dy], [x])[1].run())
    assert all(torch.equal(a, b) for a, b in zip(split, whole, strict=True))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_parameters_that_are_laid_out_are_synchronized_in_the_weight_pass_also_in_anomaly_mode():
    """Case 19."""
    run_world(2, _replicated)


@pytest.mark.gpu
def test_on_cuda_the_parts_neither_wait_nor_keep_more():
    model = _stack(4, 64).cuda()
    x, dy = _random(8, 128, 64).cuda().requires_grad_(), _random(8, 128, 64).cuda()
    gradients, kept = [], []
    for split in (True, False, True):  # the first run also sets up libraries
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = get_gradient_edge(model(x))
            if split:
                (dx,), rest = backward_inputs([y], [dy], [x])
                del y
                kept.append((torch.cuda.memory_allocated() - before) / x.nbytes)
                rest.run()
            else:
                (dx,) = backward([y], [dy], [x])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        gradients.append([dx, *[p.grad for p in model.parameters()]])
        del dx
    # 20 hidden states per block and the gradient of the input; 4 numbers per position and small change
    assert 4 * 20 - 2 <= kept[-1] <= 4 * 21
    for a, b in zip(*gradients[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_an_error_in_a_hook_comes_through_and_leaves_no_hook_behind():
    layer, x = nn.Linear(4, 4).double(), _random(3, 4, requires_grad=True)
    y = layer(x)
    handle = x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward_inputs([y], [_random(3, 4)], [x])
    handle.remove()
    handle = layer.weight.register_hook(lambda _: 1 / 0)
    rest = backward_inputs([layer(x)], [_random(3, 4)], [x])[1]
    with pytest.raises(ZeroDivisionError):
        rest.run()
    handle.remove()
    layer.zero_grad()
    backward_inputs([layer(x)], [torch.ones_like(y)], [x])[1].run()
    assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, 3.0))


def test_outputs_may_be_inputs_and_inputs_may_be_unused():
    x, unused, w = (_random(3, requires_grad=True) for _ in range(3))
    dy = _random(3)
    gradients, rest = backward_inputs([x, w, get_gradient_edge(x * w)], [dy, dy, dy], [x, unused])
    assert torch.equal(gradients[0], dy + dy * w.detach())
    assert gradients[1] is None
    rest.run()
    assert torch.equal(w.grad, dy + dy * x.detach())
    with pytest.raises(RuntimeError, match="can run once"):
        rest.run()


def test_only_one_element_can_do_without_a_gradient():
    x = _random(3, requires_grad=True)
    for root in (x * 2, get_gradient_edge(x * 2)):
        with pytest.raises(ValueError, match=r"output of shape \(3,\) has no gradient"):
            backward_inputs([root], [None], [x])
    assert torch.equal(backward_inputs([get_gradient_edge((x * 2).sum())], [None], [x])[0][0], torch.full_like(x, 2.0))
