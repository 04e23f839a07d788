"""`partitioner`: our plan of a joint graph as hints for PyTorch's own partitioner.

    options = {"custom_partitioner_fn": mt.partitioner(budget="8GiB")}
    model = torch.compile(model, options=options)

Inductor compiles the model as usual, but saves and recomputes between forward and
backward what the plan of the graph does. No peak is promised: Inductor orders and fuses
kernels and frees tensors by itself, and recomputes at most once.
`torch.compile(backend=mt.backend(budget=...))` keeps its budget.
"""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from mucudnn.arguments import check_bool
from mucudnn.errors import UnsupportedError
from mucudnn.ir.devices import DeviceFigures, get_device
from mucudnn.ir.profile import Profile
from mucudnn.torch.capture.exclusive import exclusive_capture
from mucudnn.torch.capture.joint import Joint
from mucudnn.torch.costs.measure import estimated
from mucudnn.torch.hints.policies import ResultPolicies, policies_of, without_copies
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.plan_program import LoweredStep, PlanOptions, plan_program
from mucudnn.torch.planning import parse_budget

_KEY = "recompute"
_SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


def partitioner(
    *, budget: float | str | None = None, device: str = "h200", offload: bool = False
) -> "HintedPartitioner":
    """Make a partitioner for Inductor that saves and recomputes as our plans do.

    It guarantees no peak, unlike `mucudnn.torch.backend`. Pass it to
    `torch.compile(model, options={"custom_partitioner_fn": ...})`, or to the setting of
    that name in `torch._inductor.config`. `aot_autograd(partition_fn=...)` takes it,
    too.

    Args:
        budget: Of a compiled graph, as `mucudnn.torch.backend` counts it. Plans run
            operation by operation; Inductor's kernels need less or more.
        device: The device by whose published figures recomputation is decided.
        offload: Whether offloaded tensors are offloaded by PyTorch's own pass, which is
            for GPUs. If not, plans recompute instead, as far as possible; what they
            still offload is saved.

    Raises:
        ValueError: The device is unknown, or the budget is not a size.
        TypeError: An argument has the wrong type.
    """
    limit = parse_budget(budget)
    return HintedPartitioner(limit, device, check_bool("offload", offload))


class HintedPartitioner(CustomPartitionerFn):  # type: ignore[misc]  # PyTorch has no types here
    """A partitioner that plans joint graphs and has PyTorch partition them accordingly.

    Args:
        budget: Bytes for each graph.
        device: The device whose figures estimate times.
        offload: Whether PyTorch's offloading is used.

    Attributes:
        plans: Plans in the order in which graphs were compiled.
        policies: The policies of each plan's forward results.
    """

    def __init__(self, budget: float, device: str, offload: bool) -> None:
        # Inductor may pickle its settings, so that this is no local function.
        costs = partial(_costs, device=get_device(device), offload=offload)
        self._budget = budget
        self._options = PlanOptions(costs=costs)
        self._offload = offload
        self.plans: list[TorchPlan] = []
        self.policies: list[ResultPolicies] = []

    @exclusive_capture()
    def __call__(
        self,
        gm: torch.fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        compiler: str = "inductor",
        **_: Any,
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Partition one graph."""
        parts = Joint.of(_functional(gm), num_fwd_outputs)
        _check(parts)
        own = list(static_lifetime_input_indices or ())
        with _disable_current_modes(), torch.no_grad():
            step = LoweredStep.of_joint(parts, own)
            program = plan_program(step, self._options, self._budget)
        found = policies_of(program)
        tag(gm, found, offload=self._offload)
        self.plans.append(program.plan)
        self.policies.append(found)
        offloading = self._offload or config.enable_activation_offloading
        # At another budget than one PyTorch would choose again among what is saved.
        with config.patch(
            activation_memory_budget=1.0, enable_activation_offloading=offloading
        ):
            halves: tuple[torch.fx.GraphModule, torch.fx.GraphModule] = (
                min_cut_rematerialization_partition(
                    gm,
                    joint_inputs,
                    compiler,
                    num_fwd_outputs=num_fwd_outputs,
                    static_lifetime_input_indices=own,
                )
            )
        return halves

    def __deepcopy__(self, memo: dict[int, Any]) -> "HintedPartitioner":
        """Return the partitioner itself: Inductor copies its settings, and `plans`."""
        return self

    def uuid(self) -> Any | None:
        """Return None: graphs compiled by a plan are not taken from a cache."""
        return None


def tag(
    module: torch.fx.GraphModule, policies: ResultPolicies, *, offload: bool = False
) -> None:
    """Write policies where PyTorch's partitioner looks for them.

    Views of saved tensors are made again, which costs nothing. PyTorch 2.13 knows
    `MUST_CPU_OFFLOAD` but looks for another mark, and for `MUST_SAVE`.

    Args:
        module: A joint graph.
        policies: Of the forward pass's results.
        offload: Whether to mark what is to be offloaded.
    """
    again = CheckpointPolicy.MUST_RECOMPUTE
    for node in module.graph.nodes:
        name = _name(node)
        policy = again if name in policies.views else policies.of.get(name)
        if policy is None and node.target in _SAME and _KEY in node.args[0].meta:
            policy = again
        # A tuple cannot be saved itself. One of which nothing is computed again has no
        # mark: a batch norm would read the running statistics that it has changed.
        of_tuple = node.target is operator.getitem and policy is again
        if policy is None or (of_tuple and name not in policies.again):
            continue
        away = policy is CheckpointPolicy.MUST_CPU_OFFLOAD
        node.meta[_KEY] = CheckpointPolicy.MUST_SAVE if away else policy
        if away and offload:
            node.meta["should_offload"] = True
        if of_tuple:
            node.args[0].meta[_KEY] = again


def _costs(lowered: Lowered, device: DeviceFigures, offload: bool) -> Profile:
    profile = estimated(lowered, device)
    return profile if offload else without_copies(profile)


def _functional(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return the graph without the copies by which Inductor changes inputs at its end.

    Nodes keep their names.
    """
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.copy_.default and (
            node.args[0].op == "placeholder"
        ):
            copied[node] = copied[node.args[1]]
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    return torch.fx.GraphModule(module, graph)


def _name(node: torch.fx.Node) -> str:
    """Return the name of a node's result in a lowered graph."""
    if node.target is operator.getitem:
        return f"{node.args[0]}.{node.args[1]}"
    return str(node.name)


def _check(parts: Joint) -> None:
    """Refuse symbolic sizes.

    Raises:
        UnsupportedError: Names the input.
    """
    for node in parts.primals:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise UnsupportedError(
                f"{node.name} has a symbolic size; pass dynamic=False to "
                "torch.compile, so that every size has its own plan"
            )
