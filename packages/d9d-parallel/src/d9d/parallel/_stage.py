"""Which part of a model a rank holds."""

import attrs


@attrs.frozen
class StageInfo:
    """One of the consecutive parts into which a pipeline cuts a model."""

    index: int = 0
    """Place in the pipeline, from 0."""

    count: int = 1
    """Number of stages."""

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"stage index {self.index} is not one of {self.count} stages")

    @property
    def is_first(self) -> bool:
        """Whether the stage takes the model's inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage gives the model's output."""
        return self.index == self.count - 1
