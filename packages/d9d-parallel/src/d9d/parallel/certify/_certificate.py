"""The outcome of `certify`."""

import attrs
import torch

from ._layout_result import LayoutResult
from ._report import describe_failures, describe_mesh, describe_refusals, markdown_table, parameter_table, text_table


class CertificateError(AssertionError):
    """A layout does not do what one process does, or was refused.

    Attributes:
        certificate: All that was found.
    """

    def __init__(self, message: str, certificate: "Certificate") -> None:
        super().__init__(message)
        self.certificate = certificate


@attrs.frozen(kw_only=True)
class Certificate:
    """What was found under each mesh; printed, a report."""

    dtype: torch.dtype
    """In which everything was computed."""

    rtol: float
    """Largest relative error that passes."""

    layouts: tuple[LayoutResult, ...]
    """One for each mesh."""

    notes: tuple[str, ...] = ()
    """What the batch or the model leaves untested, and what is odd about them."""

    def __str__(self) -> str:
        counts = ", ".join(f"{self._count(verdict)} {verdict}" for verdict in ("passed", "failed", "refused"))
        dtype = str(self.dtype).removeprefix("torch.")
        parts = [
            f"Against one process in {dtype}, errors up to {self.rtol:.0e} pass: {counts}.",
            text_table(self.layouts),
            self._problems(),
            "\n".join(f"Note: {note}" for note in self.notes),
        ]
        return "\n\n".join(part for part in parts if part)

    def check(self, *, allow_refused: bool = False) -> None:
        """Raise unless every layout passed.

        Args:
            allow_refused: Whether meshes that ``parallelize`` refuses are as good as those that passed.

        Raises:
            CertificateError: It names, for each mesh that failed, what went wrong first and where it is worst.
        """
        if self._count("failed") or (self._count("refused") and not allow_refused):
            notes = "\n".join(f"Note: {note}" for note in self.notes)
            raise CertificateError("\n".join(filter(None, [self._problems(), notes])), self)

    def markdown(self) -> str:
        """A table of what was run and how it ended, the same for every run with the same outcome."""
        return markdown_table(self.layouts)

    def parameters(self) -> str:
        """A table for each layout that ran: ratios and errors of every parameter."""
        ran = (layout for layout in self.layouts if layout.refusal is None)
        return "\n\n".join(f"{describe_mesh(layout.mesh)}\n{parameter_table(layout)}" for layout in ran)

    def _count(self, verdict: str) -> int:
        return sum(layout.verdict == verdict for layout in self.layouts)

    def _problems(self) -> str:
        failed = [describe_failures(layout) for layout in self.layouts if layout.verdict == "failed"]
        return "\n".join(filter(None, [*failed, describe_refusals(self.layouts)]))
