"""One compilation of passes for all sizes that they come with.

The first passes are compiled for the sizes that they have. When passes of the same
operations come with other sizes, sizes of inputs that differ become symbols, and every
other number that differs, such as an argument of `view`, a term of these symbols like
`4*s0 + 1`. The passes are compiled again with symbolic sizes, and from then on a size
only has to be planned.

Terms are found from the sizes that were seen, and are guesses. So every further capture
is compared with them, number by number, and PyTorch's guards are evaluated for its
sizes: a wrong guess costs a compilation, never a wrong result.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from mucudnn.torch.costs.meters import Links
from mucudnn.torch.lowering.lowered import NotCompiledError

_MOST_SYMBOLS = 5
"""Different sizes of inputs up to which terms are looked for."""

_DEGREE = 3
"""Factors of a product of symbols."""


@dataclass(frozen=True)
class Term:
    """A number that follows from sizes: `factor` times a product, and `constant`.

    Attributes:
        factor: The factor, 1/2 where a size is halved.
        powers: Power of each size in the product; all 0 for a plain number.
        constant: What is added.
    """

    factor: Fraction
    powers: tuple[int, ...]
    constant: int

    def __call__(self, sizes: Sequence[Any]) -> Any:
        """Return the number for sizes, which may be symbolic."""
        powers = zip(sizes, self.powers, strict=True)
        factors = [size for size, power in powers for _ in range(power)]
        if not factors:
            return self.constant
        value = math.prod(factors[1:], start=factors[0])
        if self.factor.numerator != 1:
            value = value * self.factor.numerator
        if self.factor.denominator != 1:
            value = value // self.factor.denominator
        return value + self.constant if self.constant else value


def find_term(numbers: Sequence[int], sizes: Sequence[Sequence[int]]) -> Term | None:
    """Return a term that has these numbers at these sizes; None if none is found."""
    none = (0,) * len(sizes[0])
    if len(set(numbers)) == 1:
        return Term(Fraction(0), none, numbers[0])
    every = itertools.product(range(_DEGREE + 1), repeat=len(none))
    products = sorted((p for p in every if 0 < sum(p) <= _DEGREE), key=sum)
    # Products as they are, before multiples of products, and multiples with a constant.
    for kind, powers in itertools.product(range(3), products):
        values = [math.prod(map(pow, each, powers)) for each in sizes]
        factor, constant = Fraction(1), 0
        if kind == 1:
            factor = Fraction(numbers[0], values[0])
        elif kind == 2 and values[-1] != values[0]:
            factor = Fraction(numbers[-1] - numbers[0], values[-1] - values[0])
            constant = math.floor(numbers[0] - factor * values[0])
        found = [factor * value + constant for value in values]
        if found == list(numbers):
            return Term(factor, powers, constant)
    return None


@dataclass(frozen=True)
class Sizes:
    """Sizes that are symbols, and all numbers of passes as terms of them.

    Attributes:
        places: Place of each symbol among the numbers.
        example: The sizes that passes are traced with.
        terms: Every number.
    """

    places: Sequence[int]
    example: Sequence[int]
    terms: Sequence[Term]

    @classmethod
    def of(cls, seen: Sequence[Sequence[int]], axes: int) -> "Sizes | None":
        """Find symbols and terms from all numbers that were seen; the last is traced.

        The first `axes` of all numbers are sizes of inputs.

        Returns:
            None if a size is 0 or 1, for which PyTorch compiles other kernels, or if
            only strides differ.

        Raises:
            NotCompiledError: A number has no term.
        """
        differ = [i for i in range(axes) if len({each[i] for each in seen}) > 1]
        rows = [each for each in seen if all(each[i] > 1 for i in differ)]
        if len(rows) < 2 or rows[-1] is not seen[-1]:
            return None
        columns = list(zip(*rows, strict=True))
        places: dict[tuple[int, ...], int] = {}
        for i in differ:
            if len(set(columns[i])) > 1:
                places.setdefault(columns[i], i)
        if not places:  # other strides
            return None
        if len(places) > _MOST_SYMBOLS:
            raise NotCompiledError(
                f"{len(places)} sizes of inputs differ, of which at most "
                f"{_MOST_SYMBOLS} can be compiled at once"
            )
        sizes = list(zip(*places, strict=True))
        terms = []
        for column in columns:
            term = find_term(column, sizes)
            if term is None:
                raise NotCompiledError(
                    f"no simple term of the sizes {sizes} is {column}, a number that "
                    "an operation is given"
                )
            terms.append(term)
        return cls(tuple(places.values()), sizes[-1], terms)

    def numbers(self, symbols: Sequence[Any]) -> Iterator[Any]:
        """Yield all numbers for sizes, which may be symbolic."""
        return (term(symbols) for term in self.terms)

    def found_in(self, numbers: Sequence[int]) -> Sequence[int] | None:
        """Return the sizes of which the terms are these numbers; None if none are."""
        sizes = [numbers[i] for i in self.places]
        equal = all(
            term(sizes) == n for term, n in zip(self.terms, numbers, strict=True)
        )
        return sizes if equal else None


@dataclass
class _Form:
    """Passes that differ in numbers only."""

    seen: list[Sequence[int]] = field(default_factory=list)
    compiled: list[tuple[Sizes, Any]] = field(default_factory=list)
    refused: bool = False


class CompiledSizes:
    """Compiled passes, by operations and sizes.

    Attributes:
        count: How often passes were compiled.
        reason: Why sizes are compiled for themselves; empty if they are not.
        links: Rates of copies, which are measured for the first size only.
        updates: Kernels of updates, by what they compute; None for what has failed.
    """

    def __init__(self) -> None:
        self.links: list[Links] = []
        self.updates: dict[Hashable, Any] = {}
        self._forms: dict[Hashable, _Form] = {}
        self.count = 0
        self.reason = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledSizes, ()  # a copy compiles for itself

    def find(
        self,
        form: Hashable,
        numbers: Sequence[int],
        axes: int,
        compiled: Callable[[Sizes], Any],
    ) -> tuple[Any, Sequence[int]]:
        """Return compiled passes, and the values of their symbols.

        `form` is equal for passes that differ in numbers only, of which the first
        `axes` are sizes of inputs.

        Raises:
            NotCompiledError: They cannot be compiled.
        """
        known = self._forms.setdefault(form, _Form())
        for its, passes in known.compiled:
            sizes = its.found_in(numbers)
            if sizes is not None and passes.holds(sizes):
                return passes, sizes
        at: Sizes | None = None
        made: Any = None
        if known.seen and not known.refused:
            try:
                at = Sizes.of([*known.seen, numbers], axes)
                made = at and compiled(at)
            except NotCompiledError as e:
                at, known.refused, self.reason = None, True, str(e)
        if at is None:
            at = Sizes((), (), [Term(Fraction(0), (), n) for n in numbers])
            made = compiled(at)
        known.seen.append(numbers)
        known.compiled.insert(0, (at, made))
        self.count += 1
        return made, [numbers[i] for i in at.places]

    def refuse(self, form: Hashable, reason: str) -> None:
        """Compile each size of passes for itself from now on."""
        known = self._forms[form]
        known.compiled = [each for each in known.compiled if not each[0].places]
        known.refused, self.reason = True, reason
