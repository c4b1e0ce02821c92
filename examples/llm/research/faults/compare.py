"""Compares the latest checkpoints of two folders."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from radazo_llm.tune import checkpoint


def latest(folder: Path) -> tuple[int, dict[str, np.ndarray]]:
    """The step and the leaves of the latest checkpoint."""
    with checkpoint.opened(folder, create=False) as source:
        step = source.latest_step()
        assert step is not None, f"There is no checkpoint in {folder}."
        tree = source.item_metadata(step)["state"].tree
        how = ocp.args.PyTreeRestore(
            restore_args={name: ocp.RestoreArgs(np.ndarray) for name in tree}
        )
        return step, source.restore(step, args=ocp.args.Composite(state=how))["state"]


def compare(first: Path, second: Path) -> str:
    """Describes the difference between the latest checkpoints of two folders."""
    (step, a), (other, b) = latest(first), latest(second)
    if (step, a.keys()) != (other, b.keys()):
        return f"{first} is at step {step} of another run than {second}"
    different = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    if not different:
        return f"step {step}: equal, bit for bit"
    return f"step {step}: not equal; {', '.join(different)} differ"
