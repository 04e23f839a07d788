"""How many examples a property is tried on: few and always the same, or many by chance.

`make test` tries the same examples on every machine, so that it fails for whoever broke
something and for nobody else. `make fuzz` looks for what nobody thought of.
"""

from typing import Any

from hypothesis import HealthCheck, settings

STEADY, FUZZ = "steady", "fuzz"
_MOST = 100
_SLOW_MACHINE = [HealthCheck.too_slow]
_TIMES = 20


def register_profiles() -> None:
    """Make the profiles known to `--hypothesis-profile`; the steady one is in force."""
    settings.register_profile(
        STEADY,
        derandomize=True,
        deadline=None,
        max_examples=_MOST,
        suppress_health_check=_SLOW_MACHINE,
    )
    settings.register_profile(
        FUZZ,
        deadline=None,
        max_examples=_TIMES * _MOST,
        print_blob=True,
        suppress_health_check=_SLOW_MACHINE,
    )
    settings.load_profile(STEADY)


def examples(most: int = _MOST, **others: Any) -> settings:
    """Settings with `most` examples, times what the profile in force multiplies by."""
    times = settings().max_examples / _MOST
    return settings(max_examples=max(1, round(times * most)), **others)
