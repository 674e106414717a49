"""What leaves each stage, for each kind of microbatch: as the first of the kind showed."""

from ._tree import TreeForm


class Forms:
    """Filled by both ends of a transfer: by the one that made the first of a kind, and by the one that heard of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], TreeForm] = {}

    def get(self, stage: int, kind: str) -> TreeForm | None:
        """What leaves a stage; ``None`` where that is not known yet.

        Args:
            stage: Over the whole model.
            kind: The same for microbatches whose inputs and shared look the same.
        """
        return self._known.get((stage, kind))

    def learn(self, stage: int, kind: str, form: TreeForm) -> None:
        """Keep what left a stage.

        Raises:
            TypeError: It holds something that cannot travel.
            ValueError: Another form left it for an earlier microbatch of this kind, and that is what others await.
        """
        if opaque := form.opaque:
            raise TypeError(
                f"stage {stage} returned what cannot travel: {opaque}; make it a tensor, a constant, or a tree "
                "(torch.utils._pytree.register_dataclass)"
            )
        known = self._known.setdefault((stage, kind), form)
        if difference := form.difference(known):
            raise ValueError(
                f"stage {stage} returned something else than for an earlier microbatch whose inputs and shared look "
                f"the same: {difference}; shapes, dtypes and structure are to follow from theirs"
            )
