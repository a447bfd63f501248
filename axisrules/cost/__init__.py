"""What a layout costs: memory, traffic, what compilers say, comparison, and better rules.

Every number comes with its source. Nothing here touches a device; ``measure`` compiles, in a process
of its own. This file re-exports; it holds no logic.
"""

from axisrules.cost._bytes import array_bytes as array_bytes
from axisrules.cost._climb import Change as Change
from axisrules.cost._collective import Collective as Collective
from axisrules.cost._collective import Collectives as Collectives
from axisrules.cost._collectives import collectives as collectives
from axisrules.cost._compare import Comparison as Comparison
from axisrules.cost._compare import compare as compare
from axisrules.cost._hardware import Hardware as Hardware
from axisrules.cost._hardware import hardware as hardware
from axisrules.cost._hardware import load_hardware as load_hardware
from axisrules.cost._measure import Measured as Measured
from axisrules.cost._measure import measure as measure
from axisrules.cost._memory import Memory as Memory
from axisrules.cost._memory import memory as memory
from axisrules.cost._moves import Move as Move
from axisrules.cost._moves import Traffic as Traffic
from axisrules.cost._search import Score as Score
from axisrules.cost._suggest import Suggestion as Suggestion
from axisrules.cost._suggest import best_change as best_change
from axisrules.cost._suggest import suggest as suggest
from axisrules.cost._traffic import traffic as traffic
