"""``polyfed deploy``: the commands of a real federation; parses, calls, prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from polyfed.core.errors import ConfigError, RunError
from polyfed.core.untrusted import plain

deploy_app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Train across institutions: keys, checks, server, sites."
)

ServerArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="folder of the server")]
SiteArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="folder of the site")]
Hosts = Annotated[
    list[str] | None, typer.Option("--host", help="name or address of the server, reachable by sites; repeatable")
]


@deploy_app.command()
def init(
    source: Annotated[str, typer.Argument(metavar="FILE", help="the experiment, as for polyfed run")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="new folder")] = Path("federation"),
    host: Hosts = None,
    port: Annotated[int, typer.Option(help="public port of the server")] = 9443,
    superlink_port: Annotated[int, typer.Option(help="port on the server's loopback")] = 9091,
    keys: Annotated[
        bool, typer.Option("--keys", help="all sites are on this machine: make their keys, use the data in place")
    ] = False,
) -> None:
    """Make the folders of a federation: one for the server, and one for each site, with the settings of its data.

    Example: polyfed deploy init consortium.yaml federation --host fl.example.org
    """
    from polyfed.deploy.init import SERVER_FOLDER, create_federation, uses_rosters
    from polyfed.runs.experiment import Experiment

    if not host:
        raise ConfigError("--host is missing: the server's name or address for sites, such as fl.example.org")
    experiment = Experiment.read(source)
    made = create_federation(folder, experiment, host, port=port, superlink_port=superlink_port, keys=keys)
    for name, path in made.items():
        typer.echo(f"{'server' if name == SERVER_FOLDER else 'site'}: {path}")
    if not keys:
        typer.echo("give each site its folder; there: polyfed deploy key FOLDER")
        typer.echo(f"with the node.pub that it sends back: polyfed deploy admit {made[SERVER_FOLDER]} NAME node.pub")
        if uses_rosters(experiment):
            typer.echo("sites give theirs to each other, past the server: polyfed deploy trust FOLDER NAME node.pub")


@deploy_app.command()
def rehearse(
    source: Annotated[str, typer.Argument(metavar="FILE", help="the experiment, as for polyfed run")],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="new folder, or of a rehearsal to continue; else runs/NAME-rehearsal"),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="RUN", help="run of the same file in one process, which it must equal")
    ] = None,
) -> None:
    """Rehearse a federation: server, gate and sites as processes on this machine, until the run is complete.

    Exit code 2 if it differs from RUN. Example: polyfed deploy rehearse consortium.yaml --compare runs/consortium-seed0
    """
    from polyfed.cli.console import interruptible
    from polyfed.cli.running import free_folder
    from polyfed.deploy.init import rehearse, unlike_runs
    from polyfed.runs.experiment import Experiment

    if compare is not None and not (compare / "metrics.jsonl").is_file():
        raise ConfigError(f"--compare {compare} is not a run folder; polyfed run {source} --out {compare} makes one")
    experiment = Experiment.load(source)
    place = folder or free_folder(Path("runs") / f"{experiment.name}-rehearsal")
    with interruptible(f"the same command with FOLDER {place} goes on"):
        run = rehearse(experiment, place, _log)
    if different := unlike_runs(run, compare or run):
        raise RunError(f"{run} differs from {compare} in {', '.join(different)}")
    equal = f"equal to {compare}: metrics.jsonl and all weights of models"
    typer.echo(f"rehearsed: {run}; {equal if compare else 'compare it with --compare RUN'}")


@deploy_app.command()
def key(folder: SiteArgument) -> None:
    """Make a site's key pair: node.key stays in the folder, node.pub goes to the server's operator."""
    from polyfed.deploy.folders import create_keys, fingerprint, read_public

    public = create_keys(folder, folder.resolve().name)
    typer.echo(f"give this to the server's operator: {public}")
    typer.echo(f"fingerprint: {fingerprint(read_public(public))}")


@deploy_app.command()
def admit(
    folder: ServerArgument,
    name: Annotated[str, typer.Argument(help="name of the site")],
    public_key: Annotated[Path, typer.Argument(metavar="PUBLIC_KEY", help="its node.pub")],
) -> None:
    """Admit a site to the federation; compare the fingerprint with the site's first."""
    from polyfed.deploy.folders import fingerprint, read_public
    from polyfed.deploy.init import admit_site

    path = admit_site(folder, name, public_key)
    typer.echo(f"admitted: {name} ({fingerprint(read_public(path))}); to expel it, delete {path}")


@deploy_app.command()
def trust(
    folder: SiteArgument,
    name: Annotated[str, typer.Argument(help="name of the other site")],
    public_key: Annotated[Path, typer.Argument(metavar="PUBLIC_KEY", help="its node.pub, from the site itself")],
    client: Annotated[
        list[str] | None, typer.Option("--client", help="id of a client of a site outside the roster; repeatable")
    ] = None,
) -> None:
    """Trust another site's key in masked sums; compare the fingerprint with the site first, not with the server."""
    from polyfed.deploy.settings import trust_key

    typer.echo(f"trusted: {name} ({trust_key(folder, name, public_key, client or [])})")


@deploy_app.command()
def renew(folder: ServerArgument, host: Hosts = None) -> None:
    """Replace the server's certificate by a new one; restart the server then."""
    from polyfed.deploy.init import renew_certificate

    typer.echo(f"new certificate for {', '.join(renew_certificate(folder, host or []))}; restart the server")


@deploy_app.command()
def check(
    folder: SiteArgument,
    network: Annotated[bool, typer.Option("--network/--no-network", help="contact the server")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of lines")] = False,
) -> None:
    """Check a site, and list what will leave it; exit code 2 if a check fails."""
    from polyfed.deploy.check import check_site
    from polyfed.deploy.check_network import failed

    findings = []
    for finding in check_site(folder, network=network):
        findings.append(finding)
        if not as_json:
            typer.echo(plain(str(finding)))
    if as_json:
        typer.echo(json.dumps([vars(finding) for finding in findings], indent=1))
    if failed(findings):
        raise typer.Exit(2)


@deploy_app.command()
def server(folder: ServerArgument) -> None:
    """Serve a federation in the foreground: SuperLink behind its gate, and the admitted sites."""
    from polyfed.deploy.serve import run_server

    raise typer.Exit(run_server(folder, _log))


@deploy_app.command()
def site(folder: SiteArgument) -> None:
    """Connect a site in the foreground, and again whenever the connection ends."""
    from polyfed.deploy.serve import run_site

    raise typer.Exit(run_site(folder, _log))


def _log(line: str) -> None:
    typer.echo(plain(f"polyfed: {line}"), err=True)
