"""From exact zeros to a smaller model, with the same outputs.

`unit_groups` makes a penalty act on what can be removed as a whole; `compact` removes what has become zero;
`save_compact` and `load_compact` keep the result in a file. The work is done by torch-pruning, which is in the extra
`compact`; what is added here is the proof, unit by unit, that the function stays the same.
"""

from proxmo.compaction.compacting import compact
from proxmo.compaction.errors import CompactionError
from proxmo.compaction.report import CompactionReport
from proxmo.compaction.serialization import load_compact, save_compact
from proxmo.compaction.unit_param_groups import unit_groups

__all__ = ["CompactionError", "CompactionReport", "compact", "load_compact", "save_compact", "unit_groups"]
