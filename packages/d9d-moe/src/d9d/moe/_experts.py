"""The experts' feed-forward layers, side by side.

Shapes: N rows (routed tokens sorted by expert), E experts held here, H hidden size, I intermediate size, M outer size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ._activation import GatedActivation, SwiGLUActivation
from ._autocast import cast_by_autocast
from ._grouped_mm import GroupedMM, GroupedMMConfig, GroupedMMNeed
from ._product_choice import ProductChoice

_SWIGLU = SwiGLUActivation()
# Columns of the product that adds biases, of which one is used: kernels take rows of 16 bytes.
_BIAS_COLUMNS = 8


class GroupedSwiGLU(nn.Module):
    """One SwiGLU, or other gated linear unit, per expert.

    The routing probability is multiplied in before the down projection, and into its bias. Parameters, the expert in
    front: ``gate_up_proj`` (E, 2·I, H), gate above up unless the activation says otherwise, or with ``fused=False``
    ``gate_proj`` and ``up_proj`` (E, I, H); ``down_proj`` (E, H, I); with ``bias=True`` ``gate_up_bias`` (E, 2·I), or
    ``gate_bias`` and ``up_bias`` (E, I), and ``down_bias`` (E, H).

    A backend that was asked for is looked up when the layer is built; the automatic choice follows the device and dtype
    of the input.

    Args:
        num_experts: Experts.
        hidden_size: Size of a token.
        intermediate_size: Size between.
        activation: What happens between the projections.
        bias: Whether projections have biases.
        fused: Whether gate and up are one parameter, and one product: faster.
        backend: Grouped product or its kind; None leaves it to D9D_GROUPED_MM_BACKEND, else to the automatic choice.

    Raises:
        ValueError: The backend asked for is unknown or cannot do what the layer needs.
    """

    gate_up_proj: nn.Parameter
    gate_proj: nn.Parameter
    up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_bias: nn.Parameter | None
    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: GatedActivation = _SWIGLU,
        bias: bool = False,
        fused: bool = True,
        backend: GroupedMMConfig | str | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.has_bias = bias
        self.fused = fused
        self.backend = backend
        self._choice = ProductChoice(backend, GroupedMMNeed(sizes=(hidden_size, intermediate_size)))
        inner = {"gate_up": 2 * intermediate_size} if fused else dict.fromkeys(("gate", "up"), intermediate_size)
        for name, size in inner.items():
            self._add(name, size, hidden_size)
        self._add("down", hidden_size, intermediate_size)
        self.reset_parameters()

    def _add(self, name: str, outer: int, inner: int) -> None:
        self.register_parameter(f"{name}_proj", nn.Parameter(torch.empty(self.num_experts, outer, inner)))
        bias = nn.Parameter(torch.empty(self.num_experts, outer)) if self.has_bias else None
        self.register_parameter(f"{name}_bias", bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each expert's weights and biases as nn.Linear does."""
        for name, parameter in self.named_parameters():
            inner = self.intermediate_size if name.startswith("down") else self.hidden_size
            bound = 1 / math.sqrt(inner)
            parameter.uniform_(-bound, bound)

    def forward(self, x_NH: Tensor, probs_N: Tensor, counts_E: Tensor) -> Tensor:
        """Transform each row by its expert and multiply by its probability: (N, H) in the dtype of x.

        Args:
            x_NH: Rows sorted by expert.
            probs_N: Weight of each row, fp32 or wider.
            counts_E: int32, rows of each expert, on the device; sums to N.

        Raises:
            ValueError: The parameters hold another number of experts.
        """
        if counts_E.shape[0] != (held := self.down_proj.shape[0]):
            raise ValueError(
                f"rows come for {counts_E.shape[0]!r} experts and the parameters hold {held!r}; after set_expert_group "
                "the parameters must be this rank's block"
            )
        x_NH = cast_by_autocast(x_NH)
        grouped_mm = self._choice.product(x_NH)

        def project(x_NK: Tensor, weight_EMK: Tensor, bias_EM: Tensor | None = None) -> Tensor:
            y_NM = grouped_mm(x_NK, cast_by_autocast(weight_EMK), counts_E)
            return y_NM if bias_EM is None else y_NM + _rows_of(grouped_mm, bias_EM, counts_E, len(y_NM))

        if self.fused:
            hidden_NI = self.activation(project(x_NH, self.gate_up_proj, self.gate_up_bias), probs_N)
        else:
            gate_NI = project(x_NH, self.gate_proj, self.gate_bias)
            up_NI = project(x_NH, self.up_proj, self.up_bias)
            hidden_NI = self.activation.pair(gate_NI, up_NI, probs_N)
        y_NH = project(hidden_NI, self.down_proj)
        if self.down_bias is None:
            return y_NH
        return (y_NH + _weighed(grouped_mm, self.down_bias, counts_E, probs_N)).to(y_NH.dtype)

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return (
            f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}, activation={self.activation!r}, "
            f"bias={self.has_bias}, fused={self.fused}, backend={self.backend!r}"
        )


def _rows_of(grouped_mm: GroupedMM, bias_EM: Tensor, counts_E: Tensor, rows: int) -> Tensor:
    """Give each row the bias of its expert, exactly: (N, M).

    By a grouped product, of rows that are ones and weights that are the bias: its gradient is the sum over the rows of
    each expert, in a fixed order, and the host need not know how many there are.
    """
    bias_EM = cast_by_autocast(bias_EM)
    pad = (0, _BIAS_COLUMNS - 1)
    return grouped_mm(F.pad(bias_EM.new_ones(rows, 1), pad), F.pad(bias_EM[..., None], pad), counts_E)


def _weighed(grouped_mm: GroupedMM, bias_EM: Tensor, counts_E: Tensor, probs_N: Tensor) -> Tensor:
    """Give each row the bias of its expert times its probability, in the dtype of the latter: (N, M)."""

    def weigh(bias_EM: Tensor, probs_N: Tensor) -> Tensor:
        return _rows_of(grouped_mm, bias_EM, counts_E, len(probs_N)) * probs_N[:, None]

    if torch.compiler.is_compiling():  # which chooses by itself what to keep
        return weigh(bias_EM, probs_N)
    # The gradient of probabilities reads all rows: better made again than kept.
    weighed_NM: Tensor = checkpoint(weigh, bias_EM, probs_N, use_reentrant=False, preserve_rng_state=False)
    return weighed_NM
