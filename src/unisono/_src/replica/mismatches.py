"""What a probe finds that replicas do not make as the whole batch does, told in one warning: one cause often shows in several places."""

from __future__ import annotations

import warnings


class Mismatches:
    """What was found, until it is told."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._layers: set[str] = set()
        """The layers of whose state something was found."""
        self._told: set[str] = set()
        """Those of which a warning has told."""

    def note(self, what: str, text: str, layer: str | None = None) -> None:
        """Note `what` was found, and the sentences that tell of it if it is the first.

        `layer` is the path of the layer whose state it is. Once a layer is told, its other state is the same fault, and numbers follow from it.
        """
        if layer in self._told or (layer is None and self._told):
            return
        self._found.setdefault(what, text)
        if layer is not None:
            self._layers.add(layer)

    def tell(self) -> None:
        """Warn of all that was found since the last warning."""
        if not self._found:
            return
        first, *others = self._found.items()
        self._found = {}
        self._told |= self._layers
        names = ", ".join(what for what, _ in others)
        more = f" Probably for the same reason, these are not those of the whole batch either: {names}." if others else ""
        warnings.warn(first[1] + more, stacklevel=2)
