"""What a rank waits for from another one."""

from collections.abc import Sequence

import attrs

from ._forms import Forms
from ._tree import TensorSpec, TreeForm


@attrs.frozen
class OutputOf:
    """What leaves a stage of another rank; announced for the first microbatch of its kind."""

    _forms: Forms
    _stage: int
    _kind: str

    def specs(self) -> Sequence[TensorSpec] | None:
        """All tensors of it."""
        form = self._forms.get(self._stage, self._kind)
        return None if form is None else form.tensors

    def learn(self, form: TreeForm) -> None:
        """Keep what was announced."""
        self._forms.learn(self._stage, self._kind, form)


@attrs.frozen
class GradientOf:
    """The gradient of what left a stage of this rank; known once that was made."""

    _forms: Forms
    _stage: int
    _kind: str

    def specs(self) -> Sequence[TensorSpec] | None:
        """Those of the tensors that bring gradients back."""
        form = self._forms.get(self._stage, self._kind)
        return None if form is None else form.carriers

    def learn(self, form: TreeForm) -> None:
        """Nobody announces it."""
        raise AssertionError(f"a gradient of stage {self._stage} is awaited before its forward; it is {form}")
