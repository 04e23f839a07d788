"""What an argument `inductor` stands for; Inductor is imported where it is on."""

from typing import TYPE_CHECKING

from mucudnn.arguments import a_flag
from mucudnn.torch.plan_store import PlanStore

if TYPE_CHECKING:
    from mucudnn.torch.fusion.fusing import Fusing


def fusing_of(inductor: bool, plans: PlanStore) -> "Fusing | None":
    """What plans steps with fused nodes; None for steps without.

    Raises:
        TypeError: `inductor` is no bool.
    """
    if not a_flag("inductor", inductor):
        return None
    from mucudnn.torch.fusion.fusing import Fusing

    return Fusing(plans)
