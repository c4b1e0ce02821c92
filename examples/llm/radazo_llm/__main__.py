"""Starts the command line, once all that it needs is installed."""

import importlib.metadata
import sys

INSTALL = "Run, in a clone of radazo_jax: pip install . ./examples/llm"


def missing() -> str | None:
    """The first requirement that is not installed, or in another version."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return "packaging must be installed; it is not."
    try:
        required = importlib.metadata.requires("radazo-llm") or []
    except importlib.metadata.PackageNotFoundError:
        return None  # It runs from its sources.
    for needed in map(Requirement, required):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            return f"{needed.name} must be installed; it is not."
        if not needed.specifier.contains(version, prereleases=True):
            return f"{needed.name} must be {needed.specifier}; got {version}."
    return None


def main() -> None:
    """Runs the command line, or says in one line what to install."""
    if problem := missing():
        print(f"radazo-llm: error: {problem} {INSTALL}", file=sys.stderr)
        sys.exit(2)
    from radazo_llm.command import radazo_llm

    radazo_llm()


if __name__ == "__main__":
    main()
