"""Every table of strategies: names of functions, to look up and to add to.

    @POLICIES.register
    def mine(step): ...

makes `mine` a name wherever one is accepted; a function can be passed as it is.
"""

from mucudnn.passes.microbatch import PLANNERS
from mucudnn.passes.ordering import ORDERS
from mucudnn.passes.residency import POLICIES
from mucudnn.passes.scheduling import SCHEDULERS

__all__ = ["ORDERS", "PLANNERS", "POLICIES", "SCHEDULERS"]
