"""Becomes a command inside of cgroups and on chosen CPUs, as a scheduler would start it.

python -m stalls.enter --procs FILE --cpus 0,1 -- CMD ...
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def main() -> None:
    """The command takes this process's place: nothing of it stays outside of the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--procs", type=Path, action="append", default=[])
    parser.add_argument("--cpus")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    for procs in options.procs:
        procs.write_text(str(os.getpid()), encoding="ascii")
    if options.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in options.cpus.split(",")})
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
