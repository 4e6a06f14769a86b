"""`python -m cb_backend replay FILE` and `python -m cb_backend plan FILE`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cb_backend.errors import CBError
from cb_backend.planning.recording import read_recording
from cb_backend.planning.replay import Replay


def main(arguments: list[str] | None = None) -> int:
    """0: as asked. 1: a difference, or a target that cannot be met. 2: what was asked is wrong."""
    parser = argparse.ArgumentParser(prog="python -m cb_backend")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    replay = commands.add_parser(
        "replay", help="play a recording on the scheduler of this version, compare every decision"
    )
    replay.add_argument("file", type=Path, metavar="FILE", help="what `record` wrote")
    replay.set_defaults(run=_replay)
    chosen = parser.parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
    except CBError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return code


def _replay(chosen: argparse.Namespace) -> int:
    replayed = Replay(read_recording(chosen.file)).play()
    if replayed.difference:
        print(f"{replayed.num_steps} steps identical, then {replayed.difference}")
        return 1
    print(f"{replayed.num_steps} steps identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
