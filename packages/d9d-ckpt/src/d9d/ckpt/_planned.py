"""A proven plan: what is read and made, for all of a model or a part of it, and what that costs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from ._explain import explain
from ._mapper import Group
from ._names import natural_key, quote_with_nearest, require_list
from ._picture import Picture
from ._problems import PlanError
from ._spec import Region, TensorSpec
from ._table import table


@attrs.frozen(repr=False)
class Plan:
    """What to read and make, in the order in which it is streamed. `str` of it is a table."""

    groups: tuple[Group, ...]
    """Those that make something wanted, in natural order of their first output."""
    outputs: Mapping[str, TensorSpec]
    """Everything that the groups make."""
    inputs: Mapping[str, TensorSpec]
    """Everything that the groups take."""
    wants: Mapping[str, tuple[Region, ...]]
    """The regions that shall be made, by output."""
    files: Mapping[str, str]
    """The file of each input; empty where the source has none."""

    @classmethod
    def of(
        cls,
        groups: Iterable[Group],
        inputs: Mapping[str, TensorSpec],
        outputs: Mapping[str, TensorSpec],
        *,
        file: Callable[[str], str] | None,
    ) -> Plan:
        """The plan that makes all `outputs` whole."""
        files = {} if file is None else {name: file(name) for name in inputs}
        wants = {name: (Region.whole(name, spec),) for name, spec in outputs.items()}
        return _restricted(groups, inputs, outputs, wants, files)

    def select(self, want: Iterable[str | Region]) -> Plan:
        """What makes a part of the outputs: a pipeline stage's names, or the regions that a rank holds.

        Nothing is proven anew; the cost is that of the part.

        Raises:
            PlanError: A name is none of an output, or a region is not within it.
            TypeError: It is one text, whose letters would be taken for names.
        """
        require_list(want)
        wants: dict[str, list[Region]] = {}
        unknown: set[str] = set()
        problems: list[str] = []
        for each in want:
            name = each if isinstance(each, str) else each.name
            if name not in self.outputs:
                unknown.add(name)
                continue
            region = Region.whole(name, self.outputs[name]) if isinstance(each, str) else each
            if not region.is_within(self.outputs[name]):
                problems.append(f"selected, but not within {name!r}, which is {self.outputs[name]}: {region}")
            wants.setdefault(name, []).append(region)
        nearest = quote_with_nearest(unknown, self.outputs.keys())
        problems = [*(f"selected, but not in the target: {name}" for name in nearest), *problems]
        if problems:
            raise PlanError(problems)
        numbers = sorted({self._makers[name] for name in wants})
        groups = [self.groups[number] for number in numbers]
        distinct = {name: tuple(dict.fromkeys(regions)) for name, regions in wants.items()}
        return _restricted(groups, self.inputs, self.outputs, distinct, self.files)

    @functools.cached_property
    def reads(self) -> tuple[Sequence[Region], ...]:
        """For each of `groups`, the regions of inputs that are read to make what is wanted of it."""
        return tuple(self._reads(group) for group in self.groups)

    @functools.cached_property
    def bytes_by_group(self) -> tuple[int, ...]:
        """For each of `groups`, the bytes that are read."""
        return tuple(sum(map(self._nbytes, regions)) for regions in self.reads)

    @functools.cached_property
    def bytes_by_file(self) -> Mapping[str, int]:
        """The bytes that are read of each file, by its name; of files that are not read there is none."""
        found = Counter[str]()
        for region in (region for regions in self.reads for region in regions):
            found[self.files.get(region.name, "")] += self._nbytes(region)
        return {file: found[file] for file in sorted(found, key=natural_key)}

    @property
    def bytes_to_read(self) -> int:
        """The bytes that are read of all files."""
        return sum(self.bytes_by_group)

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Inputs and outputs of the group that has most: what is held at once where groups follow each other."""
        made = (sum(map(self._made_bytes, group.outputs)) for group in self.groups)
        return max(map(sum, zip(self.bytes_by_group, made)), default=0)

    def explain(self, name: str) -> str:
        """Shows as a tree where an output comes from, down to bytes of files.

        Raises:
            ValueError: Nothing of that name is made.
        """
        if name not in self.wants:
            (quoted,) = quote_with_nearest([name], self.wants.keys())
            raise ValueError(f"the plan does not make {quoted}")
        group = self.groups[self._makers[name]]
        return "\n".join(explain(group, want, self.inputs, self.files) for want in self.wants[name])

    def mermaid(self) -> str:
        """The graph as a flowchart in Mermaid's language; names that differ in numbers alone are one node."""
        return self._picture.mermaid()

    def svg(self) -> str:
        """The graph as an image in SVG; names that differ in numbers alone are one node."""
        return self._picture.svg()

    def __str__(self) -> str:
        return table(
            self.groups,
            outputs=self.outputs,
            wants=self.wants,
            bytes_by_group=self.bytes_by_group,
            bytes_by_file=self.bytes_by_file,
            peak_bytes=self.peak_bytes,
        )

    def __repr__(self) -> str:
        return f"<Plan of {len(self.groups)} groups that make {len(self.wants)} tensors>"

    @property
    def _picture(self) -> Picture:
        return Picture.of(self.groups, self.inputs)

    @functools.cached_property
    def _makers(self) -> Mapping[str, int]:
        return {name: number for number, group in enumerate(self.groups) for name in group.outputs}

    def _reads(self, group: Group) -> Sequence[Region]:
        wanted = (want for name in group.outputs for want in self.wants.get(name, ()) if want.numel)
        found = dict.fromkeys(need for want in wanted for need in group.needs(want, self.inputs))
        return [region for region in found if region.numel]

    def _nbytes(self, region: Region) -> int:
        return region.numel * self.inputs[region.name].dtype.itemsize

    def _made_bytes(self, name: str) -> int:
        return sum(want.numel for want in self.wants.get(name, ())) * self.outputs[name].dtype.itemsize


def _restricted(
    groups: Iterable[Group],
    inputs: Mapping[str, TensorSpec],
    outputs: Mapping[str, TensorSpec],
    wants: Mapping[str, tuple[Region, ...]],
    files: Mapping[str, str],
) -> Plan:
    """The plan of the groups that make something wanted."""
    chosen = tuple(group for group in groups if not wants.keys().isdisjoint(group.outputs))
    taken = [name for group in chosen for name in group.inputs if name in inputs]
    return Plan(
        chosen,
        {name: outputs[name] for group in chosen for name in group.outputs if name in outputs},
        {name: inputs[name] for name in taken},
        {name: wants[name] for group in chosen for name in group.outputs if name in wants},
        {name: files[name] for name in taken if name in files},
    )
