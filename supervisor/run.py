"""`forq run`: builds the supervisor from its settings and runs it in the foreground."""

import faulthandler
import grp
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from setproctitle import setproctitle

from forq.errors import ConfigError, ForqError
from forq.logging_setup import StderrHandler, configure
from forq.procs import orphans
from forq.procs.loop import Loop
from forq.procs.ownership import changeable_by, strict_modes
from forq.procs.treekill import become_subreaper
from forq.queue_spec import QueueSpec
from forq.supervisor import entry_points, systemd
from forq.supervisor.apply import ConfigChanges
from forq.supervisor.config import Config, capacity_warning, load
from forq.supervisor.control import ControlServer, warn_of_few_descriptors
from forq.supervisor.reload import Reload
from forq.supervisor.remote import RemoteCalls
from forq.supervisor.requests import Verbs
from forq.supervisor.statedir import StateDir
from forq.supervisor.supervisor import Supervisor

log = logging.getLogger("forq")


def run(overrides: Mapping[str, object]) -> int:
    """Serves until a signal or a request stops it; returns the exit code."""
    configure(blocking=False)
    try:
        # First: processes started later must not inherit systemd's variables and descriptors.
        systemd_input = systemd.take(os.environ, os.getpid())
        # The tree mark of a forq whose handler started this one: our processes must not look like its processes.
        os.environ.pop(orphans.VARIABLE, None)
        # A copy: children inherit variables that are set later.
        environ = dict(os.environ)
        config = load(overrides, environ)
        configure(config.log_format, config.log_level, config.log_redact, blocking=False)
        state = StateDir(config.state_dir, strict_modes=strict_modes(environ))
        state.lock(on_wait=lambda pids: log.warning("killing processes left by an earlier run pids=%s", pids))
        read = partial(_read_again, overrides, environ)
        return _serve(config, state, _specs(config, state), systemd_input, read)
    except ForqError as exc:
        print(f"forq: {exc}", file=sys.stderr)
        return exc.exit_code


def _read_again(overrides: Mapping[str, object], environ: Mapping[str, str], file: Path) -> Config:
    """The settings with this config file; those of the command line and the environment stay."""
    return load({**overrides, "config": str(file)}, environ)


def _serve(
    config: Config,
    state: StateDir,
    specs: list[QueueSpec],
    systemd_input: systemd.SystemdInput,
    read: Callable[[Path], Config],
) -> int:
    started = config
    become_subreaper()
    # Prints where the loop hung when systemd's watchdog sends SIGABRT.
    faulthandler.enable()
    setproctitle("forq: supervisor")
    loop = Loop()
    for handler in logging.root.handlers:
        if isinstance(handler, StderrHandler):
            handler.attach(loop)
    listener = systemd.control_listener(systemd_input)
    if listener is not None:
        # Our own processes connect to the socket on which systemd listens.
        config = replace(config, socket=Path(listener.getsockname()))
    supervisor = Supervisor(config, state, loop)
    entry_points.preload(supervisor.services.redis_url, config.prefix)
    if config.reload:
        # A file that is saved twice within a second, with the same size, would run from its older bytecode.
        sys.dont_write_bytecode = True
        Reload(loop, supervisor.apps)
    changes = ConfigChanges(supervisor, started, read)
    verbs = Verbs(supervisor, changes)
    supervisor.receive_remote = RemoteCalls(supervisor.services, loop, verbs.table_from_elsewhere()).receive
    control = ControlServer(
        *(loop, str(config.socket), verbs.table()),
        group=_group("control_group", config.control_group),
        readers=_group("control_read_group", config.control_read_group),
        read_verbs=verbs.table_for_readers(),
        listener=listener,
    )
    for app in config.apps:
        _warn_if_changeable(f"app={app.label}", app.path)
    for spec in specs:
        _warn_if_changeable(f"queue={spec.name}", spec.path)
        if (warning := capacity_warning(config.options_of(spec), config.capacity)) is not None:
            log.warning("queue=%s %s", spec.name, warning)
        supervisor.queues.add(spec)
    supervisor.start()
    warn_of_few_descriptors(len(specs), in_use=len(os.listdir("/proc/self/fd")))
    log.info(
        "serving queues=%s socket=%s redis=%s", len(specs), control.path, supervisor.services.status_of_redis()["url"]
    )
    loop.run(systemd.Notifier(systemd_input, supervisor).after_pass)
    control.close()
    supervisor.close()
    log.info("stopped")
    return supervisor.exit_code


def _warn_if_changeable(owner: str, directories: Iterable[str]) -> None:
    """Only a warning: code is often deployed by a user of its own."""
    for directory in directories:
        if (other := changeable_by(directory)) is not None:
            log.warning("handler code can be changed by %s %s path=%s", other, owner, directory)


def _specs(config: Config, state: StateDir) -> list[QueueSpec]:
    """The queues of the config file, and queues created at run time that the file does not name."""
    specs = {spec.name: spec for spec in config.queues}
    for name, mapping in state.load_queues().items():
        if name not in specs:
            specs[name] = QueueSpec.from_mapping(name, mapping, f"{state.path}/queues/{name}.json")
    return list(specs.values())


def _group(setting: str, name: str | None) -> int | None:
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"{setting} = {name!r}: no such group (getent group lists them)") from None
