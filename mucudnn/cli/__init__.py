"""Command line: one module per command, or two that share their subject.

Nothing here imports NumPy before a command runs, so that `--help` is instant.
"""

from mucudnn.cli.app import main
from mucudnn.cli.cache import cache
from mucudnn.cli.demo import demo
from mucudnn.cli.doctor import doctor, info
from mucudnn.cli.fleet import fleet
from mucudnn.cli.memory import memory
from mucudnn.cli.train import train
from mucudnn.cli.tune import explain, tune

__all__ = ["main"]

for _command in (demo, tune, memory, fleet, train, explain, cache, info, doctor):
    main.add_command(_command)
