"""Runs on a server that loads adapters."""

import contextlib
import http.server
import itertools
import json
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import radazo_jax as zo
from radazo_llm.models import lora
from research import served

from .. import tiny


class Fake(http.server.ThreadingHTTPServer):
    """Completes each prompt by a number: a projection of the adapter.

    Attributes:
      loaded: The sums of the adapters, by name.
      peak: The largest number of adapters at once.
      calls: The number of completions.
      trouble: The fault of a completion, by its number.
      wait: The seconds that one of them takes.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.loaded, self.peak, self.calls, self.trouble = {}, 0, 0, {}
        self.wait = 1.0
        self.lock = threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, code, body):
        with contextlib.suppress(OSError):  # The client may have left.
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, endpoint = self.server, self.path.removeprefix("/v1/")
        if endpoint == "load_lora_adapter":
            found = load_file(f"{body['lora_path']}/adapter_model.safetensors")
            total = sum(float(np.sum(x)) for n, x in found.items() if "lora_B" in n)
            with server.lock:
                server.loaded[body["lora_name"]] = total
                server.peak = max(server.peak, len(server.loaded))
            self.answer(200, b"Success")
        elif endpoint == "unload_lora_adapter":
            del server.loaded[body["lora_name"]]
            self.answer(200, b"Success")
        else:
            with server.lock:
                trouble = server.trouble.get(server.calls)
                server.calls += 1
            if trouble == "refuses":
                return self.answer(400, b'{"message": "no room"}')
            number = server.loaded[body["model"]]
            if trouble == "waits":
                time.sleep(server.wait)
            text = "nan" if trouble == "nan" else f"{number:.6f}"
            choices = [
                {"index": i, "text": text} for i in reversed(range(len(body["prompt"])))
            ]
            if trouble == "other":
                choices.pop()
            self.answer(200, json.dumps({"choices": choices}).encode())


@pytest.fixture
def fake():
    server = Fake()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def reward(prompts, completions):
    """The negative distance between each answer and the number in its prompt."""
    pairs = zip(prompts, completions, strict=True)
    return [-abs(float(prompt) - float(text)) for prompt, text in pairs]


def adapted(fake, reward=reward, timeout=30.0):
    model = tiny.model()
    lora.add_lora(model, rank=2, rngs=nnx.Rngs(0))
    url = f"http://127.0.0.1:{fake.server_port}"
    server = served.Server(url, ["2.0", "4.0"], reward, timeout=timeout)
    return served.loss_of_adapters(server, model, base="base")


def tune(loss, params, num_steps, **options):
    estimator = zo.evolution_strategy(
        zo.gaussian(), 8, 5e-2, shaping=zo.shaping.centered_ranks()
    )
    with ThreadPoolExecutor(4) as executor:
        return zo.train(
            *(loss, params, zo.zo_sgd(1.5e-2), estimator),
            evaluator=zo.external(executor=executor),
            num_steps=num_steps,
            key=0,
            progress=False,
            **options,
        )


def test_a_server_that_loads_adapters_evaluates_a_run(fake):
    """The best answer to both prompts is between them, at a distance of 1 from each."""
    loss, params = adapted(fake)
    np.testing.assert_array_equal(loss(params), [2.0, 4.0])
    result = tune(loss, params, 25)
    assert result.values[0] > 2.0 and result.values[-1] < 1.5
    assert not fake.loaded and 1 < fake.peak <= 4
    assert fake.calls == 1 + 25 * 8


def test_members_that_the_server_fails_are_dropped(fake):
    loss, params = adapted(fake, timeout=2.0)
    fake.wait = 3.0
    fake.trouble = {2: "refuses", 11: "waits", 17: "nan", 26: "other"}
    result = tune(loss, params, 5)
    assert result.history.failed.sum() == 4 * 2  # Of each prompt.
    assert result.stopped == "num_steps"
    # The one that was waited for is unloaded as well.
    assert not fake.loaded


@pytest.mark.parametrize(
    ("trouble", "error", "text"),
    [
        ("refuses", served.ServerError, "completions refused with 400: .*no room"),
        ("waits", OSError, "timed out"),
        ("other", served.ServerError, "answer 2 prompts with as many choices"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(fake, trouble, error, text):
    loss, params = adapted(fake, timeout=0.3 if trouble == "waits" else 30.0)
    fake.trouble = {0: trouble}
    with pytest.raises(error, match=text):
        loss(params)
    assert not fake.loaded


def test_a_reward_of_another_shape_is_refused(fake):
    loss, params = adapted(fake, lambda prompts, texts: [0.0])
    with pytest.raises(ValueError, match="reward must return 2 numbers"):
        loss(params)


# --- A server that means harm -------------------------------------------------------


class Raw(threading.Thread):
    """Answers each request with these bytes, some at a time.

    Attributes:
      url: The address.
      asked: The requests that it got.
    """

    def __init__(self, parts):
        super().__init__(daemon=True)
        self.parts, self.asked = parts, []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listening.accept()
                with connection, contextlib.suppress(OSError):
                    self.asked.append(connection.recv(1 << 16))
                    for part in self.parts():
                        connection.sendall(part)

    def close(self):
        self.listening.close()


@pytest.fixture
def raw():
    servers = []

    def start(parts):
        servers.append(Raw(parts))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def asked(server, timeout=5.0):
    headers = {"Authorization": "Bearer secret"}
    client = served.Server(server.url, ["1"], reward, headers=headers, timeout=timeout)
    return client._post("completions", {})


def test_a_redirect_is_not_followed(raw, code=307):
    """It would take the token to another host."""
    other = raw(lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"])
    head = (
        f"HTTP/1.1 {code} Moved\r\nLocation: {other.url}/\r\nContent-Length: 0\r\n\r\n"
    )
    first = raw(lambda: [head.encode()])
    with pytest.raises(served.ServerError, match=f"refused with {code}"):
        asked(first)
    assert b"secret" in first.asked[0] and not other.asked


HEAD = b"HTTP/1.1 200 OK\r\n"


def slowly(begin, part):
    def parts():
        yield begin
        while True:
            yield part
            time.sleep(0.02)

    return parts


@pytest.mark.parametrize(
    "parts",
    [slowly(b"", b""), slowly(HEAD + b"Content-Length: 1000000\r\n\r\n", b" ")],
    ids=["silence", "body"],
)
def test_an_answer_that_does_not_end_is_given_up_in_time(raw, parts):
    """Each byte comes in time, the last one never."""
    begin = time.monotonic()
    with pytest.raises(OSError, match=r"timed out: .* complete in 0\.4 s|no answer"):
        asked(raw(parts), timeout=0.4)
    assert time.monotonic() - begin < 3.0


def test_an_answer_takes_bounded_memory(raw):
    parts = itertools.repeat(b" " * (1 << 20))
    server = raw(lambda: itertools.chain([HEAD + b"X: 1\r\n\r\n"], parts))
    tracemalloc.start()
    try:
        with pytest.raises(served.ServerError, match="more than 16777216 bytes"):
            asked(server, timeout=60.0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 27
    finally:
        tracemalloc.stop()


def test_a_server_that_is_not_there_is_said():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = served.Server(f"http://127.0.0.1:{port}", ["1"], reward)
    with pytest.raises(OSError, match=f":{port}/v1/completions gives no answer"):
        client._post("completions", {})
