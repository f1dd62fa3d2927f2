"""Rescale root mean square norms when channels that are zero are removed.

With d channels, y = w·x / √(mean(x²) + eps). If only d' are left, and the others were zero, the mean is d/d' times
what it was. So with eps·d/d' and w·√(d/d') the result is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import torch
from torch import nn

from proxmo.compaction.analysis import Analysis
from proxmo.compaction.labels import Mask

_LARGEST_EPS = 1e-2


@torch.no_grad()
def rescale_norms(small: nn.Module, analysis: Analysis, removed: Mask) -> dict[tuple[str, str], tuple[float, float]]:
    """Rescale the norms of a model after a cut, in place.

    Args:
        small: the model after the cut.
        analysis: what is known of the model before.
        removed: for each atom, whether it was removed.

    Returns:
        The attributes that were set, by module and name, with their old and new values.
    """
    changes: dict[tuple[str, str], tuple[float, float]] = {}
    for name, ratio, dtype in _ratios(analysis, removed):
        norm = small.get_submodule(name)
        if next(norm.children(), None) is not None:  # not a norm, but some larger module
            continue
        plus_one = _adds_one(norm)
        for parameter_name, p in list(norm.named_parameters(recurse=False)):
            scaled = (p + 1) * sqrt(ratio) - 1 if plus_one else p * sqrt(ratio)
            setattr(norm, parameter_name, nn.Parameter(scaled, p.requires_grad))
        for attribute, value in list(vars(norm).items()):
            if isinstance(norm, nn.RMSNorm) and attribute == "eps" and value is None:
                value = torch.finfo(dtype).eps
            if type(value) is float and 0 < value < _LARGEST_EPS and "eps" in attribute:
                setattr(norm, attribute, value * ratio)
                changes[name, attribute] = (value, value * ratio)
    return changes


def rescaled_norms(analysis: Analysis, removed: Mask) -> set[str]:
    """Return the modules that are rescaled."""
    return {name for name, _, _ in _ratios(analysis, removed)}


def precision_of_norms(analysis: Analysis, removed: Mask) -> torch.dtype | None:
    """Return the coarsest precision of norms that are rescaled, which may be below that of the model."""
    dtypes = [dtype for _, _, dtype in _ratios(analysis, removed)]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _ratios(analysis: Analysis, removed: Mask) -> Iterator[tuple[str, float, torch.dtype]]:
    """Yield norms whose number of channels changed, the ratio of the old to the new number, and their precision."""
    seen = set()
    for operation in analysis.traces[0].operations:
        for labels, dtype in operation.norms:
            gone = int(removed[labels[labels >= 0]].sum())
            if gone and operation.module not in seen:
                seen.add(operation.module)
                yield operation.module, len(labels) / (len(labels) - gone), dtype


def _adds_one(norm: nn.Module) -> bool:
    """Return whether the scale of a norm is 1 + weight: a weight of zero does not silence it."""
    parameters = list(norm.named_parameters(recurse=False))
    if len(parameters) != 1 or parameters[0][1].dim() != 1:
        return False
    name, p = parameters[0]
    probe = torch.ones(1, len(p), dtype=p.dtype, device=p.device)
    silent = nn.Parameter(torch.zeros_like(p), p.requires_grad)
    try:
        setattr(norm, name, silent)
        return bool(norm(probe).abs().max() > 0)
    except Exception:
        return False
    finally:
        setattr(norm, name, p)
