"""The exporter: who is answered, who is not, and that nobody can hold it up."""

from __future__ import annotations

import base64
import gzip
import logging
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import bcrypt
import pytest

from live_kit import AGENT, until
from whyidle import exporter as module
from whyidle.clock import NS_PER_S, SystemClock
from whyidle.errors import UserError
from whyidle.exporter import PORT, Address, Exporter, listen, parse_listen
from whyidle.web_auth import NOBODY, Passwords
from whyidle.web_config import read_web_config

PAGE = b"# HELP a A.\n# TYPE a gauge\na 1.0\n" * 100

Make = Callable[..., Exporter]


def page(accept: str) -> tuple[bytes, str]:
    return PAGE, "application/openmetrics-text" if "openmetrics" in accept else "text/plain"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(module, "POLL_S", 0.05)  # closing waits for it
    made: list[Exporter] = []

    def start(web_config: Path | None = None) -> Exporter:
        free = listen(Address(AGENT, 0))
        port = int(free.getsockname()[1])
        free.close()
        made.append(Exporter(page, Address(AGENT, port), SystemClock(), web_config=web_config))
        return made[-1]

    yield start
    for one in made:
        one.close()


def ask(
    one: Exporter,
    path: str = "/metrics",
    method: str = "GET",
    context: ssl.SSLContext | None = None,
    headers: dict[str, str] | None = None,
    **more: str,
) -> tuple[int, bytes, dict[str, str]]:
    scheme = "http" if context is None else "https"
    request = urllib.request.Request(
        f"{scheme}://{AGENT}:{one.port}{path}", headers={**(headers or {}), **more}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=5, context=context) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


def raw(one: Exporter, data: bytes) -> bytes:
    with socket.create_connection((AGENT, one.port), timeout=5) as connection:
        got = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                got += part
        except OSError:
            pass  # cut before it was read to its end
        return got


def test_the_page_is_served_as_it_is_asked_for(make: Make) -> None:
    one = make()
    code, body, headers = ask(one)
    assert (code, body, headers["Content-Type"]) == (200, PAGE, "text/plain")
    _, _, headers = ask(one, Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"] == "application/openmetrics-text"
    _, body, headers = ask(one, headers={"Accept-Encoding": "gzip"})
    assert gzip.decompress(body) == PAGE and len(body) < len(PAGE) / 10
    code, body, headers = ask(one, method="HEAD")
    assert (code, body, headers["Content-Length"]) == (200, b"", str(len(PAGE)))
    assert ask(one, "/-/healthy")[0] == ask(one, "/-/ready")[0] == ask(one, "/")[0] == 200
    assert ask(one, "/else")[0] == 404
    assert ask(one, method="POST")[0] == 501
    assert one.served.answers == {200: 7, 404: 1, 501: 1}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"GET",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
        b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"GET /metrics HTTP/1.1\r\nA: " + b"b" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nAuthorization: Basic \xff\xfe\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        os.urandom(4096),
        bytes(4096),
    ],
    ids=[
        "nothing",
        "newline",
        "word",
        "version",
        "http09",
        "tls",
        "headers",
        "header",
        "path",
        "auth",
        "length",
        "noise",
        "zeros",
    ],
)
def test_what_is_malformed_costs_its_sender_the_answer(make: Make, data: bytes) -> None:
    one = make()
    answer = raw(one, data)
    # Nothing of it is sent back, unless it can be read as a request after all.
    assert len(answer) < 300 or answer.endswith(PAGE)
    assert ask(one)[:2] == (200, PAGE)


def test_a_request_is_not_read_beyond_its_limit() -> None:
    assert module.REQUEST_LIMIT_BYTES <= 64 << 10


