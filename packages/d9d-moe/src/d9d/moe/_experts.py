"""The experts' feed-forward layers, side by side.

Shapes: N rows (routed tokens sorted by expert), E experts held here, H hidden size, I intermediate size.
"""

import math

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._grouped_mm import GroupedMM, GroupedMMConfig, GroupedMMNeed, grouped_mm_backends


class GroupedSwiGLU(nn.Module):
    """One SwiGLU per expert, with the routing probability multiplied in before the down projection.

    ``gate_up_proj`` is (E, 2·I, H), gate above up; ``down_proj`` is (E, H, I). A backend that was asked for is looked
    up when the layer is built; the automatic choice follows the device and dtype of the input.

    Args:
        num_experts: Experts.
        hidden_size: Size of a token.
        intermediate_size: Size between.
        backend: Grouped product or its kind; None leaves it to D9D_GROUPED_MM_BACKEND, else to the automatic choice.

    Raises:
        ValueError: The backend asked for is unknown or cannot do what the layer needs.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        backend: GroupedMMConfig | str | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.backend = backend
        self._need = GroupedMMNeed(sizes=(hidden_size, intermediate_size))
        grouped_mm_backends.choose(backend, self._need)
        self._backends: dict[tuple[str, torch.dtype], GroupedMM] = {}
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each expert's weights as nn.Linear does."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(weight.shape[-1])
            weight.uniform_(-bound, bound)

    def forward(self, x_NH: Tensor, probs_N: Tensor, counts_E: Tensor) -> Tensor:
        """Transform each row by its expert and multiply by its probability: (N, H) in the dtype of x.

        Args:
            x_NH: Rows sorted by expert.
            probs_N: Weight of each row, fp32 or wider.
            counts_E: int32, rows of each expert, on the device; sums to N.
        """
        grouped_mm = self._grouped_mm(x_NH.device.type, x_NH.dtype)
        gate_NI, up_NI = grouped_mm(x_NH, self.gate_up_proj, counts_E).chunk(2, dim=-1)
        hidden_NI = (F.silu(gate_NI) * up_NI * probs_N[:, None]).to(x_NH.dtype)
        return grouped_mm(hidden_NI, self.down_proj, counts_E)

    def _grouped_mm(self, device_type: str, dtype: torch.dtype) -> GroupedMM:
        """Choose once per device type and dtype."""
        if (device_type, dtype) not in self._backends:
            need = attrs.evolve(self._need, device_type=device_type, dtype=dtype)
            self._backends[device_type, dtype] = grouped_mm_backends.choose(self.backend, need).config.build()
        return self._backends[device_type, dtype]

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}, backend={self.backend!r}"
