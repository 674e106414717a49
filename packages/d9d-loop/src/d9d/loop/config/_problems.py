"""From cattrs' tree of exceptions to a list of problems that a user can act on."""

import difflib
from collections.abc import Iterable, Sequence

import attrs
from cattrs.errors import AttributeValidationNote, ForbiddenExtraKeysError, IterableValidationNote


class ConfigError(ValueError):
    """A configuration that cannot be used.

    Args:
        problems: One sentence each, starting with the full path of the field, or of the table that a check refused.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  {problem}" for problem in self.problems))


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about a `name` that is none of `known`: what may have been meant, and what there is."""
    known = sorted(known)
    match difflib.get_close_matches(name, known, n=1):
        case [close]:
            return f"did you mean {close!r}?"
        case _:
            return f"known: {', '.join(map(repr, known))}"


def list_problems(error: Exception, path: str = "") -> list[str]:
    """All problems in a tree of exceptions with cattrs' notes, each led by the path of its field."""
    match error:
        case ExceptionGroup():
            return [problem for inner in error.exceptions for problem in list_problems(inner, path + _step(inner))]
        case ForbiddenExtraKeysError(cl=owner, extra_fields=names):
            known = [field.alias for field in attrs.fields(owner) if field.init]
            return [_at(f"{path}.{name}", f"no such field; {nearest(name, known)}") for name in sorted(names)]
        case KeyError():
            return [_at(path, "required, but not given")]
        case _:
            return [_at(path, str(error))]


def _step(error: Exception) -> str:
    """The piece of path that cattrs noted on an exception."""
    for note in getattr(error, "__notes__", ()):
        match note:
            case AttributeValidationNote(name=name):
                return f".{name}"
            case IterableValidationNote(index=int(index)):
                return f"[{index}]"
            case IterableValidationNote(index=key):
                return f".{key}"
    return ""


def _at(path: str, problem: str) -> str:
    return f"{path.removeprefix('.')}: {problem}" if path else problem
