"""Look at runs in a browser: what runs and needs you, curves, completions, comparison.

atomrl ui                     # the runs in ./runs
atomrl ui FOLDER              # all runs below a folder
atomrl ui --allow-launch      # runs may be started, stopped and resumed from the browser

The server listens on this machine alone, and answers only pages that were opened with the token in the address that
it prints. It reads run folders and writes nothing into them; runs go on whatever becomes of it. For a machine
elsewhere: ssh -L 8765:localhost:8765 MACHINE.
"""

import argparse
import html
import tempfile
import webbrowser
from contextlib import ExitStack
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="?", type=Path, default=Path("runs"), metavar="RUNS", help="a folder (./runs)")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1: this machine alone; 0.0.0.0: all that reach it")
    parser.add_argument("--port", type=int, default=8765, help="0 takes a free one (8765)")
    parser.add_argument(
        "--allow-launch", action="store_true", help="start, stop and resume runs, as whoever opens the page says"
    )
    parser.add_argument("--open", action="store_true", help="open the browser")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.ui.security import is_loopback
    from atomrl.ui.server import WebServer, listener_at

    if not arguments.runs.is_dir():
        raise ValueError(f"{arguments.runs} is no folder; name the one that your runs are in (output_dir of a config)")
    server = WebServer(
        arguments.runs, listener_at(arguments.host, arguments.port), arguments.host, arguments.allow_launch
    )

    closing = ExitStack()

    def announce(address: str) -> None:
        print(f"open {address}", flush=True)
        if not is_loopback(arguments.host):
            print("all who reach this machine and have this address can read these runs", flush=True)
        if arguments.open:
            # Not by the browser's command line: all users of this machine see that, with the token in it.
            folder = closing.enter_context(tempfile.TemporaryDirectory())  # for its owner alone
            page = Path(folder, "atomrl.html")
            page.write_text(f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">\n')
            webbrowser.open(page.as_uri())

    with closing:
        server.run(announce)
    return 0
