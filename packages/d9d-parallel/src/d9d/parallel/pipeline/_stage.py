"""What the executor asks of a stage, and of what lays out its parameters; by structure."""

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

In_contra = TypeVar("In_contra", contravariant=True)
Shared_contra = TypeVar("Shared_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class Stage(Protocol[In_contra, Shared_contra, Out_co]):
    """A module that is one of the consecutive parts of a model.

    Trees are those of `torch.utils._pytree`: tensors, and constants between them, in tuples, lists, dicts and
    registered dataclasses.
    """

    def forward(self, inputs: In_contra, shared: Shared_contra, /) -> Out_co:
        """Compute one microbatch.

        Args:
            inputs: What the model is given, on stage 0; what the stage before returned, on the others.
            shared: What the microbatch has for every stage, such as positions, masks and labels.

        Returns:
            What the next stage gets, or what the model returns. Every floating tensor of it brings a gradient back,
            one that nothing used zeros; other tensors do not. For microbatches whose inputs and shared have equal
            shapes, dtypes and constants it is to look the same: the first of a kind tells the next rank what to expect.
        """


class StageRuntime(Protocol):
    """Whatever holds a stage's parameters sharded, and sums its gradients: `GradientSync`, ``fully_shard``."""

    @property
    def is_sharded(self) -> bool:
        """Whether there is anything to gather."""

    def unshard(self) -> None:
        """Gather the parameters, before their first use in a step."""

    def reshard(self) -> None:
        """Free what was gathered, after its last use."""

    def weight_gradients(self, *, last: bool) -> AbstractContextManager[None]:
        """Collect the gradients of one microbatch; entered around each backward that makes weight gradients.

        Args:
            last: Whether it is the stage's last one in this step.
        """

    def reduce_gradients(self) -> None:
        """Gradients are complete: sum them over the replicas."""

    def abandon(self) -> None:
        """The step failed: free what it gathered, forget what it collected."""
