"""One microbatch in one stage, from its forward to its last gradient."""

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ._backward import WeightBackward, backward, backward_inputs


class Visit:
    """What is alive of a microbatch in a stage between its F and its B or W: the graph, and not the outputs.

    Args:
        inputs: Tensors that the forward read and that carry gradients: leaves of the graph.
        outputs: What it made, in the order in which gradients will be given; held as places in the graph only, so that
            their memory is free once they have left.
    """

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._inputs = inputs
        self._roots = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        self._weights: WeightBackward | None = None

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Whole backward.

        Args:
            gradients: Of the outputs; ``None`` where nothing depends on one.

        Returns:
            The gradients of the inputs; ``None`` where no output depends on one.
        """
        roots, given, inputs = self._let_go(gradients)
        return backward(roots, given, inputs) if roots else [None] * len(inputs)

    def backward_inputs(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """As `backward`, without the gradients of weights, which `backward_weights` makes later."""
        roots, given, inputs = self._let_go(gradients)
        if not roots:
            return [None] * len(inputs)
        found, self._weights = backward_inputs(roots, given, inputs)
        return found

    def backward_weights(self) -> None:
        """What `backward_inputs` left to do."""
        if self._weights is not None:
            self._weights.run()

    def _let_go(self, gradients: Sequence[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor], Sequence[Tensor]]:
        """Where backward begins and ends; the graph is not needed here again."""
        reached = [(root, gradient) for root, gradient in zip(self._roots, gradients) if root and gradient is not None]
        inputs, self._inputs, self._roots = self._inputs, (), []
        return [root for root, _ in reached], [gradient for _, gradient in reached], inputs
