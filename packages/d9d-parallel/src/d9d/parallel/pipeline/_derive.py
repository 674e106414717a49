"""From a program of computations to a complete one: transfers, gathers and reductions follow from it."""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import attrs

from ._action import COMPUTE, Action, Op
from ._program import Program


def derive(program: Program, *, sharded: Collection[int] = (), max_unsharded: int | None = None) -> Program:
    """Complete a program of F, B, I and W with all that follows from it.

    Transfers between stages of different ranks: a SEND directly after what makes its content, a RECV one computation
    ahead of the one that reads it, so that it is posted while that one computes. All transfers from one rank to
    another go through one channel, first in first out; where that forces it, a RECV comes earlier still. Stages of one
    rank hand over without transfers.

    A sharded stage is gathered once per step: UNSHARD one computation ahead of its first use, RESHARD after its last.
    In training each stage has a REDUCE directly after the last computation that adds to its weights' gradients.

    Args:
        program: Computations only.
        sharded: Stages whose parameters are gathered for their use.
        max_unsharded: How many of a rank's stages may be gathered at a time. When one more is needed, that which is
            needed last is resharded, and gathered again later. With 1 nothing is gathered ahead.

    Raises:
        ValueError: If the program is complete already, a sharded stage does not exist, or ``max_unsharded`` is below 1.
    """
    extra = next((action for actions in program.actions for action in actions if action.op not in COMPUTE), None)
    if extra is not None:
        raise ValueError(f"derive takes a program of F, B, I and W; this one has {extra} already")
    strays = sorted(set(sharded) - set(range(program.stages)))
    if strays:
        raise ValueError(f"sharded={sorted(sharded)!r}: the program has no stages {strays!r}, only {program.stages!r}")
    if max_unsharded is not None and max_unsharded < 1:
        raise ValueError(f"max_unsharded={max_unsharded!r}: a computation needs its stage; give 1 or more, or None")
    rows = [[_Slot(action) for action in actions] for actions in program.actions]
    _add_transfers(program, rows)
    for row in rows:
        _add_reductions(row)
        _add_gathers(row, sharded, max_unsharded)
    return attrs.evolve(program, actions=tuple(tuple(_flat(row)) for row in rows))


@attrs.define
class _Slot:
    """A computation, and what is to come before and after it."""

    action: Action
    before: list[Action] = attrs.field(factory=list)
    after: list[Action] = attrs.field(factory=list)


def _flat(row: Iterable[_Slot]) -> Iterable[Action]:
    for slot in row:
        yield from slot.before
        yield slot.action
        yield from slot.after


def _add_transfers(program: Program, rows: Sequence[Sequence[_Slot]]) -> None:
    readers: dict[Action, int] = {}
    channels: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for index, slot in enumerate(row):
            if (receive := program.receive_before(slot.action)) is not None:
                readers.setdefault(receive, index)
            if (send := program.send_after(slot.action)) is not None:
                slot.after.append(send)
                channels[rank, program.peer(send)].append(send.other_end)
    for (_, rank), receives in channels.items():
        # What nobody reads is not received: the simulator says which computation is missing.
        read = [(receive, readers[receive]) for receive in receives if receive in readers]
        earliest = len(rows[rank])
        for receive, reader in reversed(read):
            earliest = min(earliest, reader)
            rows[rank][max(earliest - 1, 0)].before.insert(0, receive)


def _add_reductions(row: Sequence[_Slot]) -> None:
    last = {slot.action.stage: slot for slot in row if slot.action.op in {Op.B, Op.W}}
    for stage, slot in last.items():
        slot.after.append(Action(Op.REDUCE, stage))


def _add_gathers(row: Sequence[_Slot], sharded: Collection[int], limit: int | None) -> None:
    uses: dict[int, deque[int]] = {stage: deque() for stage in sharded}
    for index, slot in enumerate(row):
        if slot.action.stage in uses:
            uses[slot.action.stage].append(index)
    gathered: set[int] = set()

    def gather(stage: int, slot: _Slot) -> None:
        if stage not in uses or stage in gathered:
            return
        if len(gathered) == limit:
            victim = max(gathered - {slot.action.stage}, key=lambda other: uses[other][0])
            gathered.remove(victim)
            slot.before.append(Action(Op.RESHARD, victim))
        gathered.add(stage)
        slot.before.append(Action(Op.UNSHARD, stage))

    ahead = [following.action.stage for _, following in pairwise(row)] if limit != 1 else []
    for index, slot in enumerate(row):
        stage = slot.action.stage
        gather(stage, slot)
        if index < len(ahead):
            gather(ahead[index], slot)
        if stage in uses:
            uses[stage].popleft()
            if not uses[stage]:
                gathered.remove(stage)
                slot.after.append(Action(Op.RESHARD, stage))
