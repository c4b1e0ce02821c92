"""Adapters evaluated by an inference server, and tuned by what it answers.

The server has the interface of OpenAI's completions and loads LoRA adapters while it
runs, as vLLM does:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora

    server = served.Server("http://localhost:8000", prompts, reward)
    loss, params = served.loss_of_adapters(server, model, base="MODEL")
    calls = zo.external(executor=ThreadPoolExecutor(8))
    zo.train(loss, params, optimizer, estimator, evaluator=calls)

Each point is a set of adapters: the server keeps one copy of the model, and this
program needs no accelerator. A point fails if the server refuses it, or answers too
late or with something else; `train` drops it or asks again.
"""

import contextlib
import functools
import json
import ssl
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from flax import nnx

from radazo_llm.formats import adapters
from radazo_llm.models.model import LanguageModel

_LARGEST = 1 << 24  # Bytes of an answer.


class ServerError(RuntimeError):
    """The server refused a request, or its answer is none."""


@dataclass(frozen=True)
class Server:
    """A server, and what it is asked.

    Redirects are not followed, since they would take the headers to another host.

    Attributes:
      url: Its address, such as http://localhost:8000.
      prompts: The prompts of each evaluation, G of them.
      reward: `reward(prompts, completions)` returns a number for each.
      options: The other entries of a request, such as `max_tokens` and `temperature`.
      headers: Further headers, such as Authorization.
      timeout: Seconds in which an answer must be complete.
    """

    url: str
    prompts: Sequence[str]
    reward: Callable[[Sequence[str], Sequence[str]], Sequence[float]]
    options: Mapping[str, Any] = field(
        default_factory=lambda: {"max_tokens": 64, "temperature": 0.0}
    )
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 120.0

    def rewards(self, folder: Path) -> np.ndarray:
        """Returns the rewards of an adapter's completions, [G].

        Args:
          folder: The folder of the adapter, which the server can read at this path.

        Raises:
          ServerError: If the server refuses a request, or gives another answer.
          OSError: If it cannot be reached, or answers too late.
        """
        name = f"member-{uuid.uuid4().hex}"
        path = str(Path(folder).resolve())
        self._post("load_lora_adapter", {"lora_name": name, "lora_path": path})
        try:
            texts = self._complete(name)
        finally:
            # A server that still has it drops the one that was used least recently.
            with contextlib.suppress(OSError, ServerError):
                self._post("unload_lora_adapter", {"lora_name": name})
        found = np.asarray(self.reward(self.prompts, texts), np.float64)
        if found.shape != (len(texts),):
            raise ValueError(
                f"reward must return {len(texts)} numbers, one per completion; got "
                f"shape {found.shape}."
            )
        return found

    def _complete(self, name: str) -> list[str]:
        asked = {"model": name, "prompt": list(self.prompts)} | dict(self.options)
        answer = self._post("completions", asked)
        try:
            choices = json.loads(answer)["choices"]
            texts = {choice["index"]: choice["text"] for choice in choices}
            return [str(texts[i]) for i in range(len(self.prompts))]
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(
                f"{self.url} must answer {len(self.prompts)} prompts with as many "
                f"choices; got {answer!r:.200}."
            ) from error

    def _post(self, endpoint: str, body: Mapping[str, Any]) -> bytes:
        """The content of an answer, of bounded size and in time."""
        url = f"{self.url}/v1/{endpoint}"
        found: list[Any] = []
        # In a thread, which is abandoned: a name server that does not answer, or bytes
        # that come one by one, cannot be interrupted.
        ask = functools.partial(self._ask, url, json.dumps(body), found)
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(self.timeout)
        if not found:
            raise TimeoutError(
                f"{url} timed out: an answer must be complete in {self.timeout:g} s"
            )
        if isinstance(found[0], Exception):
            raise found[0]
        code, answer = found[0]
        if not 200 <= code < 300:
            text = answer.decode(errors="replace")
            raise ServerError(f"{url} refused with {code}: {text:.200}")
        return answer

    def _ask(self, url: str, body: str, found: list[Any]) -> None:
        """Adds the status and the content of an answer, or an error."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        options = {"headers": headers | dict(self.headers), "follow_redirects": False}
        content = bytearray()
        try:
            client = httpx2.Client(verify=_certificates(), timeout=self.timeout)
            with client, client.stream("POST", url, content=body, **options) as answer:
                for part in answer.iter_raw():
                    content += part
                    if len(content) > _LARGEST:
                        raise ServerError(f"{url} answers more than {_LARGEST} bytes.")
            found.append((answer.status_code, bytes(content)))
        except httpx2.TimeoutException:
            return
        except httpx2.HTTPError as error:
            found.append(OSError(f"{url} gives no answer: {error!s:.200}"))
        except Exception as error:
            found.append(error)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The system's, which take longer to load than a request."""
    return ssl.create_default_context()


def loss_of_adapters(
    server: Server,
    model: LanguageModel,
    *,
    base: str,
    folder: Path | None = None,
) -> tuple[Callable[[Any], np.ndarray], Any]:
    """The negative rewards of a model's adapters, for `train`.

    Args:
      server: The server, which serves the model without its adapters.
      model: The model with adapters. Its other arrays are not used.
      base: The name or folder of the model, which the configurations name.
      folder: A folder that the server sees too; by default the one for temporary files.

    Returns:
      The loss, a function of the adapters' parameters to [G] numbers, and the
      parameters.
    """
    graphdef, params, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(params: Any) -> np.ndarray:
        with tempfile.TemporaryDirectory(prefix="adapter-", dir=folder) as to:
            adapted = nnx.merge(graphdef, params, rest)
            adapters.save(adapted, Path(to), base=base)
            return -server.rewards(Path(to))

    return loss, params
