"""Many names, indexed by their parts between dots, so that hundreds of patterns do not each look at all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

import attrs

from ._natural import natural_key


@attrs.define
class _Node:
    """The names that begin with the same parts."""

    children: dict[str, _Node] = attrs.field(factory=dict)
    name: str | None = None
    """The name that ends here, if there is one."""


class Names(Collection[str]):
    """Names in a fixed order, which patterns and prefixes search without looking at each of them.

    `over` makes a copy that costs what changes in it, not what it holds: each `Sequential` has one.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._base: Names | None = None
        self._removed: set[str] = set()  # of the base
        self._own = dict.fromkeys(names)
        self._root: _Node | None = None  # of the own names; built when first searched
        self._scopes: dict[str, Names] = {}

    @classmethod
    def of(cls, names: Collection[str]) -> Names:
        """The same names, in natural order unless they are indexed already."""
        return names if isinstance(names, Names) else cls(sorted(names, key=natural_key))

    @classmethod
    def over(cls, base: Names) -> Names:
        """A copy of `base`, which must not change from now on."""
        names = cls()
        names._base = base
        return names

    def __contains__(self, name: object) -> bool:
        return name in self._own or (self._base is not None and name in self._base and name not in self._removed)

    def __iter__(self) -> Iterator[str]:
        if self._base is not None:
            yield from (name for name in self._base if name not in self._removed)
        yield from self._own

    def __len__(self) -> int:
        return len(self._own) + (0 if self._base is None else len(self._base) - len(self._removed))

    def update(self, *, remove: Iterable[str], add: Iterable[str]) -> None:
        """Takes names away, then adds others; those that are not there, or there already, are skipped."""
        self._scopes.clear()
        for name in remove:
            if name in self._own:
                del self._own[name]
                if self._root is not None:
                    _reach(self._root, name).name = None
            elif self._base is not None and name in self._base:
                self._removed.add(name)
        for name in add:
            if name not in self:
                self._own[name] = None
                if self._root is not None:
                    _reach(self._root, name).name = name

    def candidates(self, parts: Sequence[str | None]) -> Iterator[str]:
        """The names of as many parts as are given, where None stands for any part that is not empty."""
        if self._base is not None:
            yield from (name for name in self._base.candidates(parts) if name not in self._removed)
        for node in _walk([self._indexed()], parts):
            if node.name is not None:
                yield node.name

    def prefixes(self, parts: Sequence[str | None]) -> Iterator[str]:
        """The different beginnings, of as many parts as are given, of longer names; None stands for any part."""
        paths = [("", self._indexed())]
        for part in parts:
            paths = [
                (f"{path}{key}.", child)
                for path, node in paths
                for key, child in ([(part, node.children.get(part))] if part is not None else node.children.items())
                if key and child is not None
            ]
        own = (path for path, node in paths if node.children)
        base = () if self._base is None else self._base.prefixes(parts)
        for path in dict.fromkeys(chain(base, own)):
            if len(self.scope(path)):
                yield path

    def scope(self, prefix: str) -> Names:
        """The names that begin with `prefix`, without it. Not to be changed."""
        if prefix not in self._scopes:
            self._scopes[prefix] = self._scope(prefix)
        return self._scopes[prefix]

    def _scope(self, prefix: str) -> Names:
        *parents, start = prefix.split(".")
        own: list[str] = []
        for node in _walk([self._indexed()], parents):
            for part, child in node.children.items():
                if part.startswith(start):
                    own += [name.removeprefix(prefix) for name in _names_below(child)]
        if self._base is None:
            return Names(own)
        scoped = Names.over(self._base.scope(prefix))
        removed = [name.removeprefix(prefix) for name in self._removed if name.startswith(prefix)]
        scoped.update(remove=removed, add=own)
        return scoped

    def _indexed(self) -> _Node:
        if self._root is None:
            self._root = _Node()
            for name in self._own:
                _reach(self._root, name).name = name
        return self._root


def _reach(node: _Node, name: str) -> _Node:
    """The node where `name` ends, made if need be."""
    for part in name.split("."):
        child = node.children.get(part)
        if child is None:
            child = node.children[part] = _Node()
        node = child
    return node


def _walk(nodes: list[_Node], parts: Iterable[str | None]) -> list[_Node]:
    for part in parts:
        if part is None:
            nodes = [child for node in nodes for key, child in node.children.items() if key]
        else:
            nodes = [node.children[part] for node in nodes if part in node.children]
    return nodes


def _names_below(node: _Node) -> Iterator[str]:
    stack = [node]
    while stack:
        node = stack.pop()
        if node.name is not None:
            yield node.name
        stack += reversed(node.children.values())
