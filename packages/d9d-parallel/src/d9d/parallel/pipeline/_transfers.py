"""What travels between stages, for batches of any shapes."""

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import nn
from torch.distributed import ProcessGroup

from d9d.mesh import all_gather_objects

from ._agreement import Signature
from ._stage import Stage
from ._tree import TreeForm


class Transfers:
    """Knows for each signature of a microbatch what each stage but the last gives to the next.

    Args:
        stages: Those of this rank.
        count: Stages of the whole pipeline.
        group: The pipeline's ranks.
    """

    def __init__(self, stages: Mapping[int, nn.Module], count: int, group: ProcessGroup) -> None:
        self._stages = {stage: module for stage, module in stages.items() if stage < count - 1}
        self._count = count
        self._group = group
        self._known: dict[str, Mapping[int, TreeForm]] = {}

    def of(
        self, signatures: Sequence[Signature], inputs: Sequence[Any], shared: Sequence[Any]
    ) -> list[Mapping[int, TreeForm]]:
        """For each microbatch, what leaves each stage; collective where a signature is new.

        Args:
            signatures: Of the microbatches, agreed on by all ranks.
            inputs: Of the microbatches.
            shared: Of the microbatches.

        Raises:
            RuntimeError: On every rank, if a ``transfer_spec`` raised, with its traceback, or gave something other than
                tensors and constants.
        """
        keys = [signature.key for signature in signatures]
        new = {key: m for m, key in reversed(list(enumerate(keys))) if key not in self._known}
        if new and self._count > 1:
            asked = {key: self._ask(inputs[m], shared[m]) for key, m in sorted(new.items())}
            answers = all_gather_objects(asked, self._group)
            for rank, answer in enumerate(answers):
                for key, found in answer.items():
                    if found.fault:
                        raise RuntimeError(f"on rank {rank} of the pipeline, microbatch {new[key]}: {found.fault}")
            for key in new:
                self._known[key] = {stage: form for answer in answers for stage, form in answer[key].forms.items()}
        return [self._known.get(key, {}) for key in keys]

    def _ask(self, inputs: Any, shared: Any) -> "_Answer":
        forms: dict[int, TreeForm] = {}
        for stage, module in self._stages.items():
            assert isinstance(module, Stage)
            try:
                forms[stage] = TreeForm.of(module.transfer_spec(inputs, shared))
            except Exception:  # noqa: BLE001 - any code of the user's
                return _Answer(fault=f"transfer_spec of stage {stage} failed:\n{traceback.format_exc()}")
            if opaque := forms[stage].opaque:
                return _Answer(
                    fault=f"transfer_spec of stage {stage} has a leaf that cannot travel: {opaque}; make it a tensor, "
                    "a constant, or a tree (torch.utils._pytree.register_dataclass)"
                )
        return _Answer(forms)


@attrs.frozen
class _Answer:
    """What leaves each stage of a rank, or what is wrong: the other ranks wait to hear of it."""

    forms: Mapping[int, TreeForm] = attrs.field(factory=dict)
    fault: str | None = None
