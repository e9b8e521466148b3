"""A local DCGM exporter's page, for GPUs without GPM: asked only where somebody named it.

WHYIDLE_DCGM_URL names it, such as http://localhost:9400/metrics. Without it no connection is made.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from whyidle.host import Answer

ENVIRONMENT = "WHYIDLE_DCGM_URL"
# An exporter of this machine answers in 10 ms; one that is slower must not hold the collector up.
TIMEOUT_S = 1.0
# 8 GPUs with all fields and labels of pods make 200 KB.
LIMIT_BYTES = 4 << 20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Goes nowhere but where it was sent."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Return no request: the answer is the redirect itself, an error."""


class Dcgm:
    """Asks the exporter that the environment names."""

    __slots__ = ("_environ", "_opener")

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        # Proxies of the environment are for the world, not for this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def __call__(self) -> Answer:
        """Return the page; None where no exporter is named. Raises OSError."""
        url = self._environ.get(ENVIRONMENT, "")
        if not url:
            return None
        if not url.startswith(("http://", "https://")):
            raise OSError(22, f"{ENVIRONMENT} is no http address", url)
        try:
            with self._opener.open(url, timeout=TIMEOUT_S) as answer:
                data: bytes = answer.read(LIMIT_BYTES + 1)
        except urllib.error.HTTPError as error:
            error.close()
            raise OSError(5, f"the DCGM exporter answered {error.code}", url) from None
        except urllib.error.URLError as error:
            reason = error.reason
            number = reason.errno if isinstance(reason, OSError) and reason.errno else 5
            raise OSError(number, f"no DCGM exporter answers ({reason})", url) from None
        if len(data) > LIMIT_BYTES:
            raise OSError(27, f"is larger than {LIMIT_BYTES >> 20} MiB", url)
        return data.decode("utf-8", "replace")
