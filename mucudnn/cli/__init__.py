"""Command line: one module per command.

Nothing here imports NumPy before a command runs, so that `--help` is instant.
"""

from mucudnn.cli.app import main
from mucudnn.cli.cache import cache
from mucudnn.cli.demo import demo
from mucudnn.cli.doctor import doctor
from mucudnn.cli.explain import explain
from mucudnn.cli.fleet import fleet
from mucudnn.cli.info import info
from mucudnn.cli.memory import memory
from mucudnn.cli.train import train
from mucudnn.cli.tune import tune

__all__ = ["main"]

for _command in (demo, tune, memory, fleet, train, explain, cache, info, doctor):
    main.add_command(_command)
