"""Adds a worker to the project, whole or not at all.

Whatever names workers gets its line: the key registry and its lock, the extra, the workspace source, the rule that the
service imports no worker, and the deployments. All of it is worked out before the first byte is written. The wheel
leaves this package out: it is for a checkout, with the dependency group `dev`.
"""

import ast
import importlib.util
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from ...config import TOGGLE_SUFFIX, ConfigError
from ...keys import DISTRIBUTION, ENV_PREFIX, KEYS, SERVICE
from . import skeleton

PROJECT = Path(__file__).resolve().parents[4]  # as Path.cwd() is
REGISTRY = f"src/{SERVICE}/keys.py"
LOCK = "lease-keys.lock"
METADATA = "pyproject.toml"
TOGGLES = "deploy/kubernetes/settings.env"


def new_worker(name: str, project: Path = PROJECT) -> str:
    """Add a worker; returns what to do next.

    Raises:
        ConfigError: it can't be added, for the reason given, and nothing was changed.
    """
    if not Path.cwd().is_relative_to(project):
        raise ConfigError(f"new-worker changes files of the project, so run it there: cd {project}")
    if (flaw := skeleton.flaw(name, project)) is not None:
        raise ConfigError(f"{name!r} can't be the name of a worker: it {flaw}")
    package = f"{SERVICE}_{name}"
    try:
        if (project / "workers" / name).exists():
            raise ConfigError(f"the name {name} is taken: there is a folder workers/{name}")
        if (found := importlib.util.find_spec(package)) is not None:
            raise ConfigError(f"the name {name} is taken: Python finds a package {package} in {found.origin}")
        key, registry, lock = with_key(name, read(project / REGISTRY), read(project / LOCK))
        changed = {METADATA: with_extra(name, read(project / METADATA)), REGISTRY: registry, LOCK: lock}
        if (project / TOGGLES).exists():  # not everybody has Kubernetes
            toggle = f"{ENV_PREFIX}{name.upper()}{TOGGLE_SUFFIX}=false"
            changed[TOGGLES] = f"{read(project / TOGGLES).rstrip()}\n{toggle}\n"
        write(project, f"workers/{name}", skeleton.files(name, SERVICE, DISTRIBUTION), changed)
    except TOMLKitError as error:
        raise ConfigError(f"nothing was changed: {METADATA}: {error}") from error
    except (OSError, SyntaxError, UnicodeError) as error:
        raise ConfigError(f"nothing was changed: {error}") from error
    return f"""\
workers/{name} is a worker now, with the lease key {key}. Your code goes into
    workers/{name}/src/{package}/__init__.py
Next:
    uv sync --all-extras
    uv run pytest workers/{name}
    uv run {DISTRIBUTION} dev
To turn it on elsewhere: {ENV_PREFIX}{name.upper()}{TOGGLE_SUFFIX}=true"""


def with_key(name: str, registry: str, lock: str) -> tuple[int, str, str]:
    """The next free key, the registry and its lock with it.

    Raises:
        ConfigError: the name is taken, no key is left, or the registry is not understood.
    """
    members: dict[str, int] = {}
    last = 0
    for node in ast.walk(ast.parse(registry, REGISTRY)):
        if isinstance(node, ast.ClassDef) and node.name == "LeaseKey":
            for member in node.body:
                match member:
                    case ast.Assign([ast.Name(role)], ast.Constant(int(number))):
                        members[role] = number
                        last = member.end_lineno or 0
    frozen = dict(re.findall(r"^(\w+)[ \t]+(\d+)[ \t]*$", lock, re.MULTILINE))
    if not members:
        raise ConfigError(f"{REGISTRY} has no class LeaseKey with a member such as INVOICES = {KEYS[-1]}")
    if name.upper() in members or name in frozen:
        raise ConfigError(f"the name {name} is taken: it has a key in {REGISTRY} or {LOCK}, for good")
    key = skeleton.next_key(KEYS.start, {*members.values(), *map(int, frozen.values())}.intersection(KEYS))
    if key not in KEYS:
        raise ConfigError(f"all keys up to {KEYS[-1]} are used, and none may be used twice: widen KEYS in {REGISTRY}")
    lines = registry.splitlines(keepends=True)
    lines.insert(last, f"    {name.upper()} = {key}\n")
    return key, "".join(lines), f"{lock.rstrip()}\n{name} {key}\n"


def with_extra(name: str, metadata: str) -> str:
    """The project's metadata with the extra, the workspace source and the rule that the service does not import it.

    Raises:
        ConfigError: the name is taken, or that rule is missing.
        TOMLKitError: one of the tables is.
    """
    document: Any = tomlkit.parse(metadata)
    extras, sources = document["project"]["optional-dependencies"], document["tool"]["uv"]["sources"]
    distribution = f"{DISTRIBUTION}-{name.replace('_', '-')}"
    if name.replace("_", "-") in {extra.replace("_", "-") for extra in extras} or distribution in sources:
        raise ConfigError(f"the name {name} is taken: {METADATA} has such an extra or source")
    extras[name] = [distribution]
    sources[distribution] = tomlkit.value("{ workspace = true }")
    for contract in document["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "forbidden" and contract["source_modules"] == [SERVICE]:
            contract["forbidden_modules"].append(f"{SERVICE}_{name}")
            return tomlkit.dumps(document)
    raise ConfigError(f"{METADATA} has no contract of import-linter that forbids {SERVICE} to import workers")


def write(project: Path, folder: str, added: dict[str, str], changed: dict[str, str]) -> None:
    """Put a new folder and changed files in place, or leave everything as it was.

    First all of it is written beside, so that a full disk or a missing right shows before anything is touched.
    """
    with tempfile.TemporaryDirectory(prefix=".new-worker-", dir=project) as directory:
        before, after = Path(directory, "before"), Path(directory, "after")
        for name, content in (added | changed).items():
            (after / name).parent.mkdir(parents=True, exist_ok=True)
            (after / name).write_bytes(content.encode())
        for name in changed:
            (before / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(project / name, before / name)
            shutil.copymode(project / name, after / name)
        try:
            (after / folder).rename(project / folder)
            for name in changed:
                (after / name).replace(project / name)
        except BaseException:
            for name in changed:
                (before / name).replace(project / name)
            if not (after / folder).exists():  # it is ours, not one that somebody has just made
                shutil.rmtree(project / folder)
            raise


def read(path: Path) -> str:
    return path.read_bytes().decode()  # read_text() would change line ends
