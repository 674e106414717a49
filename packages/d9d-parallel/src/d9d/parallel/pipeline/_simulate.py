"""Run a program without computing: how long it takes, who waits, what stays alive."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import attrs

from ._action import COMPUTE, SENDS, TRANSFERS, Action, Op
from ._check import check
from ._costs import UNIT_COSTS, Costs
from ._error import ProgramError
from ._program import Program


class Event(NamedTuple):
    """An action and when it happens; a SEND or RECV from when its channel takes it until it has arrived."""

    action: Action
    start: float
    end: float


@attrs.frozen(kw_only=True)
class Simulation:
    """What `simulate` found out."""

    program: Program
    step_time: float
    """From the first action to the last."""
    busy: tuple[float, ...]
    """Per rank, the time in which it computes."""
    peak_live: tuple[int, ...]
    """Per rank, the most pairs of stage and microbatch whose F has run and whose B or W has not; 0 in inference."""
    timeline: tuple[tuple[Event, ...], ...]
    """Per rank, its actions in order."""

    @property
    def bubble(self) -> float:
        """The share of ranks × step time in which ranks do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.step_time) if self.step_time else 0.0


def simulate(program: Program, costs: Costs = UNIT_COSTS) -> Simulation:
    """Prove a complete program and time it.

    A rank computes one action at a time, in order. SEND and RECV are posted without waiting; a transfer starts when
    both ends are posted and its channel, the ordered pair of ranks, has delivered what came before. F, B and I wait
    for what they receive. UNSHARD, RESHARD and REDUCE take no time.

    Raises:
        ProgramError: If the program is wrong: rank, index and reason, see `check`; or if ranks wait for each other.
        ValueError: If costs are given per stage, for another number of stages.
    """
    check(program)
    run = _Run(program, costs)
    run.run()
    timeline = tuple(map(tuple, run.timeline))
    return Simulation(
        program=program,
        step_time=max((event.end for events in timeline for event in events), default=0.0),
        busy=tuple(
            sum(event.end - event.start for event in events if event.action.op in COMPUTE) for events in timeline
        ),
        peak_live=tuple(map(_peak_live, program.actions)) if program.is_training else (0,) * program.ranks,
        timeline=timeline,
    )


def _peak_live(actions: Sequence[Action]) -> int:
    live = peak = 0
    for action in actions:
        live += (action.op is Op.F) - (action.op in {Op.B, Op.W})
        peak = max(peak, live)
    return peak


class _Run:
    """Ranks advance one by one until each is done or waits; what arrives wakes who waits for it."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self._program = program
        self._costs = costs.table(program.stages)
        self._clock = [0.0] * program.ranks
        self._posted: dict[Action, tuple[float, int]] = {}
        self._channel_free: dict[tuple[int, int], float] = {}
        self._arrived: dict[Action, float] = {}
        self._waiting: dict[Action, int] = {}
        self._ready = deque(range(program.ranks))
        self.timeline: list[list[Event]] = [[] for _ in range(program.ranks)]

    def run(self) -> None:
        while self._ready:
            self._advance(self._ready.popleft())
        if self._waiting:
            self._refuse_deadlock()

    def _advance(self, rank: int) -> None:
        actions, events = self._program.actions[rank], self.timeline[rank]
        while len(events) < len(actions):
            action, start = actions[len(events)], self._clock[rank]
            if action.op in COMPUTE:
                awaited = self._program.receive_before(action)
                if awaited is not None:
                    if awaited not in self._arrived:
                        self._waiting[awaited] = rank
                        return
                    start = max(start, self._arrived[awaited])
                self._clock[rank] = start + self._costs[action.op][action.stage]
            events.append(Event(action, start, self._clock[rank]))
            if action.op in TRANSFERS:
                self._post(rank, action)

    def _post(self, rank: int, action: Action) -> None:
        self._posted[action] = (self._clock[rank], len(self.timeline[rank]) - 1)
        send, receive = (action, action.other_end) if action.op in SENDS else (action.other_end, action)
        if send not in self._posted or receive not in self._posted:
            return
        source, destination = self._program.peer(receive), self._program.peer(send)
        free = self._channel_free.get((source, destination), 0.0)
        start = max(free, self._posted[send][0], self._posted[receive][0])
        end = start + self._costs[send.op][send.stage]
        self._channel_free[source, destination] = self._arrived[receive] = end
        for place, half in ((source, send), (destination, receive)):
            self.timeline[place][self._posted[half][1]] = Event(half, start, end)
        if receive in self._waiting:
            self._ready.append(self._waiting.pop(receive))

    def _refuse_deadlock(self) -> None:
        waits = [
            f"rank {rank} at index {len(self.timeline[rank])} "
            f"({self._program.actions[rank][len(self.timeline[rank])]}) for {receive.other_end}"
            for receive, rank in sorted(self._waiting.items(), key=lambda item: item[1])
        ]
        first = min(self._waiting.values())
        raise ProgramError(first, len(self.timeline[first]), f"deadlock, each waits for the other: {'; '.join(waits)}")
