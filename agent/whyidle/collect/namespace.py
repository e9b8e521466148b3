"""Network namespaces: a rank in one of its own moves its bytes over interfaces the agent lacks.

Source: namespaces(7). A namespace is named by the inode number of /proc/PID/ns/net.
"""

from __future__ import annotations

from whyidle.host import Host, NotRecordedError

OWN = ""


def net_namespace(host: Host, pid: int) -> str | None:
    """Return the network namespace of a process: OWN, a number, or None where nobody can tell.

    Raises PermissionError where it may not be looked at, and FileNotFoundError when it has ended.
    """
    try:
        found, own = host.ask("net_namespace", pid), host.ask("net_namespace", 0)
    except (KeyError, NotRecordedError):
        return None  # a recorded tree, or a journal from before this was asked
    return OWN if found == own else str(found)
