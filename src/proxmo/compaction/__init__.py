"""Turn exact zeros into a smaller model with the same outputs.

`unit_groups` applies a penalty to whole removable units, `compact` removes the units that have become zero, and
`save_compact` and `load_compact` store the result in a file. Calls of the model are followed operation by operation, to
find out what belongs to a unit and to prove, unit by unit, that the smaller model computes the same function.
"""

from proxmo.compaction.compacting import compact
from proxmo.compaction.errors import CompactionError
from proxmo.compaction.report import CompactionReport
from proxmo.compaction.serialization import load_compact, save_compact
from proxmo.compaction.unit_param_groups import unit_groups

__all__ = ["CompactionError", "CompactionReport", "compact", "load_compact", "save_compact", "unit_groups"]
