"""Engines, which hold a replica of the run on each worker by their public interfaces.

An engine has a pickler, `dumps`, the types of errors of a worker that has died, `died`,
and the four methods of `Dask`. They block, and are called in threads. They raise a
TimeoutError after so many seconds.
"""

import pickle
from importlib import import_module
from typing import Any

from radazo_jax._src.workers.replica import Replica


class Dask:
    """Actors on the workers of a Dask client."""

    died = OSError, RuntimeError

    def __init__(self, client: Any):
        self._client, self.dumps = client, import_module("cloudpickle").dumps

    def names(self) -> set[str]:
        """Returns the names of the workers that are alive, their addresses."""
        return set(self._client.nthreads())

    def build(self, name: str, given: tuple[str, bytes], timeout: float) -> Any:
        """Makes a replica of these arguments; raises what is raised on the worker."""
        future = self._client.submit(
            pickle.loads,
            pickle.dumps(Replica(*given)),  # The scheduler needs no package.
            actor=True,
            pure=False,
            workers=[name],
            allow_other_workers=False,
        )
        with self._client.as_current():
            return future, future.result(timeout)

    def call(self, actor: Any, method: str, timeout: float, *args: Any) -> Any:
        """Calls a method of a replica, none of which raises."""
        with self._client.as_current():
            return getattr(actor[1], method)(*args).result(timeout)

    def free(self, actor: Any) -> None:
        """Frees a replica, which Dask does not do at once by itself."""
        self._client.cancel([actor[0]], force=True)


class Ray:
    """Actors on a Ray cluster: one on each GPU, and on each node without GPUs."""

    def __init__(self, client: Any):
        self._ray, self.dumps = client, client.cloudpickle.dumps
        self.died = client.exceptions.RayActorError

    def names(self) -> set[str]:
        found = set[str]()
        for node in (x for x in self._ray.nodes() if x["Alive"]):
            name, gpus = node["NodeID"], int(node["Resources"].get("GPU", 0))
            found |= {f"{name}/GPU {i}" for i in range(gpus)} or {name}
        return found

    def build(self, name: str, given: tuple[str, bytes], timeout: float) -> Any:
        del timeout  # The first call waits for it.
        node, _, gpu = name.partition("/")
        strategies = self._ray.util.scheduling_strategies
        here = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_gpus": int(gpu != ""), "scheduling_strategy": here}
        return self._ray.remote(num_cpus=0, **options)(Replica).remote(*given)

    def call(self, actor: Any, method: str, timeout: float, *args: Any) -> Any:
        return self._ray.get(getattr(actor, method).remote(*args), timeout=timeout)

    def free(self, actor: Any) -> None:
        self._ray.kill(actor)
