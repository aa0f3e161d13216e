"""Fetch one file with pip's finder and network session; `packages` runs this as a separate process.

`pip download` itself cannot be used for sources: it runs the package's build backend to learn its metadata.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from pathlib import Path

from pip._internal.cli.cmdoptions import make_target_python
from pip._internal.commands.download import DownloadCommand
from pip._internal.exceptions import PipError
from pip._internal.network.utils import raise_for_status, response_chunks
from pip._vendor.packaging.version import InvalidVersion, Version
from pip._vendor.requests import RequestException

_KINDS = (".tar.gz", ".whl")


def main(name: str, version: str, sha256: str, into: str, *flags: str) -> None:
    """Download one file of a package's version into the folder `into`.

    `sha256` is the expected digest, "" to expect the one that the index states; `flags` are options of `pip download`
    that select the kind of file. Raises PipError if there is no such file, or its digest is another.
    """
    command = DownloadCommand("download", "")
    options, _ = command.parse_args(["--no-input", "--retries=2", *flags])
    session = command._build_session(options)
    finder = command._build_package_finder(options, session, make_target_python(options))
    candidates = finder.find_all_candidates(name)
    if not candidates:
        raise PipError("pip finds no version of it at all: no package index has it, or none can be reached")
    links = [c.link for c in candidates if c.version == Version(version) and c.link.filename.endswith(_KINDS)]
    if not links:
        raise PipError(f"No matching distribution found for {name}=={version}")
    link = next((each for each in links if (each.hash_name, each.hash) == ("sha256", sha256)), links[-1])
    logging.warning("Downloading %s", link.filename)
    response = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
    raise_for_status(response)
    kind, wanted = ("sha256", sha256) if sha256 else (link.hash_name or "sha256", link.hash)
    digest = hashlib.new(kind)
    with open(Path(into, link.filename), "wb") as out:
        for piece in response_chunks(response):
            out.write(piece)
            digest.update(piece)
    if wanted and digest.hexdigest() != wanted:
        raise PipError(f"the package index has another {link.filename} than is expected, its {kind} differs")


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    try:
        main(*sys.argv[1:])
    except (PipError, RequestException, InvalidVersion, OSError) as error:
        sys.exit(f"ERROR: {error}")
