"""How this package is called where packages are installed from, and how its optional parts are installed.

The name on the package index is not that of the import: there, `roll` is a package of somebody else's. A remedy that
tells a user to install something of ours is made here, so that it is right from a checkout and from an installed
package, and never names the other package.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

NAME = "roll-rl"
"""Name of the distribution; `pyproject.toml` has the same."""
UNKNOWN = "0+unknown"


def version() -> str:
    """Return the version of the installed distribution; ``0+unknown`` if the package runs without being installed."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the lists of the checkout, or from the package index."""
    checkout = Path(__file__).parents[2]
    if (checkout / "requirements" / f"{extra}.txt").is_file():
        return f"pip install -r {checkout / 'requirements' / extra}.txt"
    return f'pip install "{NAME}[{extra}]"'
