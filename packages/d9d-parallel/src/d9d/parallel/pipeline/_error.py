"""What is wrong with a program, and where."""


class ProgramError(ValueError):
    """A program that must not run.

    Attributes:
        rank: Whose actions are wrong.
        index: Which of them, from 0; their number if one is missing.
        reason: What is wrong.
    """

    def __init__(self, rank: int, index: int, reason: str) -> None:
        super().__init__(rank, index, reason)
        self.rank, self.index, self.reason = rank, index, reason

    def __str__(self) -> str:
        return f"rank {self.rank}, index {self.index}: {self.reason}"
