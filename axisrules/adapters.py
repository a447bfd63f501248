"""What an adapter for a further framework is made of.

Re-exports; it holds no logic. A package makes its adapter known by an entry point of the group
``axisrules.adapters`` whose name is the framework's top-level package and whose value is an object
with a method ``flatten``. It is loaded when a tree holds an object of that framework.

Example:
    A framework whose ``Box`` holds an array with its names:

    >>> from axisrules.adapters import Flat
    >>> class Adapter:
    ...     def flatten(self, node):
    ...         names = node.names
    ...         return Flat([()], [node.value], [names], lambda new: type(node)(new[0], names))
"""

from axisrules._trees import ENTRY_POINTS as ENTRY_POINTS
from axisrules._trees import NO_ENTRY as NO_ENTRY
from axisrules._trees import Adapter as Adapter
from axisrules._trees import Flat as Flat
from axisrules._trees import children as children
from axisrules._trees import children_of_pytree as children_of_pytree
from axisrules._trees import flatten as flatten
from axisrules._trees import flatten_pytree as flatten_pytree
from axisrules._trees import join as join
