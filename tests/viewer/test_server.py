"""The server answers its own page alone."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import xckpt
from xckpt.viewer.model import DiffPage
from xckpt.viewer.server import Answer, PageServer
from xckpt.viewer.view import CheckpointView


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    state = {"w": np.array([[0.0, np.nan], [np.inf, 6.0]]), "step": 3}
    # A worker may make it twice, with tests of other modules between.
    xckpt.save("memory://test-server", state, overwrite=True)
    with PageServer(xckpt.view("memory://test-server")) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def ask(
    server: PageServer, path: str, host: str | None = None, method: str = "GET"
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    headers = {} if host is None else {"Host": host}
    connection.request(method, path.replace("TOKEN", server.token), headers=headers)
    response = connection.getresponse()
    answer = response.status, response.read().decode(), dict(response.getheaders())
    connection.close()
    return answer


def test_it_listens_on_the_loopback_address_alone(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_the_page(server: PageServer) -> None:
    status, html, headers = ask(server, "/TOKEN/")
    assert (status, html[:15]) == (200, "<!doctype html>")
    assert '"served":true' in html
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers


def test_values(server: PageServer) -> None:
    status, text, _ = ask(server, "/TOKEN/values?leaf=0&down=0&across=1&at=0,0")
    values = json.loads(text)
    assert status == 200
    assert (values["nans"], values["positive"], values["cells"]) == (1, 1, [0.0, None, None, 6.0])


@pytest.mark.parametrize(
    "path",
    ["/", "/TOKE/", "/TOKEN", "/TOKEN/other", "/TOKENx/", "/x/TOKEN/", "*", "TOKEN"],
)
def test_other_paths_are_not_found(server: PageServer, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:PORT", "127.0.0.1", "127.0.0.1:1"])
def test_other_hosts_are_refused(server: PageServer, host: str) -> None:
    host = host.replace("PORT", str(server.server_port))
    status, text, _ = ask(server, "/TOKEN/", host=host)
    assert status == 403
    assert "doctype" not in text


@pytest.mark.parametrize("path", ["/TOKEN/", "/TOKEN/values?leaf=0&down=0&across=1&at=0,0", "/x/"])
def test_the_head_of_an_answer(server: PageServer, path: str) -> None:
    """As that of the answer to GET, and nothing behind it."""
    status, text, headers = ask(server, path)
    assert ask(server, path, method="HEAD")[:2] == (status, "")
    head = ask(server, path, method="HEAD")[2]
    assert {**head, "Date": ""} == {**headers, "Date": ""}
    assert int(head["Content-Length"]) == len(text.encode())


def test_the_head_for_another_host_is_refused(server: PageServer) -> None:
    assert ask(server, "/TOKEN/", host="evil.example", method="HEAD")[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(server: PageServer, method: str) -> None:
    assert ask(server, "/TOKEN/", method=method)[0] == 501


@pytest.mark.parametrize(
    "query",
    [
        *("", "leaf=a", "leaf=9&down=0&across=1&at=0,0", "leaf=1&down=0&across=1&at=0,0"),
        *("leaf=0&down=0&across=0&at=0,0", "leaf=0&down=0&across=5&at=0,0"),
        *("leaf=0&down=0&across=1&at=0", "leaf=0&down=0&at=0,2", "leaf=-2&at=0,0"),
    ],
)
def test_questions_that_make_no_sense(server: PageServer, query: str) -> None:
    status, text, _ = ask(server, f"/TOKEN/values?{query}")
    assert status == 400
    assert text


@pytest.mark.parametrize("other, words", [("", "which other"), ("memory://nothing", "nothing")])
def test_no_other_checkpoint_to_compare_with(server: PageServer, other: str, words: str) -> None:
    status, text, _ = ask(server, f"/TOKEN/diff?other={other}")
    assert status == 400
    assert words in text


def test_a_comparison_says_how_far_it_is(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread asks, as the page does."""
    half, asked = threading.Event(), threading.Event()
    compare = CheckpointView.diff

    def stopping(view: CheckpointView, other: str, progress: Any = None) -> DiffPage:
        def watch(now: xckpt.Progress) -> None:
            progress(now)
            if now.done < now.total:
                half.set()
                assert asked.wait(10)

        return compare(view, other, watch)

    monkeypatch.setattr(CheckpointView, "diff", stopping)
    second = {"w": np.ones((2, 2)), "v": np.zeros(4), "step": 4}
    xckpt.save("memory://test-server-first", {**second, "step": 3})
    xckpt.save("memory://test-server-second", second)
    with PageServer(xckpt.view("memory://test-server-first")) as own:
        path = f"/{own.token}/diff?other=memory://test-server-second"
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(own.answer(path)))
        thread.start()
        assert half.wait(10)
        _, _, content = own.answer(path.replace("diff", "progress"))
        asked.set()
        thread.join()
        assert json.loads(content) == {"done": 32, "total": 64}
        assert answers[0][0] == 200
        _, _, after = own.answer(path.replace("diff", "progress"))
        assert json.loads(after) == {"done": 0, "total": 0}
