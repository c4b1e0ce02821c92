"""The version of the package at the foot of each page, and the list of versions.

A site that `mike` deploys has a folder for each version, and a list from which a reader
chooses. Any other build has no such list: a page that looked for it would report an
error.
"""

import os
from typing import Any

import radazo_jax

# Set by `mike deploy` for its build.
DEPLOYED = "MIKE_DOCS_VERSION"


def on_config(config: Any) -> Any:
    """Sets the foot and the list of versions; MkDocs calls this once."""
    config.copyright = f"radazo_jax {radazo_jax.__version__}, Apache-2.0"
    if DEPLOYED in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config
