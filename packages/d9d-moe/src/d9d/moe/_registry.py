"""Choice of a backend: explicit, else from the environment, else automatic.

The same few lines stand in d9d.attn and d9d.moe, which share no package below them.
"""

import abc
import difflib
import json
import logging
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

import attrs

NeedT = TypeVar("NeedT")

_logger = logging.getLogger(__name__)


class BackendConfig(abc.ABC, Generic[NeedT]):
    """One kind of backend and its settings; subclasses are frozen attrs classes that need no argument."""

    kind: ClassVar[str]
    """The tag by which configurations and the environment name it."""

    priority: ClassVar[int | None] = None
    """The automatic choice takes the highest that can do what is needed; None is used only when asked for."""

    @abc.abstractmethod
    def refusal(self, need: NeedT) -> str | None:
        """Why this backend cannot do what is needed and what to do about it, or None if it can. Never raises."""


ConfigT = TypeVar("ConfigT", bound=BackendConfig[Any])


@attrs.frozen
class Choice(Generic[ConfigT]):
    """The backend that was chosen."""

    config: ConfigT
    """Settings of the backend."""

    reason: str
    """Why this one, for logs."""


class Registry(Generic[ConfigT, NeedT]):
    """Backends by kind, open to third parties.

    Args:
        what: What the backends do, for messages.
        env: Environment variable that names a kind, or holds a JSON object with the key "kind" and settings.
    """

    def __init__(self, what: str, *, env: str) -> None:
        self._what = what
        self._env = env
        self._classes: dict[str, type[ConfigT]] = {}

    @property
    def classes(self) -> Mapping[str, type[ConfigT]]:
        """The registered configuration classes by kind."""
        return MappingProxyType(self._classes)

    def register(self, config_class: type[ConfigT]) -> None:
        """Make a backend available under its kind.

        Raises:
            ValueError: Another class has this kind.
        """
        if config_class.kind in self._classes:
            other = self._classes[config_class.kind]
            raise ValueError(
                f"{config_class!r} registers the {self._what} {config_class.kind!r}, which {other!r} already is; "
                "choose another kind"
            )
        self._classes[config_class.kind] = config_class

    def parse(self, text: str) -> ConfigT:
        """Read a kind, or a JSON object such as ``{"kind": "torch", "kernels": ["math"]}``.

        Raises:
            ValueError: The text is no such object, its kind is unknown, or its settings do not fit the kind.
        """
        settings = {"kind": text}
        if text.lstrip().startswith("{"):
            try:
                settings = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"the {self._what} {text!r} is neither a kind nor JSON: {error}") from error
        kind = settings.pop("kind", None)
        if not isinstance(kind, str) or kind not in self._classes:
            nearest = difflib.get_close_matches(str(kind), self._classes, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"unknown {self._what} {kind!r}, known are {sorted(self._classes)}{hint}")
        try:
            return self._classes[kind](**settings)
        except TypeError as error:
            raise ValueError(f"the settings {settings!r} do not fit the {self._what} {kind!r}: {error}") from error

    def choose(self, explicit: ConfigT | str | None, need: NeedT) -> Choice[ConfigT]:
        """Choose by explicit configuration, else by the environment, else the best that can; logged at DEBUG.

        Raises:
            ValueError: What was asked for is unknown or cannot do what is needed, or nothing can.
            TypeError: What was asked for is neither a configuration nor a string.
        """
        choice = self._choose(explicit, need)
        _logger.debug("%s %r for %r: %s", self._what, choice.config, need, choice.reason)
        return choice

    def _choose(self, explicit: ConfigT | str | None, need: NeedT) -> Choice[ConfigT]:
        if explicit is not None:
            config = self.parse(explicit) if isinstance(explicit, str) else explicit
            if not isinstance(config, BackendConfig):
                raise TypeError(f"the {self._what} must be a configuration or its kind, found {config!r}")
            return self._accepted(config, "asked for in the configuration", need)
        if text := os.environ.get(self._env):
            return self._accepted(self.parse(text), f"asked for by {self._env}={text!r}", need)
        return self._automatic(need)

    def _accepted(self, config: ConfigT, reason: str, need: NeedT) -> Choice[ConfigT]:
        if (refusal := config.refusal(need)) is not None:
            raise ValueError(f"the {self._what} {config.kind!r}, {reason}, {refusal}")
        return Choice(config, reason)

    def _automatic(self, need: NeedT) -> Choice[ConfigT]:
        candidates = [c for c in self._classes.values() if c.priority is not None]
        passed_over: list[str] = []
        for config_class in sorted(candidates, key=lambda c: c.priority or 0, reverse=True):
            config = config_class()
            if (refusal := config.refusal(need)) is None:
                return Choice(config, "; ".join(["the best that can", *passed_over]))
            passed_over.append(f"{config.kind!r} {refusal}")
        raise ValueError(f"no {self._what} can do {need!r}: {'; '.join(passed_over)}")
