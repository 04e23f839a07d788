"""Measured costs of fused kernels."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.ir.graph import Node
from mucudnn.ir.profile import Profile
from mucudnn.torch.costs.measure import costs_of
from mucudnn.torch.lowering.lowered import Lowered


def costs_of_kernels(known: Profile, trial: Lowered) -> Profile:
    """Measure the kernels of a graph whose other nodes have known costs.

    A kernel is measured with its first result beside its inputs and in place of one.
    """
    nodes = {n.name: n for n in trial.graph.nodes if n.name not in known.node_ms}
    with torch.no_grad():
        times, scratch = costs_of(trial, nodes)
        into = _in_place(trial, nodes)
        _, within = costs_of(into, {name: into.graph.by_name[name] for name in nodes})
    most = {name: max(scratch[name], within[name]) for name in nodes}
    every = replace(
        known,
        node_ms={**known.node_ms, **times},
        workspaces={**known.workspaces, **most},
    )
    return restricted(trial, every)


def restricted(lowered: Lowered, *profiles: Profile) -> Profile:
    """Return the costs of a graph's nodes, each from the first profile that has it."""
    names = [node.name for node in lowered.graph.nodes]
    profile_of = {n: next(p for p in profiles if n in p.node_ms) for n in names}

    def found(rows_of: Callable[[Profile], Mapping[str, Any]]) -> dict[str, Any]:
        return {
            n: rows_of(profile_of[n])[n] for n in names if n in rows_of(profile_of[n])
        }

    return replace(
        profiles[0],
        node_ms=found(lambda p: p.node_ms),
        workspaces=found(lambda p: p.workspaces),
        fronts=found(lambda p: p.fronts),
    )


def _in_place(lowered: Lowered, nodes: Mapping[str, Node]) -> Lowered:
    """Return the graph with kernels that overwrite an input wherever they may."""
    calls, tensors = dict(lowered.calls), dict(lowered.graph.tensors)
    for node in nodes.values():
        call = calls[node.name]
        if call.into is not None:
            (taken,) = node.traits.overwrites
            calls[node.name] = replace(call, function=call.into)
            first = node.outputs[0]
            tensors[first] = replace(tensors[first], alias=node.inputs[taken])
    graph = replace(lowered.graph, tensors=MappingProxyType(tensors))
    return replace(lowered, graph=graph, calls=calls)