def test_slow_clients_fill_their_places_and_lose_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEADLINE_NS", 3 * NS_PER_S)
    one = make()
    began = time.monotonic()
    slow = [
        socket.create_connection((AGENT, one.port), timeout=5)
        for _ in range(module.CONNECTIONS_MAX)
    ]
    for connection in slow:
        connection.sendall(b"GET /met")
    until(lambda: raw(one, b"GET /metrics HTTP/1.1\r\n\r\n") == b"", "all places are taken")
    assert one.served.refused > 0
    # A byte now and then buys nobody more time.
    while time.monotonic() - began < 2.5:
        for connection in slow:
            connection.sendall(b"r")
        time.sleep(0.2)
    until(lambda: ask(one)[0] == 200, "places are free again", 5)
    assert time.monotonic() - began < 6
    assert one.served.late == module.CONNECTIONS_MAX
    for connection in slow:
        connection.close()


def test_a_port_that_is_taken_is_a_sentence(make: Make) -> None:
    one = make()
    with pytest.raises(UserError, match=r"cannot serve metrics on .*: Address already in use"):
        listen(Address(AGENT, one.port))


def test_addresses() -> None:
    assert parse_listen("10.0.0.1:80") == Address("10.0.0.1", 80)
    assert parse_listen("node7") == Address("node7", PORT)
    assert parse_listen(":9000") == Address("", 9000)
    assert parse_listen("[::1]:9000") == Address("::1", 9000)
    assert str(parse_listen("[::1]:9000")) == "[::1]:9000"
    for wrong in ("", "a:b", "1.2.3.4:0", "1.2.3.4:65536", "::1", "a b:1", "a:1:2", "a:123456"):
        with pytest.raises(UserError, match="is no address to listen on"):
            parse_listen(wrong)


def certificate(folder: Path, name: str = "server") -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl")
    subprocess.run(
        [
            *(program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName=IP:{AGENT}"),
            *("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")),
        ],
        check=True,
        capture_output=True,
    )


TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "server.crt"))


def test_tls(make: Make, tmp_path: Path) -> None:
    certificate(tmp_path)
    (tmp_path / "web.yml").write_text(
        TLS + "http_server_config:\n  headers:\n    X-Frame-Options: deny\n"
    )
    one = make(tmp_path / "web.yml")
    code, body, headers = ask(one, context=trusting(tmp_path))
    assert (code, body, headers["X-Frame-Options"]) == (200, PAGE, "deny")
    raw(one, b"GET /metrics HTTP/1.1\r\n\r\n")  # plain HTTP is no answer, and no harm
    until(lambda: one.served.broken == 1, "counted")
    with socket.create_connection((AGENT, one.port), timeout=5):  # a handshake that never comes
        assert ask(one, context=trusting(tmp_path))[0] == 200


def test_client_certificates(make: Make, tmp_path: Path) -> None:
    certificate(tmp_path)
    certificate(tmp_path, "client")
    (tmp_path / "web.yml").write_text(
        TLS
        + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: client.crt\n"
        + "  min_version: TLS12\n  max_version: TLS12\n"
    )
    one = make(tmp_path / "web.yml")
    context = trusting(tmp_path)
    with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
        ask(one, context=context)
    context = trusting(tmp_path)
    context.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")
    assert ask(one, context=context)[0] == 200


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def users(**passwords: str) -> str:
    lines = (
        f"  {name}: {bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()}\n"
        for name, password in passwords.items()
    )
    return "basic_auth_users:\n" + "".join(lines)


