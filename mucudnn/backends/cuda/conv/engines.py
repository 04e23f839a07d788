"""Enumeration of all engine configurations of cuDNN for a convolution.

These are the heuristics' lists A, B and FALLBACK in their order, then the default
configuration of every engine index, each (engine, knobs) once. The exact workspace of a
configuration is an attribute, read before any plan is built.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mucudnn.backends.cuda._cudnn import Calls
from mucudnn.backends.cuda._enums import (
    Attribute,
    AttributeType,
    BehaviorNote,
    DescriptorType,
    HeurMode,
    NumericalNote,
)
from mucudnn.backends.cuda.descriptors import Descriptor
from mucudnn.errors import MucudnnError, UnsupportedError
from mucudnn.ir.numerics import DOWN_CONVERT, NATIVE, TF32, Traits

__all__ = ["Engine", "configuration", "engine_name", "engines", "parse_engine_name"]

_HEURISTICS = (HeurMode.A, HeurMode.B, HeurMode.FALLBACK)
_MOST_KNOBS = 40
_MOST_NOTES = 32
_NAME = re.compile(r"eng(\d+)((?:_k\d+=-?\d+)*)")
_KNOB = re.compile(r"_k(\d+)=(-?\d+)")

Knobs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine with knobs, named as `eng22_k5=2_k14=0`, and its exact workspace."""

    name: str
    workspace: int
    traits: Traits
    config: Descriptor


def engine_name(index: int, knobs: Knobs) -> str:
    """Return the name of an engine index and its (knob type, value) pairs."""
    return f"eng{index}" + "".join(f"_k{kind}={value}" for kind, value in knobs)


