"""The version of the package, at the foot of each page."""

from typing import Any

import radazo_jax


def on_config(config: Any) -> Any:
    """Sets the line at the foot of the pages; MkDocs calls this once."""
    config.copyright = f"radazo_jax {radazo_jax.__version__}, Apache-2.0"
    return config
