"""The workers of a Dask cluster: what runs on them, and messages to them.

Dask starts workers, knows which are alive, moves code to them, and encrypts messages.
The functions here are handlers of a worker's server, next to Dask's, and get bytes.
"""

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from radazo_jax._src.workers.messages import Reply, Request, decode, encode, failed
from radazo_jax._src.workers.replica import Description, Recipe, Replica

_STEP, _LEAVES, _COPY, _PARAMS, _CLOSE = (
    f"radazo_jax_{name}" for name in ("step", "leaves", "copy", "params", "close")
)


class Cluster:
    """Messages to the workers of a Dask client.

    They go to the workers directly, and not through the scheduler.
    """

    def __init__(self, client: Any):
        self._client = client

    def sync(
        self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any
    ) -> Any:
        """Runs a coroutine on the event loop of the client, and waits."""
        return self._client.sync(function, *args)

    async def addresses(self) -> list[str]:
        """Returns the addresses of the workers that are alive."""
        return list(await self._client.scheduler.ncores())

    async def install(
        self, address: str, run: int, recipe: Recipe
    ) -> Description | str | None:
        """Builds the run on a worker.

        Returns:
          Its description, or a text if it failed there, or `None` if the worker died.
        """
        found = await self._client.run(
            _install, run, recipe, workers=[address], on_error="return"
        )
        result = found.get(address)
        if isinstance(result, OSError):
            return None
        if isinstance(result, Exception):
            return "".join(traceback.format_exception(result))
        built: Description | str = result
        return built

    async def ask(self, address: str, request: Request) -> Reply | None:
        """Sends a request; the answer is `None` if the worker has lost the run."""
        found = await self._rpc(address, _STEP)(message=encode(request))
        return None if found is None else decode(found)

    async def copy(self, address: str, run: int, peer: str) -> Reply | None:
        """Makes a worker continue from the state of another one."""
        found = await self._rpc(address, _COPY)(run=run, peer=peer)
        return None if found is None else decode(found)

    async def params(self, address: str, run: int) -> Any:
        """Returns the parameters of a worker, a tree of NumPy arrays."""
        return await self._rpc(address, _PARAMS)(run=run)

    async def close(self, address: str, run: int) -> None:
        """Frees what a worker holds of the run."""
        await self._rpc(address, _CLOSE)(run=run)

    def _rpc(self, address: str, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        handler: Callable[..., Coroutine[Any, Any, Any]] = getattr(
            self._client.rpc(address), name
        )
        return handler


async def _install(run: int, recipe: Recipe, dask_worker: Any) -> Description | str:
    """Builds a run on this worker, which ends the one that it had."""
    from distributed.protocol.serialize import to_serialize
    from distributed.threadpoolexecutor import ThreadPoolExecutor

    # One thread, so that messages are answered in turn; the event loop stays free.
    # Dask's threads are daemons: the interpreter exits even if one of them hangs.
    pool = ThreadPoolExecutor(1, thread_name_prefix="radazo_jax")
    loop = asyncio.get_running_loop()

    def build() -> tuple[Replica, Description] | str:
        try:
            replica = Replica(recipe)
            return replica, replica.describe()
        except Exception:
            return traceback.format_exc()

    built = await loop.run_in_executor(pool, build)
    if isinstance(built, str):
        pool.shutdown(wait=False)
        return built
    replica, description = built

    def answer(function: Callable[..., Reply], *args: Any) -> bytes:
        try:
            return encode(function(*args))
        except Exception:
            return encode(failed(traceback.format_exc()))

    async def step(message: bytes) -> bytes:
        request = decode(message)
        if request.run != run:
            return encode(failed("the worker serves another run."))
        return await loop.run_in_executor(pool, answer, replica.answer, request)

    async def leaves(run: int) -> list[Any]:
        found = await loop.run_in_executor(pool, replica.leaves)
        return [to_serialize(x) for x in found]

    async def copy(run: int, peer: str) -> bytes:
        try:
            found = await getattr(dask_worker.rpc(peer), _LEAVES)(run=run)
        except Exception:
            return encode(failed(traceback.format_exc()))
        return await loop.run_in_executor(pool, answer, replica.copy, found)

    async def params(run: int) -> Any:
        return to_serialize(await loop.run_in_executor(pool, replica.params))

    handlers = {_STEP: step, _LEAVES: leaves, _COPY: copy, _PARAMS: params}

    async def close(run: int) -> None:
        # A later run may have taken the place of this one.
        if dask_worker.handlers.get(_STEP) is step:
            for name in (*handlers, _CLOSE):
                del dask_worker.handlers[name]
        pool.shutdown(wait=False)

    dask_worker.handlers.update(handlers, **{_CLOSE: close})
    return description
