"""One rank's run of a program."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, assert_never

import attrs
import torch
from torch import Tensor

from ._action import Action, Op
from ._awaited import GradientOf, OutputOf
from ._channels import Channels
from ._forms import Forms
from ._handover import Arrival, Handed
from ._plan import Plan
from ._stage import StageRuntime
from ._tree import TreeForm, tensors_in
from ._visit import Visit

Place: TypeAlias = tuple[int, int]
"""Stage and microbatch."""


@attrs.frozen(kw_only=True)
class Batch:
    """What a step works on; one entry a microbatch."""

    inputs: Sequence[Any]
    """Of the model."""
    shared: Sequence[Any]
    """For every stage."""
    kinds: Sequence[str]
    """Equal for microbatches that look the same."""


class Step:
    """Runs a plan once.

    Args:
        plan: What to do.
        stages: How to run each stage of this rank.
        runtimes: Of the stages that have one.
        channels: To the other ranks.
        forms: What leaves the stages, as far as it is known.
        batch: What to work on.
        conclude: Called with the model's output and the number of its microbatch, where that is; gives where backward
            begins, if it does.
        timed: Entered around computations.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        stages: Mapping[int, Callable[[Any, Any], Any]],
        runtimes: Mapping[int, StageRuntime],
        channels: Channels,
        forms: Forms,
        batch: Batch,
        conclude: Callable[[Any, int], Tensor | None],
        timed: Callable[[Action], AbstractContextManager[None]],
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._runtimes = runtimes
        self._channels = channels
        self._forms = forms
        self._batch = batch
        self._conclude = conclude
        self._timed = timed
        self._visits: dict[Place, Visit] = {}
        self._inputs: dict[Place, Arrival[Tensor]] = {}
        self._gradients: dict[Place, Arrival[Tensor | None]] = {}
        self._leaving_outputs: dict[Place, Sequence[Tensor]] = {}
        self._unannounced: dict[Place, TreeForm] = {}
        self._leaving_gradients: dict[Place, Sequence[Tensor]] = {}
        self.peak_live = 0
        """The most visits that were alive at a time."""

    def run(self) -> None:
        """Do all that the plan says.

        Raises:
            Exception: What an action raised, with a note that says which.
        """
        try:
            for index, action in enumerate(self._plan.actions):
                try:
                    self._perform(action)
                except Exception as error:
                    error.add_note(f"in {_in_words(action)}, action {index} of rank {self._plan.rank} of the pipeline")
                    raise
            self._channels.finish()
        except BaseException:
            # An interrupt too: what stays gathered or half collected would spoil the next step.
            self._channels.abandon()
            for runtime in self._runtimes.values():
                runtime.abandon()
            raise

    def _perform(self, action: Action) -> None:  # noqa: C901, PLR0912 - one case an op
        stage = action.stage
        microbatch = action.microbatch or 0  # UNSHARD, RESHARD and REDUCE have none
        place = stage, microbatch
        match action.op:
            case Op.F:
                self._forward(action, stage, microbatch)
            case Op.B:
                given = self._gradients.pop(place).take()
                with self._timed(action), self._weight_gradients(action):
                    gradients = self._visits.pop(place).backward(given)
                self._hand_back(stage, microbatch, gradients)
            case Op.I:
                given = self._gradients.pop(place).take()
                with self._timed(action):
                    gradients = self._visits[place].backward_inputs(given)
                self._hand_back(stage, microbatch, gradients)
            case Op.W:
                with self._timed(action), self._weight_gradients(action):
                    self._visits.pop(place).backward_weights()
            case Op.SEND_F:
                if form := self._unannounced.pop(place, None):
                    self._channels.announce(form, to=self._plan.peer(action))
                self._channels.send(self._leaving_outputs.pop(place), to=self._plan.peer(action))
            case Op.RECV_F:
                output = OutputOf(self._forms, stage - 1, self._batch.kinds[microbatch])
                self._inputs[place] = self._channels.receive(output, source=self._plan.peer(action))
            case Op.SEND_B:
                self._channels.send(self._leaving_gradients.pop(place), to=self._plan.peer(action))
            case Op.RECV_B:
                gradient = GradientOf(self._forms, stage, self._batch.kinds[microbatch])
                self._gradients[place] = self._channels.receive(gradient, source=self._plan.peer(action))
            case Op.UNSHARD:
                self._runtimes[stage].unshard()
            case Op.RESHARD:
                self._runtimes[stage].reshard()
            case Op.REDUCE:
                if stage in self._runtimes:
                    self._runtimes[stage].reduce_gradients()
            case _:
                assert_never(action.op)

    def _forward(self, action: Action, stage: int, microbatch: int) -> None:
        training = self._plan.is_training
        tree, carriers = self._read(stage, microbatch)
        with torch.set_grad_enabled(training), self._timed(action):
            output = self._stages[stage](tree, self._batch.shared[microbatch])
            if stage == self._plan.last_stage:
                outputs = self._end(microbatch, output)
            else:
                outputs = self._hand_on(stage, microbatch, output)
        if training:
            self._visits[stage, microbatch] = Visit(carriers, outputs)
            self.peak_live = max(self.peak_live, len(self._visits))

    def _read(self, stage: int, microbatch: int) -> tuple[Any, Sequence[Tensor]]:
        """What a stage is given, and the tensors of it that bring gradients back."""
        if stage == 0:
            return self._batch.inputs[microbatch], []
        tensors = self._inputs.pop((stage, microbatch)).take()
        form = self._form_before(stage, microbatch)
        carriers = form.carriers_of(tensors) if self._plan.is_training else []
        for tensor in carriers:
            tensor.requires_grad_()
        return form.build(tensors), carriers

    def _end(self, microbatch: int, output: Any) -> Sequence[Tensor]:
        """The model's output is there; returns where backward begins."""
        root = self._conclude(output, microbatch)
        if root is None:
            return []
        self._gradients[self._plan.last_stage, microbatch] = Handed([torch.ones_like(root)])
        return [root]

    def _hand_on(self, stage: int, microbatch: int, output: Any) -> Sequence[Tensor]:
        """Have the next stage get an output; returns the tensors of it that get gradients."""
        form, kind = TreeForm.of(output), self._batch.kinds[microbatch]
        is_new = self._forms.get(stage, kind) is None
        self._forms.learn(stage, kind, form)
        tensors = tensors_in(output)
        if self._plan.is_here(stage + 1):
            self._inputs[stage + 1, microbatch] = Handed([tensor.detach() for tensor in tensors])
        else:
            self._leaving_outputs[stage, microbatch] = tensors
            if is_new:
                self._unannounced[stage, microbatch] = form
        return form.carriers_of(tensors)

    def _hand_back(self, stage: int, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Have the stage before get the gradients of its output."""
        if stage == 0:
            return
        if self._plan.is_here(stage - 1):
            self._gradients[stage - 1, microbatch] = Handed(gradients)
        else:
            specs = self._form_before(stage, microbatch).carriers
            self._leaving_gradients[stage, microbatch] = [
                self._channels.zeros(spec) if gradient is None else gradient for gradient, spec in zip(gradients, specs)
            ]

    def _form_before(self, stage: int, microbatch: int) -> TreeForm:
        form = self._forms.get(stage - 1, self._batch.kinds[microbatch])
        assert form is not None, "it has arrived"
        return form

    def _weight_gradients(self, action: Action) -> AbstractContextManager[None]:
        if action.stage not in self._runtimes:
            return nullcontext()
        return self._runtimes[action.stage].weight_gradients(last=action in self._plan.last_weight_gradients)


def _in_words(action: Action) -> str:
    where = f"{action.op.name} of stage {action.stage}"
    return where if action.microbatch is None else f"{where}, microbatch {action.microbatch}"
