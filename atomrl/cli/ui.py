"""`atomrl ui`: show the runs of a folder in a browser."""

from __future__ import annotations

import argparse
import html
import tempfile
import webbrowser
from contextlib import ExitStack
from pathlib import Path

from atomrl.cli.main import Run as Command


def add_ui(parser: argparse.ArgumentParser) -> Command:
    """Show runs in a browser: their state, curves, completions, comparisons.

    The server listens only on this machine, and answers only pages that were opened with the token in the address that
    it prints. It only reads run folders, and runs do not depend on it. For a remote machine: ssh -L
    8765:localhost:8765 MACHINE.

    atomrl ui                     # the runs in ./runs
    atomrl ui FOLDER              # all runs below a folder
    atomrl ui --allow-launch      # runs may be started, stopped and resumed from the browser
    """
    parser.add_argument("runs", nargs="?", type=Path, default=Path("runs"), metavar="RUNS", help="a folder (./runs)")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1: only this machine; 0.0.0.0: the network")
    parser.add_argument("--port", type=int, default=8765, help="0: any free port (8765)")
    parser.add_argument("--allow-launch", action="store_true", help="allow the page to start, stop and resume runs")
    parser.add_argument("--open", action="store_true", help="open the browser")
    return serve_ui


def serve_ui(arguments: argparse.Namespace) -> int:
    """Serve the web interface until Ctrl-C."""
    from atomrl.tools.ui.server import WebServer, is_loopback, listener_at

    if not arguments.runs.is_dir():
        raise ValueError(f"{arguments.runs} is not a folder; give the folder of your runs (output_dir of a config)")
    server = WebServer(
        arguments.runs, listener_at(arguments.host, arguments.port), arguments.host, arguments.allow_launch
    )

    closing = ExitStack()

    def announce(address: str) -> None:
        print(f"open {address}", flush=True)
        if not is_loopback(arguments.host):
            print("everyone who can reach this machine and has this address can read these runs", flush=True)
        if arguments.open:
            # Open a private file that redirects: other users can read the browser's command line, and so the token.
            folder = closing.enter_context(tempfile.TemporaryDirectory())
            page = Path(folder, "atomrl.html")
            page.write_text(f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">\n')
            webbrowser.open(page.as_uri())

    with closing:
        server.run(announce)
    return 0
