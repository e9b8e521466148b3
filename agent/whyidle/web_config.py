"""Web configuration files: TLS and basic authentication for the exporter.

The shape is that of Prometheus' exporter-toolkit (its page "Web configuration"), so that a file for
node_exporter serves here too. What this server cannot do as the file says is refused in a sentence,
never left out: a file that asks for protection must not be half obeyed.
"""

from __future__ import annotations

import difflib
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from whyidle.strict_yaml import Problem, ProblemsError, YamlNode, parse_yaml, read_text

WHAT = "web configuration"
_T = TypeVar("_T")
_VERSIONS = MappingProxyType({"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3})
_CLIENT_AUTH = MappingProxyType(
    {
        "NoClientCert": ssl.CERT_NONE,
        "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
        "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
    }
)
# Names of IANA, as the file has them, in OpenSSL's words. TLS 1.3 has no others to choose.
_CIPHERS = MappingProxyType(
    {
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    }
)
_HEADERS = (
    "Content-Security-Policy",
    "Strict-Transport-Security",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "X-XSS-Protection",
)
_BCRYPT = re.compile(r"\$2[abxy]\$\d\d\$[./A-Za-z0-9]{53}")
# A hash of cost 14 takes a second of a core; who can reach the port could spend them all.
_COST_MAX = 14
_TLS_KEYS = (
    "cert_file",
    "key_file",
    "client_auth_type",
    "client_ca_file",
    "min_version",
    "max_version",
    "cipher_suites",
)
_TOP_KEYS = ("tls_server_config", "http_server_config", "basic_auth_users")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """What a file asks for: `tls` is None for plain HTTP; `users` map names to bcrypt hashes."""

    tls: ssl.SSLContext | None = None
    users: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    # Files that it was made of; a change of any calls for reading it anew.
    files: tuple[Path, ...] = ()


def read_web_config(path: Path) -> WebConfig:
    """Read a web configuration file; raises ProblemsError with everything wrong in it."""
    text = read_text(path, what=WHAT)
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        return WebConfig(files=(path,))  # an empty file asks for nothing, as for other exporters
    root = parse_yaml(text, str(path), what=WHAT)
    reader = _Reader(path)
    top = reader.mapping(root, _TOP_KEYS, "")
    users = reader.users(top.get("basic_auth_users"))
    headers = reader.http(top.get("http_server_config"))
    tls = reader.tls(top.get("tls_server_config"))
    if reader.problems:
        raise ProblemsError(reader.problems)
    return WebConfig(tls=tls, users=users, headers=headers, files=(path, *reader.files))


class _Reader:
    """Reads the parts of a file and gathers what is wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problems: list[Problem] = []
        self.files: list[Path] = []

    def mapping(self, node: YamlNode, known: tuple[str, ...], where: str) -> dict[str, YamlNode]:
        """Return the values of a mapping by key; keys that are not known are problems."""
        if node.kind != "mapping":
            self.problem(node, f"{where or 'the file'} has to be a mapping of keys to values")
            return {}
        found: dict[str, YamlNode] = {}
        for key, value in node.pairs:
            if key.text in known:
                found[key.text] = value
                continue
            near = difflib.get_close_matches(key.text, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"
            self.problem(
                key, f"`{key.text}` is not supported{' in ' + where if where else ''}; {hint}"
            )
        return found

    def users(self, node: YamlNode | None) -> dict[str, str]:
        """Return password hashes by user."""
        found: dict[str, str] = {}
        if node is None:
            return found
        if node.kind != "mapping":
            self.problem(node, "basic_auth_users maps names to bcrypt hashes")
            return found
        for key, value in node.pairs:
            if not _BCRYPT.fullmatch(value.text):
                message = "this is not a bcrypt hash; make one with: htpasswd -nBC 10 ''"
                self.problem(value, message)
            elif int(value.text[4:6]) > _COST_MAX:
                self.problem(value, f"a hash of more than cost {_COST_MAX} takes seconds; use 10")
            elif ":" in key.text or not key.text:
                self.problem(key, "a user's name has at least one character and no colon")
            else:
                found[key.text] = value.text
        return found

    def http(self, node: YamlNode | None) -> dict[str, str]:
        """Return the headers that every answer gets."""
        if node is None:
            return {}
        parts = self.mapping(node, ("http2", "headers"), "http_server_config")
        if "http2" in parts and parts["http2"].text not in ("true", "false"):
            self.problem(parts["http2"], "http2 is true or false; only HTTP/1 is spoken either way")
        if "headers" not in parts:
            return {}
        given = self.mapping(parts["headers"], _HEADERS, "headers")
        for value in given.values():
            if not value.text.isprintable() or value.kind != "scalar":
                self.problem(value, "a header is one line of text")
        return {name: value.text for name, value in given.items()}

    def tls(self, node: YamlNode | None) -> ssl.SSLContext | None:
        """Return the TLS settings; None for plain HTTP."""
        if node is None:
            return None
        parts = self.mapping(node, _TLS_KEYS, "tls_server_config")
        missing = [key for key in ("cert_file", "key_file") if key not in parts]
        if missing:
            if not self.problems:
                self.problem(node, f"tls_server_config lacks {' and '.join(missing)}")
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        cert, key = self._file(parts["cert_file"]), self._file(parts["key_file"])
        self._try(parts["cert_file"], lambda: context.load_cert_chain(cert, key))
        low = self._choice(parts.get("min_version"), _VERSIONS, "a TLS version that is still safe")
        high = self._choice(parts.get("max_version"), _VERSIONS, "a TLS version that is still safe")
        context.minimum_version = low or context.minimum_version
        if high is not None:
            context.maximum_version = high
        self._ciphers(parts.get("cipher_suites"), context)
        self._clients(parts, node, context)
        return context

    def _clients(
        self, parts: Mapping[str, YamlNode], node: YamlNode, context: ssl.SSLContext
    ) -> None:
        if "client_ca_file" in parts:
            file = self._file(parts["client_ca_file"])
            self._try(parts["client_ca_file"], lambda: context.load_verify_locations(file))
        mode = self._choice(parts.get("client_auth_type"), _CLIENT_AUTH, "a client_auth_type here")
        if mode is None:
            # A CA without a word on its use would protect nothing: the toolkit refuses that too.
            if "client_ca_file" in parts and "client_auth_type" not in parts:
                self.problem(parts["client_ca_file"], "client_ca_file needs a client_auth_type")
            return
        if mode != ssl.CERT_NONE and "client_ca_file" not in parts:
            self.problem(node, "client certificates cannot be verified without client_ca_file")
        context.verify_mode = mode

    def _ciphers(self, node: YamlNode | None, context: ssl.SSLContext) -> None:
        if node is None:
            return
        if node.kind != "sequence" or not node.items:
            self.problem(node, "cipher_suites is a list of names")
            return
        chosen = [self._choice(item, _CIPHERS, "a known cipher suite") for item in node.items]
        if names := [name for name in chosen if name is not None]:
            self._try(node, lambda: context.set_ciphers(":".join(names)))

    def _choice(self, node: YamlNode | None, known: Mapping[str, _T], what: str) -> _T | None:
        if node is None:
            return None
        if node.text not in known:
            near = ", ".join(known)
            self.problem(node, f"{node.text!r} is not {what}; use one of {near}")
        return known.get(node.text)

    def _file(self, node: YamlNode) -> Path:
        """Return a file's path; relative ones begin at the folder of the configuration."""
        path = self._path.parent / node.text
        self.files.append(path)
        return path

    def _try(self, node: YamlNode, load: Callable[[], object]) -> None:
        try:
            load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "strerror", None) or str(error)
            self.problem(node, f"cannot be used ({reason}); check the file and its permissions")

    def problem(self, node: YamlNode, message: str) -> None:
        """Note what is wrong, and where."""
        self.problems.append(
            Problem(file=str(self._path), line=node.line, column=node.column, message=message)
        )
