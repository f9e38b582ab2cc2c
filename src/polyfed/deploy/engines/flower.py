"""The flower engine: the same steps through Flower's Message API, simulated here or deployed across institutions.

A node (a site, or a virtual SuperNode of a simulation) hosts one or more clients. The requests to a node's clients
travel as one message, or as a few if they are large, in which each bundle appears once; Flower stores equal bytes once,
so content for all clients is encoded and uploaded once per exchange. Clients have their own ids; Flower's node ids,
which change, are looked up. Clients' states stay on the node's disk, never in Flower's context.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import torch
from pydantic import Field

from polyfed.core.errors import ConfigError, ExchangeError
from polyfed.core.extras import how_to_install
from polyfed.core.settings import PlaceBeside
from polyfed.engines.engine import EngineSettings, Hosting
from polyfed.engines.quiet import be_quiet
from polyfed.engines.ray import ray_here
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Engine
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Request

if TYPE_CHECKING:
    from polyfed.deploy.engines.flower_grid import NodeDirectory

_T = TypeVar("_T")

_GRID: ContextVar[Any] = ContextVar("grid", default=None)


class Flower(EngineSettings):
    """Steps execute on Flower: simulated on this machine, or at the sites of a SuperLink if one is given."""

    pip_extra: ClassVar[str] = "flower"

    nodes: int = Field(default=2, ge=1, description="simulation: virtual SuperNodes that share the clients")
    gpus: float = Field(default=0, ge=0, description="simulation: GPUs per process; 0.5 lets two share one")
    superlink: str | None = Field(default=None, description="deployment: host:port of the SuperLink's private API")
    root_certificates: PlaceBeside | None = Field(
        default=None,
        description="deployment: certificate of the authority that signed the SuperLink's; a relative path starts from "
        "the file's folder",
    )
    sites: list[str] = Field(default_factory=list, description="deployment: names of the sites, in client order")
    clients: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, description="deployment: site -> most clients that it may bring; 1 for others"
    )
    join: float = Field(default=600, gt=0, description="deployment: seconds to wait for all sites before the start")
    absence: float = Field(default=180, ge=0, description="seconds that a node may be away before its clients fail")
    retries: int = Field(default=2, ge=0, description="times that a message is sent again when a node or process died")
    message_bytes: int = Field(
        default=1 << 26, ge=1, description="clients of a node share a message up to this size, bytes of tensors"
    )
    poll: float = Field(default=0.1, gt=0, description="seconds between looks for replies")

    crosses_wire: ClassVar[bool] = True

    def require(self) -> None:
        """Check that Flower is installed, and that a deployment lists its sites."""
        for package in ("flwr",) if self.superlink else ("flwr", "ray"):
            if find_spec(package) is None:
                raise ConfigError(f"run.engine is flower, but {package} is missing; {how_to_install(self.pip_extra)}")
        if self.superlink and not self.sites:
            raise ConfigError("run.engine.sites is empty; a deployment lists the sites that take part")
        if unknown := sorted(self.clients.keys() - self.sites):
            what = f"run.engine.clients names site '{unknown[0]}', which is not in run.engine.sites ({self.sites})"
            raise ConfigError(f"{what}; name a site of these")

    @property
    def is_deployed(self) -> bool:
        return self.superlink is not None

    def serve(self, hosting: Hosting, body: Callable[[Engine], _T]) -> _T:
        """Run ``body`` over a simulation, or, inside a ServerApp, over the SuperLink's grid."""
        be_quiet()
        if not self.is_deployed:
            return _simulated_run(self, hosting, body)
        if _GRID.get() is None:
            raise ConfigError("run.engine.superlink is set: start this run with 'polyfed run' or 'polyfed resume'")
        return body(self.over(_GRID.get(), hosting))

    def over(self, grid: Any, hosting: Hosting) -> FlowerEngine:
        """The engine over a grid of nodes.

        Raises:
            ExchangeError: a site did not join in time, or cannot take part.
        """
        from polyfed.deploy.engines.flower_grid import NodeDirectory, RegisteredSites, Sending, Sites

        sending = Sending(self.poll, self.absence, self.retries, self.message_bytes, self.is_deployed)
        infos, terms = hosting.federation.infos, (hosting.spec.model_dump_json(), sending)
        if infos:  # a simulation: the server has the list of clients
            directory = NodeDirectory(grid, Sites(grid), *terms)
            directory.require([info.id for info in infos], self.join)
            return FlowerEngine(infos, directory, hosting.limits)
        sites = RegisteredSites(grid, self.sites, hosting.noticed, self.clients)
        directory = NodeDirectory(grid, sites, *terms)
        if hosting.has_begun:
            infos = sites.recall(hosting.folder)
            directory.find([info.id for info in infos], self.absence)  # absent clients may come back later
        else:
            infos = directory.gather(self.sites, self.join)
            sites.remember(hosting.folder)
        return FlowerEngine(infos, directory, hosting.limits)


@contextlib.contextmanager
def within(grid: Any) -> Iterator[None]:
    """Use a ServerApp's grid for deployed runs within the block."""
    token = _GRID.set(grid)
    try:
        yield
    finally:
        _GRID.reset(token)


class FlowerEngine:
    """Executes steps on the nodes of a grid; see ``Engine``."""

    def __init__(self, infos: tuple[ClientInfo, ...], directory: NodeDirectory, limits: Limits) -> None:
        self._infos, self._directory, self._limits = infos, directory, limits
        self.stopped = threading.Event()

    def clients(self) -> tuple[ClientInfo, ...]:
        return self._infos

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        """Send a message or a few to every node, and yield their clients' answers; see ``Engine.exchange``."""
        from polyfed.deploy.engines.flower_grid import GridExchange

        carried = GridExchange(self._directory, requests, deadline, self._limits, self.stopped)
        for request in requests:
            yield carried.answer(request.client)


def _simulated_run(settings: Flower, hosting: Hosting, body: Callable[[Engine], _T]) -> _T:
    """Result of the body, run in the ServerApp thread of Flower's simulation, with clients in its Ray processes."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # failures are raised here, with their traceback
    from flwr.serverapp import ServerApp

    # its replacement ``flwr run`` leaves a SuperLink running on this machine
    from flwr.simulation import run_simulation

    from polyfed.deploy.engines.flower_node import Node, simulated
    from polyfed.deploy.engines.flower_records import client_app

    engines: list[FlowerEngine] = []
    outcome: list[_T] = []
    failures: list[BaseException] = []
    ended = threading.Event()
    app, threads = ServerApp(), hosting.settings.run.threads

    @app.main()
    def main(grid: Any, context: Any) -> None:
        torch.set_num_threads(threads)
        try:
            engines.append(settings.over(grid, hosting))
            outcome.append(body(engines[0]))
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    resources: dict[str, Any] = {
        "num_cpus": threads,
        "num_gpus": settings.gpus,
        "max_restarts": -1,  # Flower puts a process that died back into its pool: Ray must start it again,
        "max_task_retries": 1,  # and messages must wait for it instead of failing meanwhile
    }
    try:
        with ray_here(num_cpus=max(os.cpu_count() or 1, threads)):
            clients, backend = client_app(Node(simulated(hosting), simulated=True)), {"client_resources": resources}
            run_simulation(server_app=app, client_app=clients, num_supernodes=settings.nodes, backend_config=backend)
    except BaseException as error:
        if engines:  # its thread may still wait for replies, which will not come
            engines[0].stopped.set()
            ended.wait()
        if not failures:
            raise ExchangeError(f"Flower's simulation failed: {error}") from error
    if failures:
        raise failures[0]
    return outcome[0]
