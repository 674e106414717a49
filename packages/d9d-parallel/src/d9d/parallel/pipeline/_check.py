"""What must hold in a complete program, whatever its actions cost."""

from collections import defaultdict
from collections.abc import Iterator

from ._action import COMPUTE, GATHERS, RECEIVES, SENDS, TRANSFERS, Action, Op
from ._error import ProgramError
from ._program import Program


def check(program: Program) -> None:
    """Prove all about a complete program but that it does not deadlock, for which it must be run (`simulate`).

    Each rank computes for its own stages; every F once, and every B or I and W once, each after what it needs; each
    transfer is posted on both sides, once, after its content is made or before it is read; channels deliver in the
    order in which the receiver asks; stages that are sharded are gathered when used, and freed at last; each stage's
    gradients are reduced once, when complete.

    Raises:
        ProgramError: Names rank, index and reason of the first violation.
    """
    training = program.is_training
    for rank in range(program.ranks):
        _RankCheck(program, rank, training=training).run()
    _check_channels(program)


class _RankCheck:
    """One rank's actions, in order."""

    def __init__(self, program: Program, rank: int, *, training: bool) -> None:
        self._program, self._rank, self._training = program, rank, training
        self._actions = program.actions[rank]
        self._sharded = {action.stage for action in self._actions if action.op in GATHERS}
        self._gathered: set[int] = set()
        self._done: set[Action] = set()

    def run(self) -> None:
        for index, action in enumerate(self._actions):
            for reason in self._objections(action):
                raise ProgramError(self._rank, index, reason)
            self._done.add(action)
            if action.op is Op.UNSHARD:
                self._gathered.add(action.stage)
            elif action.op is Op.RESHARD:
                self._gathered.remove(action.stage)
        for reason in self._missing():
            raise ProgramError(self._rank, len(self._actions), reason)

    def _objections(self, action: Action) -> Iterator[str]:
        """All that speaks against an action at this point, the plainest first."""
        program = self._program
        if action.stage not in range(program.stages):
            yield f"{action}: there is no stage {action.stage!r}, the program has {program.stages!r}"
            return
        if (holder := program.rank_of_stage[action.stage]) != self._rank:
            yield f"{action} belongs on rank {holder!r}, which holds stage {action.stage!r}"
        if action.microbatch is not None and action.microbatch not in range(program.microbatches):
            yield f"{action}: there is no microbatch {action.microbatch!r}, the program has {program.microbatches!r}"
        if action in self._done and action.op not in GATHERS:
            yield f"{action} runs twice"
        if action.op in COMPUTE:
            yield from self._compute_objections(action)
        elif action.op in TRANSFERS:
            yield from self._transfer_objections(action)
        else:
            yield from self._stage_objections(action)

    def _compute_objections(self, action: Action) -> Iterator[str]:
        stage, m = action.stage, action.microbatch
        for op in {Op.F: (), Op.B: (Op.F,), Op.I: (Op.F,), Op.W: (Op.I,)}[action.op]:
            yield from self._not_yet(action, Action(op, stage, m))
        for op in {Op.B: (Op.I, Op.W), Op.I: (Op.B,), Op.W: (Op.B,)}.get(action.op, ()):
            if (other := Action(op, stage, m)) in self._done:
                yield f"{action} would add gradients that {other} added already"
        if (needed := self._program.receive_before(action) or self._producer(action)) is not None:
            yield from self._not_yet(action, needed)
        yield from self._not_gathered(action)

    def _producer(self, action: Action) -> Action | None:
        """The computation on this rank whose result ``action`` reads."""
        m, last = action.microbatch, self._program.stages - 1
        match action.op:
            case Op.F if action.stage > 0:
                return Action(Op.F, action.stage - 1, m)
            case Op.B | Op.I if action.stage < last:
                return self._backward(action.stage + 1, m)
            case _:
                return None

    def _backward(self, stage: int, m: int | None) -> Action:
        split = Action(Op.I, stage, m)
        return split if split in self._done else Action(Op.B, stage, m)

    def _transfer_objections(self, action: Action) -> Iterator[str]:
        if not self._program.crosses_ranks(action):
            yield f"{action} has no other end on another rank"
        if action.op is Op.SEND_F:
            yield from self._not_yet(action, Action(Op.F, action.stage, action.microbatch))
        elif action.op is Op.SEND_B:
            yield from self._not_yet(action, self._backward(action.stage, action.microbatch))

    def _stage_objections(self, action: Action) -> Iterator[str]:
        match action.op:
            case Op.UNSHARD if action.stage in self._gathered:
                yield f"{action}: stage {action.stage!r} is unsharded already"
            case Op.RESHARD if action.stage not in self._gathered:
                yield f"{action}: stage {action.stage!r} is not unsharded"
            case Op.REDUCE:
                if not self._training:
                    yield f"{action}: there is nothing to reduce, as the program has no backward"
                for late in self._ungraded(action.stage):
                    if late in self._actions:  # else it is missing, which is said at the end
                        yield f"{action} comes before {late}: it would reduce incomplete gradients"
                yield from self._not_gathered(action)

    def _ungraded(self, stage: int) -> Iterator[Action]:
        """The computations of a stage that still have to add to its weights' gradients."""
        for m in range(self._program.microbatches):
            whole, weights = Action(Op.B, stage, m), Action(Op.W, stage, m)
            if whole not in self._done and weights not in self._done:
                yield weights if Action(Op.I, stage, m) in self._done else whole

    def _not_yet(self, action: Action, needed: Action) -> Iterator[str]:
        if needed not in self._done:
            yield f"{action} needs {needed} before it, which is not there"

    def _not_gathered(self, action: Action) -> Iterator[str]:
        if action.stage in self._sharded and action.stage not in self._gathered:
            yield f"{action} needs stage {action.stage!r} unsharded, which it is not at this point"

    def _missing(self) -> Iterator[str]:
        """What the rank should have done and has not."""
        program = self._program
        for stage in program.stages_of(self._rank):
            for m in range(program.microbatches):
                if (forward := Action(Op.F, stage, m)) not in self._done:
                    yield f"{forward} is missing"
                yield from self._unsent(forward)
                if self._training:
                    yield from self._unsent(self._backward(stage, m))
            if self._training:
                yield from (f"{action} is missing" for action in self._ungraded(stage))
                if (reduction := Action(Op.REDUCE, stage)) not in self._done:
                    yield f"{reduction} is missing: the gradients of stage {stage!r} stay unreduced"
        for stage in sorted(self._gathered):
            yield f"{Action(Op.RESHARD, stage)} is missing: stage {stage!r} stays unsharded"

    def _unsent(self, action: Action) -> Iterator[str]:
        send = self._program.send_after(action)
        if action in self._done and send is not None and send not in self._done:
            yield f"{send} is missing"


def _check_channels(program: Program) -> None:
    """Receives in the order of the sends, on each ordered pair of ranks.

    Both ends of every transfer exist once: no F, B or I went without its RECV, and none without its SEND.
    """
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(program.actions):
        for action in actions:
            if action.op in SENDS:
                sent[rank, program.peer(action)].append(action.other_end)
    arrivals = {channel: iter(enumerate(receives)) for channel, receives in sent.items()}
    for rank, actions in enumerate(program.actions):
        for index, action in enumerate(actions):
            if action.op not in RECEIVES:
                continue
            source = program.peer(action)
            number, arriving = next(arrivals.get((source, rank), iter(())), (len(sent[source, rank]), None))
            if arriving != action:
                found = "nothing" if arriving is None else f"{arriving.other_end}, read by {arriving}"
                raise ProgramError(
                    rank, index, f"{action} is number {number} of the receives from rank {source}, which sends {found}"
                )
