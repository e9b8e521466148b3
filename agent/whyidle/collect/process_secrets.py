"""What of a process is never written down: the secrets on its command line.

An option's name tells: `--api-key=...`, `--token ...`, `PASSWORD=...`, and the password of a URL.
What it is called stays, so that a person sees what was left out.
"""

from __future__ import annotations

import re

# As a word of its own in the name: `hf-token` and `API_KEY`, not `tokenizer` and `max-tokens`.
_NAME = (
    rb"(?:[\w.-]*[._-])?"
    rb"(?:apikey|key|secrets?|token|passw(?:or)?d|passphrase|credentials?|auth)"
    rb"(?:[._-][\w.-]*)?"
)
_OPTION = re.compile(rb"--?" + _NAME, re.IGNORECASE)
_ASSIGNED = re.compile(rb"(?<![\w.-])(-{0,2}" + _NAME + rb")=[^\0]*", re.IGNORECASE)
_URL = re.compile(rb"(?<=://)[^/@\s\0]*:[^/@\s\0]*@")
MASK = b"***"


def mask_command(data: bytes) -> bytes:
    """Return what /proc/PID/cmdline reads with secrets masked; masking twice changes nothing."""
    words = data.split(b"\0")
    for at, word in enumerate(words):
        if at and _OPTION.fullmatch(words[at - 1]) and word and not word.startswith(b"-"):
            words[at] = MASK
        else:
            words[at] = _ASSIGNED.sub(rb"\1=" + MASK, _URL.sub(MASK + b"@", word))
    return b"\0".join(words)
