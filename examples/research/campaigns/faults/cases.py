"""The faults of a campaign: at which changes of files a run is disturbed."""

import itertools
import random
from typing import Any

from .runs import FULL, KILL

Case = tuple[str, dict[str, Any]]
NEED_SPACE = ("open", "write", "mkdir", "link")


def cases(
    changes: list[str], seconds: float, kills: int, moments: int, full: int, seed: int
) -> list[Case]:
    """Kills at changes, kills at random moments, and full disks, each kind in turn."""
    rng = random.Random(seed)
    killed_at = chosen(changes, kills, rng)
    after = [rng.uniform(0.3, 1.0) * seconds for _ in range(moments)]
    space = [at for at, change in enumerate(changes) if change.split()[0] in NEED_SPACE]
    full_from = chosen([changes[at] for at in space], full, rng)
    lists = [
        killed(changes, killed_at),
        [("moment", {"kill_after": seconds}) for seconds in after],
        [("full", {"at": space[i], "mode": FULL}) for i in full_from],
    ]
    return [case for row in itertools.zip_longest(*lists) for case in row if case]


def more_kills(
    changes: list[str], never: list[str], kills: int, seed: int
) -> list[Case]:
    """Kills, first at the kinds of changes that no kill has hit yet."""
    rng = random.Random(seed)
    first = [changes.index(kind) for kind in never if kind in changes]
    others = [i for i in range(len(changes)) if changes[i] not in never]
    return killed(changes, [*first, *rng.sample(others, len(others))][:kills])


def killed(changes: list[str], at: list[int]) -> list[Case]:
    return [("kill", occurrence(changes, i) | {"mode": KILL}) for i in at]


def occurrence(changes: list[str], i: int) -> dict[str, Any]:
    """A change as the number `at` of its kind, because threads mix the kinds anew."""
    return {"kind": changes[i], "at": changes[:i].count(changes[i])}


def chosen(changes: list[str], number: int, rng: random.Random) -> list[int]:
    """The first and the last change of each kind, and others at random."""
    first = {point: i for i, point in reversed([*enumerate(changes)])}
    last = {point: i for i, point in enumerate(changes)}
    wanted = [*sorted(first.values())]
    wanted += sorted({*last.values()} - {*wanted})
    others = [i for i in range(len(changes)) if i not in wanted]
    rng.shuffle(others)
    return (wanted + others)[:number]
