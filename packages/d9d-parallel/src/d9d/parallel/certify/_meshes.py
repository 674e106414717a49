"""Which meshes to certify."""

import itertools
import math
from collections.abc import Iterable

import attrs

from d9d.mesh import MeshConfig

_DEGREES = tuple(field.name for field in attrs.fields(MeshConfig))


def every_mesh(ranks: int, degrees: Iterable[str] = _DEGREES) -> list[MeshConfig]:
    """Every way to give so many ranks to some degrees of parallelism, experts folded in every way that there is.

    Args:
        ranks: Size of the world.
        degrees: Names of fields of `MeshConfig`; all others stay 1.

    Raises:
        ValueError: There is no such degree.
    """
    names = list(degrees)
    if unknown := set(names) - set(_DEGREES):
        raise ValueError(f"there is no degree {', '.join(sorted(unknown))}: there are {', '.join(_DEGREES)}")
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    found = []
    for sizes in itertools.product(divisors, repeat=len(names)):
        chosen = dict(zip(names, sizes))
        if math.prod(size for name, size in chosen.items() if name != "expert") != ranks:
            continue
        try:
            found.append(MeshConfig(**chosen).resolve(ranks))
        except ValueError:  # experts do not fold so
            continue
    return found


def parse_mesh(text: str) -> MeshConfig:
    """A mesh as one writes it on a command line: ``replicate=2,shard=2,expert=4``.

    Raises:
        ValueError: It is not of this form, or there is no such degree.
    """
    chosen: dict[str, int] = {}
    for part in text.split(","):
        name, _, degree = part.strip().partition("=")
        if name not in _DEGREES or not degree.isdecimal() or name in chosen:
            raise ValueError(f"{part.strip()!r} in the mesh {text!r} is not one of {'=N, '.join(_DEGREES)}=N")
        chosen[name] = int(degree)
    return MeshConfig(**chosen)
