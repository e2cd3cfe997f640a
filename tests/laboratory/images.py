"""Container images without an engine: buildah runs a Dockerfile's steps in a chroot, on a base made of this machine.

The base holds what `python:*-slim` would: this Python at /usr/local, its libraries and a shell; no image is downloaded.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uv import find_uv_bin

BASE = "localhost/python"
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
LEFT_OUT = ("__pycache__", "site-packages", "test", "idlelib", "tkinter", "config-*", "*.a")
CERTIFICATES = Path("/etc/ssl/certs")

#: Runs a command as process 1 in the root $1 as the user $2: nothing can be written, and there is no shell.
CONTAINER = """
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount --bind /dev/null "$1/bin/sh"
mount -o remount,bind,ro "$1"
root=$1 user=$2
shift 2
exec /usr/sbin/chroot --userspec="$user" "$root" "$@"
"""


class Images:
    """The images of one directory."""

    def __init__(self, directory: Path) -> None:
        self._storage = (
            *("--storage-driver", "overlay"),
            *("--root", str(directory / "storage"), "--runroot", str(directory / "run")),
        )
        self._make_base(directory / "base")

    def run(self, *arguments: str | Path, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """buildah with these arguments; standard error is part of the output."""
        done = subprocess.run(
            ["buildah", *self._storage, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stdout
        return done

    def build(self, project: Path, tag: str, **arguments: str) -> "subprocess.CompletedProcess[str]":
        """What the Dockerfile says: `docker build -f deploy/docker/Dockerfile -t TAG --build-arg NAME=VALUE .`"""
        given = (
            word for name, value in {"BASE": BASE, **arguments}.items() for word in ("--build-arg", f"{name}={value}")
        )
        return self.run(
            *("build", "--isolation", "chroot", "--layers", "--pull-never", "--tag", tag, *given),
            *("--file", project / "deploy/docker/Dockerfile", project),
            check=False,
        )

    @contextmanager
    def mounted(self, tag: str) -> Iterator[Path]:
        """The files of an image."""
        container = self.run("from", "--pull-never", tag).stdout.split()[-1]
        try:
            yield Path(self.run("mount", container).stdout.strip())
        finally:
            self.run("rm", container)

    def config(self, tag: str) -> dict[str, Any]:
        """What the image says of how to run it."""
        config: dict[str, Any] = json.loads(self.run("inspect", "--type", "image", tag).stdout)["OCIv1"]["config"]
        return config

    def container(self, tag: str, root: Path, *command: str) -> list[str]:
        """What runs a command as an engine would, with the files of the image mounted at `root`."""
        unshare = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", CONTAINER, "sh")
        return [*unshare, str(root), self.config(tag)["User"], *command]

    def environment(self, tag: str) -> dict[str, str]:
        """What the image sets."""
        return dict(item.split("=", 1) for item in self.config(tag)["Env"])

    def _make_base(self, root: Path) -> None:
        python = Path(sys.base_prefix)
        library = root / "usr/local/lib" / VERSION
        shutil.copytree(python / "lib" / VERSION, library, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        pip = library / "site-packages/pip"
        shutil.copytree(
            python / "lib" / VERSION / "site-packages/pip", pip, ignore=shutil.ignore_patterns("__pycache__")
        )
        programs = {"/bin/sh": "bin/sh", str(python / "bin" / VERSION): "usr/local/bin/python3"}
        for source, target in programs.items():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / target)
        (root / "usr/local/bin/python").symlink_to("python3")
        (root / "usr/local/bin/pip").write_text('#!/bin/sh\nexec python3 -m pip "$@"\n')
        (root / "usr/local/bin/pip").chmod(0o755)
        binaries = [*programs, find_uv_bin(), *map(str, (library / "lib-dynload").iterdir())]
        linked = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
        for name in set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", linked, re.MULTILINE)):
            # Python's own library too, where the loader looks without being told
            copy = root / (f"lib/{Path(name).name}" if name.startswith(str(python)) else name.removeprefix("/"))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, copy)
        for name in ("dev", "proc", "tmp"):
            (root / name).mkdir()
        (root / "etc").mkdir(exist_ok=True)
        (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        # how this machine reaches its package index
        for path in (*CERTIFICATES.glob("*.crt"), Path("/etc/pip.conf")):  # the bundle is the one file of that kind
            if path.exists():
                (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, root / path.relative_to("/"))
        container = self.run("from", "scratch").stdout.split()[-1]
        self.run("add", "--quiet", container, root, "/")
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"} | {
            name: value
            for name, value in os.environ.items()
            if re.match(r"PIP_|UV_(DEFAULT_)?INDEX|SSL_CERT_FILE", name)
        }
        self.run("config", *(word for item in environment.items() for word in ("--env", "=".join(item))), container)
        self.run("commit", "--quiet", "--rm", container, BASE)
        shutil.rmtree(root)
