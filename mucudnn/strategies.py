"""The tables of strategies, to look names up in and to add to.

`PLANNERS` divide mini-batches, `POLICIES` say what stays on the device, `SCHEDULERS`
when copies run, `ORDERS` in which order nodes do.

Examples:
    >>> from mucudnn.strategies import PLANNERS
    >>> PLANNERS.resolve("undivided").__doc__
    'Run each kernel in one call by the fastest algorithm that fits, like cuDNN.'

Wherever a name is accepted, a function is too; `register` makes its name one:

    @POLICIES.register
    def mine(step): ...
"""

from mucudnn.passes.microbatch import PLANNERS
from mucudnn.passes.ordering import ORDERS
from mucudnn.passes.residency import POLICIES
from mucudnn.passes.scheduling import SCHEDULERS

__all__ = ["ORDERS", "PLANNERS", "POLICIES", "SCHEDULERS"]
