"""The pages of the tutorial are notebooks, which are run when the site is built.

They are Markdown that Jupyter opens by Jupytext. Each shows the outputs of its cells,
and ends with a link to itself as a notebook. They take a minute; `NOTEBOOKS=no` in the
environment shows their code alone.
"""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

import jupytext
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

FOLDER = "tutorial/"
# The figures of Jupyter, whatever the build itself draws with.
INLINE = "module://matplotlib_inline.backend_inline"
SETTINGS = {"JAX_PLATFORMS": "cpu", "MPLBACKEND": INLINE}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Runs the notebooks; MkDocs calls this once."""
    if os.environ.get("NOTEBOOKS") == "no":
        return files
    pages = [f for f in files.documentation_pages() if f.src_uri.startswith(FOLDER)]
    with ThreadPoolExecutor(2) as threads:
        executed = list(threads.map(_executed, [p.content_string for p in pages]))
    for page, notebook in zip(pages, executed, strict=True):
        name = page.src_uri.removesuffix(".md")
        stem = name.removeprefix(FOLDER)
        resources = {"unique_key": stem, "output_files_dir": ""}
        body, resources = MarkdownExporter().from_notebook_node(notebook, resources)
        body = body.replace("![png](", "![Figure drawn by the code above](")
        body += f"\n[Download this page as a notebook]({stem}.ipynb)\n"
        made = {f"{name}.md": body, f"{name}.ipynb": nbformat.writes(notebook)}
        made |= {FOLDER + key: data for key, data in resources["outputs"].items()}
        files.remove(page)
        for uri, content in made.items():
            files.append(File.generated(config, uri, content=content))
    return files


def _executed(text: str) -> nbformat.NotebookNode:
    notebook = jupytext.reads(text, fmt="md")
    env = {**os.environ, **SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=300, resources=resources)
        client.execute(env=env)
    return notebook
