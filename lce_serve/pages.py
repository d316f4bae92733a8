"""GET / and GET /inspect: the page of the server, and the picture of a recording, which the page holds in a frame.

Both are files without data, so they need no key. A Content-Security-Policy lets only their own scripts run.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from lce_lab.study.web_page import WEB, assembled
from lce_serve.service import Service

OWN = Path(__file__).parent / "web"


async def page(service: Service, request: Request) -> Response:
    """Return the page: a conversation about a document."""
    return _html(OWN / "chat.html", "connect-src 'self'; frame-src 'self'; frame-ancestors 'none'")


async def picture(service: Service, request: Request) -> Response:
    """Return the page of `lce inspect` without a recording. The enclosing page passes a recording to `lce.open`."""
    return _html(WEB / "page.html", "frame-ancestors 'self'")


def _html(path: Path, allowed: str) -> Response:
    nonce = secrets.token_urlsafe(16)
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
    policy += f"base-uri 'none'; form-action 'none'; {allowed}"
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
    return HTMLResponse(assembled(path, nonce), headers=headers)
