"""Proof that the default wheel and sdist hold no line of a worker: `python tests/absence.py dist` after `uv build`."""

import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def contents(archive: Path) -> list[str]:
    """The names of all files in a wheel or an sdist."""
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as tar:
        return [name.partition("/")[2] for name in tar.getnames()]


def main(directory: Path) -> int:
    """Look into what was built of the service itself; returns 1 where something of a worker is in it, or nothing is."""
    metadata = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    service = metadata["name"].replace("-", "_")
    workers = list(metadata["optional-dependencies"])
    built = sorted(directory.glob(f"{service}-{metadata['version']}[-.]*"))
    found = [
        f"{archive.name}: {name}"
        for archive in built
        for name in contents(archive)
        if name.startswith("workers/") or any(f"{service}_{worker}" in name for worker in workers)
    ]
    print("\n".join(found) or f"no file of {', '.join(workers)} in {', '.join(path.name for path in built)}")
    return 1 if found or len(built) != 2 else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
