"""Many names, indexed by their parts between dots, so that hundreds of patterns do not each look at all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from ._natural import natural_key

Node = dict[str | None, Any]
"""By the next part of names, the node for those that begin with it; by None, the name that ends here.

In place of a node with one name that ends there stands the name: half of all nodes are such.
"""


class Names(Collection[str]):
    """Names in a fixed order, which patterns and prefixes search without looking at each of them.

    `over` makes a copy that costs what changes in it, not what it holds: each `Sequential` has one.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._base: Names | None = None
        self._removed: set[str] = set()  # of the base
        self._own = dict.fromkeys(names)
        self._trie: _Trie | None = None  # of the own names; built when first searched
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
                if self._trie is not None:
                    self._trie.discard(name)
            elif self._base is not None and name in self._base:
                self._removed.add(name)
        for name in add:
            if name not in self:
                self._own[name] = None
                if self._trie is not None:
                    self._trie.insert(name)

    def candidates(self, parts: Sequence[str | None]) -> Iterator[str]:
        """The names of as many parts as are given, where None stands for any part that is not empty."""
        if self._base is not None:
            yield from (name for name in self._base.candidates(parts) if name not in self._removed)
        for node in _walk([self._indexed()], parts):
            if isinstance(node, str):
                yield node
            elif None in node:
                yield node[None]

    def prefixes(self, parts: Sequence[str | None]) -> Iterator[str]:
        """The different beginnings, of as many parts as are given, of longer names; None stands for any part."""
        paths = [("", self._indexed())]
        for part in parts:
            paths = [
                (f"{path}{key}.", child)
                for path, node in paths
                for key, child in (node.items() if part is None else [(part, node.get(part))])
                if key and isinstance(child, dict)
            ]
        own = (path for path, _ in paths)
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
        own = [
            name.removeprefix(prefix)
            for node in _walk([self._indexed()], parents)
            if isinstance(node, dict)
            for part, child in node.items()
            if part is not None and part.startswith(start)
            for name in _names_below(child)
        ]
        if self._base is None:
            return Names(own)
        scoped = Names.over(self._base.scope(prefix))
        removed = [name.removeprefix(prefix) for name in self._removed if name.startswith(prefix)]
        scoped.update(remove=removed, add=own)
        return scoped

    def _indexed(self) -> Node:
        if self._trie is None:
            self._trie = _Trie(self._own)
        return self._trie.root


class _Trie:
    """The nodes of some names; `paths` leads to a node in one step instead of one for each part."""

    def __init__(self, names: Iterable[str]) -> None:
        self.root: Node = {}
        self._paths: dict[str, Node] = {}
        for name in names:
            self.insert(name)

    def insert(self, name: str) -> None:
        head, dot, last = name.rpartition(".")
        node = self.root if not dot else (self._paths.get(head) or self._node(head))
        child = node.get(last)
        if isinstance(child, dict):
            child[None] = name
        else:
            node[last] = name

    def discard(self, name: str) -> None:
        head, dot, last = name.rpartition(".")
        node = self._paths[head] if dot else self.root
        if isinstance(node[last], dict):
            del node[last][None]
        else:
            del node[last]

    def _node(self, path: str) -> Node:
        """The node for names that begin with these parts, made if need be."""
        if path in self._paths:  # though empty
            return self._paths[path]
        head, dot, last = path.rpartition(".")
        parent = self._node(head) if dot else self.root
        child = parent.get(last)
        node: Node = {None: child} if isinstance(child, str) else {}
        parent[last] = self._paths[path] = node
        return node


def _walk(nodes: list[Any], parts: Iterable[str | None]) -> list[Any]:
    """The nodes, or names in place of them, after these parts."""
    for part in parts:
        if part is None:
            nodes = [child for node in nodes if isinstance(node, dict) for key, child in node.items() if key]
        else:
            nodes = [node[part] for node in nodes if isinstance(node, dict) and part in node]
    return nodes


def _names_below(node: Any) -> Iterator[str]:
    stack = [node]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            yield node
        else:
            stack += reversed(node.values())