def parse_engine_name(name: str) -> tuple[int, Knobs]:
    """Parse a name made by `engine_name`."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise UnsupportedError(f"{name!r} is no engine of cuDNN's graph API")
    knobs = tuple((int(k), int(v)) for k, v in _KNOB.findall(match[2]))
    return int(match[1]), knobs


def engines(
    calls: Calls, graph: Descriptor, device: Descriptor | None, dtype: str
) -> tuple[Engine, ...]:
    """Return all engine configurations for a finalized graph, in heuristic order.

    `device` is a description if there is no device; `dtype` is that of the operands.
    """
    found: dict[str, Engine] = {}
    for config in _configurations(calls, graph, device):
        try:
            engine = _read(calls, config, dtype)
        except MucudnnError:  # not available on this device after all
            continue
        found.setdefault(engine.name, engine)
    return tuple(found.values())


def configuration(
    calls: Calls, graph: Descriptor, device: Descriptor | None, name: str
) -> Descriptor:
    """Rebuild the configuration of a name, without asking the heuristics."""
    index, knobs = parse_engine_name(name)
    config = Descriptor(calls, DescriptorType.ENGINECFG)
    config.set(Attribute.ENGINECFG_ENGINE, _engine(calls, graph, device, index))
    choices = []
    for knob, value in knobs:
        choice = Descriptor(calls, DescriptorType.KNOB_CHOICE)
        kind = AttributeType.KNOB_TYPE
        choice.set(Attribute.KNOB_CHOICE_KNOB_TYPE, knob, kind=kind)
        choice.set(Attribute.KNOB_CHOICE_KNOB_VALUE, value)
        choices.append(choice.finalize())
    if choices:
        config.set(Attribute.ENGINECFG_KNOB_CHOICES, *choices)
    return config.finalize()


def _configurations(
    calls: Calls, graph: Descriptor, device: Descriptor | None
) -> Iterator[Descriptor]:
    for mode in _HEURISTICS:
        try:
            yield from _recommended(calls, graph, device, mode)
        except UnsupportedError:  # the heuristic's list is empty
            continue
    (count,) = graph.get(Attribute.OPERATIONGRAPH_ENGINE_GLOBAL_COUNT)
    for index in range(count):
        try:
            engine = _engine(calls, graph, device, index)
            config = Descriptor(calls, DescriptorType.ENGINECFG)
            yield config.set(Attribute.ENGINECFG_ENGINE, engine).finalize()
        except MucudnnError:  # most engines need other devices, types or shapes
            continue


def _recommended(
    calls: Calls, graph: Descriptor, device: Descriptor | None, mode: HeurMode
) -> list[Descriptor]:
    heuristic = Descriptor(calls, DescriptorType.ENGINEHEUR)
    heuristic.set(Attribute.ENGINEHEUR_OPERATION_GRAPH, graph)
    heuristic.set(Attribute.ENGINEHEUR_MODE, mode)
    if device is not None:
        heuristic.set(Attribute.ENGINEHEUR_DEVICEPROP, device)
    heuristic.finalize()
    results = Attribute.ENGINEHEUR_RESULTS
    count = heuristic.count(results, AttributeType.BACKEND_DESCRIPTOR)
    configs = [Descriptor(calls, DescriptorType.ENGINECFG) for _ in range(count)]
    filled = heuristic.get_into(results, configs)
    return [config.keep(heuristic) for config in configs[:filled]]


def _engine(
    calls: Calls, graph: Descriptor, device: Descriptor | None, index: int
) -> Descriptor:
    engine = Descriptor(calls, DescriptorType.ENGINE)
    engine.set(Attribute.ENGINE_OPERATION_GRAPH, graph)
    engine.set(Attribute.ENGINE_GLOBAL_INDEX, index)
    if device is not None:
        engine.set(Attribute.ENGINE_DEVICEPROP, device)
    return engine.finalize()


def _read(calls: Calls, config: Descriptor, dtype: str) -> Engine:
    engine = Descriptor(calls, DescriptorType.ENGINE)
    config.get_into(Attribute.ENGINECFG_ENGINE, [engine])
    (index,) = engine.get(Attribute.ENGINE_GLOBAL_INDEX)
    (workspace,) = config.get(Attribute.ENGINECFG_WORKSPACE_SIZE)
    return Engine(
        name=engine_name(index, _knobs(calls, config)),
        workspace=workspace,
        traits=_traits(engine, dtype),
        config=config,
    )


def _knobs(calls: Calls, config: Descriptor) -> Knobs:
    # The library reports 0 choices if asked for their number alone.
    kind_of = DescriptorType.KNOB_CHOICE
    choices = [Descriptor(calls, kind_of) for _ in range(_MOST_KNOBS)]
    count = config.get_into(Attribute.ENGINECFG_KNOB_CHOICES, choices)
    knobs = []
    for choice in choices[:count]:
        (kind,) = choice.get(Attribute.KNOB_CHOICE_KNOB_TYPE, AttributeType.KNOB_TYPE)
        (value,) = choice.get(Attribute.KNOB_CHOICE_KNOB_VALUE)
        knobs.append((kind, value))
    return tuple(knobs)


def _traits(engine: Descriptor, dtype: str) -> Traits:
    numerical = engine.get(
        Attribute.ENGINE_NUMERICAL_NOTE, AttributeType.NUMERICAL_NOTE, _MOST_NOTES
    )
    behavior = engine.get(
        Attribute.ENGINE_BEHAVIOR_NOTE, AttributeType.BEHAVIOR_NOTE, _MOST_NOTES
    )
    if NumericalNote.DOWN_CONVERT_INPUTS in numerical:
        mode = DOWN_CONVERT
    elif NumericalNote.TENSOR_CORE in numerical and dtype == "float32":
        mode = TF32
    else:
        mode = NATIVE
    return Traits(
        deterministic=NumericalNote.NONDETERMINISTIC not in numerical,
        math_mode=mode,
        notes=(
            *(_note(NumericalNote, "numerical_note", value) for value in numerical),
            *(_note(BehaviorNote, "behavior_note", value) for value in behavior),
        ),
    )


def _note(
    kinds: type[NumericalNote] | type[BehaviorNote], unknown: str, value: int
) -> str:
    try:
        return kinds(value).name.lower()
    except ValueError:  # a note of a newer library
        return f"{unknown}_{value}"
