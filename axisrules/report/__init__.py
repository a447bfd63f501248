"""Looking at a layout before it costs anything: tables, waste, findings, differences, drawings.

Re-exports; it holds no logic. Every result is a value whose ``str()`` is plain text. Bytes are bytes.
"""

from axisrules._plan_diff import DimChange as DimChange
from axisrules._plan_diff import LeafChange as LeafChange
from axisrules._plan_diff import PlanDiff as PlanDiff
from axisrules._plan_diff import diff as diff
from axisrules.report._draw import Drawing as Drawing
from axisrules.report._draw import Tile as Tile
from axisrules.report._draw import draw as draw
from axisrules.report._findings import Finding as Finding
from axisrules.report._lint import lint as lint
from axisrules.report._page import page as page
from axisrules.report._table import Row as Row
from axisrules.report._table import Table as Table
from axisrules.report._table import table as table
from axisrules.report._waste import AxisUse as AxisUse
from axisrules.report._waste import FreeAxis as FreeAxis
from axisrules.report._waste import LeafWaste as LeafWaste
from axisrules.report._waste import Waste as Waste
from axisrules.report._waste import waste as waste