def test_basic_authentication(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "web.yml").write_text(users(alice="right", bob="other"))
    computed: list[bytes] = []
    real = bcrypt.checkpw

    def counting(password: bytes, hashed: bytes) -> bool:
        computed.append(password)
        return real(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", counting)
    one = make(tmp_path / "web.yml")
    code, body, headers = ask(one)
    assert (code, body) == (401, b"Unauthorized\n")
    assert headers["WWW-Authenticate"].startswith("Basic ")
    for _ in range(5):
        assert ask(one, Authorization=basic("alice", "right"))[0] == 200
    assert ask(one, Authorization=basic("bob", "other"))[0] == 200
    assert len(computed) == 2  # a scrape costs its hash once
    for name, password in (
        ("alice", "wrong"),
        ("bob", "right"),
        ("eve", "x"),
        ("", ""),
        ("a", "\0"),
    ):
        assert ask(one, Authorization=basic(name, password))[0] == 401
    for header in ("Basic", "Basic !!!", "Bearer abc", basic("alice", "x" * 200)):
        assert ask(one, Authorization=header)[0] == 401
    assert ask(one, "/-/healthy")[0] == 401


def test_names_that_do_not_exist_cost_as_much_as_those_that_do() -> None:
    assert bcrypt.checkpw(b"anything", NOBODY) is False
    assert NOBODY[4:6] == b"10"


def test_guesses_do_not_push_out_who_was_right() -> None:
    hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
    passwords = Passwords({"a": hashed})
    assert passwords.allow(basic("a", "right"))
    for guess in range(200):
        assert not passwords.allow(basic("a", str(guess)))
    assert len(passwords._known) <= 64
    assert passwords.allow(basic("a", "right"))


def test_a_changed_file_is_taken_over_and_a_bad_one_is_not(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "web.yml"
    path.write_text(users(alice="old"))
    one = make(path)
    assert ask(one, Authorization=basic("alice", "old"))[0] == 200
    path.write_text(users(alice="new"))
    assert ask(one, Authorization=basic("alice", "old"))[0] == 401
    assert ask(one, Authorization=basic("alice", "new"))[0] == 200
    path.write_text("basic_auth_user: {}\n")
    with caplog.at_level(logging.ERROR, "whyidle"):
        assert ask(one, Authorization=basic("alice", "new"))[0] == 200
        assert ask(one)[0] == 401
    assert one.served.reload_failed
    assert len(caplog.records) == 1 and "did you mean `basic_auth_users`?" in caplog.text
    path.unlink()
    assert ask(one)[0] == 401
    path.write_text("")
    assert ask(one)[0] == 200
    assert not one.served.reload_failed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tls_server_config:\n  cert_file: a\n", "2:3: tls_server_config lacks key_file"),
        ("tls_server_confg: {}\n", "1:1: `tls_server_confg` is not supported; did you mean"),
        ("rate_limit:\n  burst: 1\n", "1:1: `rate_limit` is not supported; known: tls_server"),
        ("basic_auth_users:\n  a: secret\n", "2:6: this is not a bcrypt hash; make one with"),
        ("basic_auth_users: [a]\n", "1:19: basic_auth_users maps names to bcrypt hashes"),
        (
            f"basic_auth_users:\n  a: $2y$31${'a' * 53}\n",
            "2:6: a hash of more than cost 14 takes seconds",
        ),
        (
            "tls_server_config:\n  cert_file: no.crt\n  key_file: no.key\n",
            "2:14: cannot be used (No such file or directory)",
        ),
        ("[1]\n", "1:1: the file has to be a mapping of keys to values"),
        ("a: 1\na: 2\n", "2:1: `a` is given twice"),
        ("http_server_config:\n  headers:\n    X: y\n", "3:5: `X` is not supported in headers"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "web.yml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_web_config(path)
    assert f"{path}:{said}" in str(caught.value)


def test_choices_of_tls(tmp_path: Path) -> None:
    certificate(tmp_path)
    path = tmp_path / "web.yml"
    for more, said in (
        ("  min_version: TLS10\n", "4:16: 'TLS10' is not a TLS version that is still safe"),
        ("  client_ca_file: server.crt\n", "client_ca_file needs a client_auth_type"),
        ("  client_auth_type: RequireAnyClientCert\n", "is not a client_auth_type here"),
        ("  client_auth_type: RequireAndVerifyClientCert\n", "without client_ca_file"),
        ("  cipher_suites: [TLS_NULL]\n", "is not a known cipher suite"),
    ):
        path.write_text(TLS + more)
        with pytest.raises(UserError) as caught:
            read_web_config(path)
        assert said in str(caught.value)
    path.write_text(TLS + "  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384]\n")
    tls = read_web_config(path).tls
    assert tls is not None
    names = {str(cipher["name"]) for cipher in tls.get_ciphers()}
    assert {name for name in names if not name.startswith("TLS_")} == {
        "ECDHE-ECDSA-AES256-GCM-SHA384"
    }


def test_a_file_that_asks_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text("# nothing\n\n")
    found = read_web_config(path)
    assert found.tls is None and not found.users and not found.headers
