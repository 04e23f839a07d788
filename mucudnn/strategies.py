"""Registries of strategies, which can be extended.

`PLANNERS` divide mini-batches, `POLICIES` decide which tensors stay on the device,
`SCHEDULERS` when copies run, `ORDERS` in which order nodes run.

Examples:
    >>> from mucudnn.strategies import PLANNERS
    >>> PLANNERS.resolve("undivided").__doc__
    'Run each kernel in one call by the fastest algorithm that fits, like cuDNN.'

A function is accepted wherever a name is; `register` adds it under its own name:

    @POLICIES.register
    def mine(step): ...
"""

from mucudnn.passes.microbatch import PLANNERS
from mucudnn.passes.ordering import ORDERS
from mucudnn.passes.residency import POLICIES
from mucudnn.passes.scheduling import SCHEDULERS

__all__ = ["ORDERS", "PLANNERS", "POLICIES", "SCHEDULERS"]
