"""Which axis carries the units where one axis is split into several, as channels into heads and their dimensions.

Channels that are seen as (heads, dimensions) can only be removed by whole heads, or by one dimension of all heads. A
first trace, the survey, gives every new axis atoms of its own and looks which are blocked until the next split. The
outermost axis that is not carries the units: of (3, heads, dimensions) with rotary embeddings the heads, since the
first axis is taken apart and the last is joined with angles.
"""

from __future__ import annotations

import numpy as np

from proxmo.compaction.labels import Components, Labels, Operation

Site = tuple[str, int]
"""The name of a module, and the how manyth split it is there."""


class Splits:
    """Chooses an axis for every split.

    Args:
        model_atoms: the number of atoms of the model.
        atoms: the number of all atoms so far.
        choices: for each site the axis, or ``None`` if all are blocked; without them, this is the survey.
    """

    def __init__(self, model_atoms: int, atoms: int, choices: dict[Site, int | None] | None = None) -> None:
        self.model_atoms, self.atoms, self._choices = model_atoms, atoms, choices
        self._seen: dict[str, int] = {}
        self._candidates: dict[Site, list[tuple[int, Labels]]] = {}

    @property
    def is_survey(self) -> bool:
        return self._choices is None

    def new_atoms(self, size: int) -> Labels:
        """Return atoms that no parameter has, for a tensor whose size follows from others."""
        self.atoms += size
        return np.arange(self.atoms - size, self.atoms, dtype=np.int64)

    def next_site(self, module: str) -> Site:
        """Return a name for the next split in a module."""
        number = self._seen[module] = self._seen.get(module, -1) + 1
        return module, number

    def axis_for(self, site: Site, axes: int) -> int | None:
        """Return which of the new axes carries the units."""
        assert self._choices is not None
        chosen = self._choices.get(site, 0)
        return chosen if chosen is not None and chosen < axes else None

    def survey(self, site: Site, elements: Labels) -> list[Labels]:
        """Return new atoms for all new axes, and remember them; indices with the same elements get the same atom."""
        labels = []
        for axis, size in enumerate(elements.shape):
            rows = np.moveaxis(elements, axis, 0).reshape(size, -1)
            _, same = np.unique(rows, axis=0, return_inverse=True)
            labels.append(same.reshape(-1).astype(np.int64) + self.atoms)
            self.atoms += size
        self._candidates.setdefault(site, list(enumerate(labels)))
        return labels

    def choose(self, operations: list[Operation]) -> dict[Site, int | None]:
        """Return the choices from a survey: the first axis that is not blocked, unless one before is mixed."""
        root = Components(self.atoms, [pair for operation in operations for pair in operation.joins]).root
        blocked, mixed = np.zeros(self.atoms, dtype=bool), np.zeros(self.atoms, dtype=bool)
        for operation in operations:
            for labels, reason in operation.blocks:
                blocked[root[labels]] = True
                mixed[root[labels]] |= "mixes" in reason
        choices: dict[Site, int | None] = {}
        for site, candidates in self._candidates.items():
            choices[site] = None
            for axis, labels in candidates:
                if not blocked[root[labels]].any():
                    choices[site] = axis
                if mixed[root[labels]].any() or choices[site] is not None:
                    break
        return choices
