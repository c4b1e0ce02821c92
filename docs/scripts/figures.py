"""Pictures that suit the colors of a page and the width of the screen.

A page names the picture for light pages, `images/NAME_light.png`. Dark pages show
`NAME_dark.png`. Small screens show `NAME_narrow_light.png` and `NAME_narrow_dark.png`,
if they exist. `pictures.py` draws all of them.
"""

import pathlib
import re

IMAGES = pathlib.Path(__file__).resolve().parents[1] / "images"
IMAGE = re.compile(
    r'<img(?P<before>[^>]*) src="(?P<stem>[^"]+)_light\.png"(?P<after>[^>]*)>'
)
SMALL = "(max-width: 44.98em)"


def on_page_content(html: str, **kwargs: object) -> str:
    """Adds the twins of pictures; MkDocs calls this for each page."""
    del kwargs
    return IMAGE.sub(_twins, html)


def _twins(image: re.Match[str]) -> str:
    shown = ""
    for scheme in ("light", "dark"):
        source = f"{image['stem']}_{scheme}.png#only-{scheme}"
        one = f'<img{image["before"]} src="{source}"{image["after"]}>'
        narrow = f"{image['stem']}_narrow_{scheme}.png"
        if (IMAGES / pathlib.PurePosixPath(narrow).name).exists():
            other = f'<source media="{SMALL}" srcset="{narrow}">'
            one = f"<picture>{other}{one}</picture>"
        shown += one
    return shown
