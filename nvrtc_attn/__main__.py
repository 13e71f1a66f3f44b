"""``python -m nvrtc_attn`` and the program ``nvrtc-attn``: the `commands`, or the doctor where they do not import."""

from __future__ import annotations

import sys

from .doctor import without_the_others


def main(program: str = "nvrtc-attn") -> None:
    """Run the command line."""
    try:
        from .commands import main as commands
    except (Exception, SystemExit) as error:  # whatever a broken package raises
        sys.exit(without_the_others(sys.argv[1:], error))
    commands(prog_name=program)


if __name__ == "__main__":
    main("python -m nvrtc_attn")
