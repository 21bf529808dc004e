"""The web side's pages: /metrics, /healthz, /readyz, /api/status, /api/nodes, /api/guarantees and a page for people.
It answers whoever asks, so it belongs on the loopback interface or behind something that asks who it is. Opens no
sockets itself."""

import asyncio
import html
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from headrace.admin.metrics import registry
from headrace.admin.statistics import Statistics
from headrace.guarantees import as_data

# Whoever asked gets an answer, but a connection that is kept open does not hold up the end of the process.
SHUTDOWN_SECONDS: Final = 1.0

HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
}

STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "table{border-collapse:collapse;margin:.5rem 0 1.5rem;width:100%}"
    "th,td{border-bottom:1px solid #ccc;padding:.25rem .75rem .25rem 0;text-align:left;vertical-align:top}"
    "th{font-weight:600}.ok{color:#17692b}.bad{color:#a01515}"
)


class AdminServer:
    """Answers HTTP on connections that somebody else accepts."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._registry = registry(statistics)
        app = web.Application()
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._health),
                web.get("/readyz", self._readiness),
                web.get("/api/status", self._status),
                web.get("/api/nodes", self._nodes),
                web.get("/api/guarantees", self._guarantees),
            ]
        )
        app.on_response_prepare.append(_add_headers)
        self._runner = web.AppRunner(
            app, handle_signals=False, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS
        )

    async def start(self) -> Callable[[], asyncio.BaseProtocol]:
        """What create_server() calls for each connection."""
        await self._runner.setup()
        assert self._runner.server is not None
        return self._runner.server

    async def stop(self) -> None:
        """Closes the connections. The sockets are for whoever opened them to close, before this."""
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    async def _health(self, request: web.Request) -> web.Response:
        # That this runs at all is what is asked.
        return _json({"status": "ok"})

    async def _readiness(self, request: web.Request) -> web.Response:
        reasons = self._statistics.not_ready()
        answer = {"ready": not reasons, "reasons": reasons, "warnings": self._statistics.warnings()}
        return _json(answer, status=503 if reasons else 200)

    async def _status(self, request: web.Request) -> web.Response:
        return _json({**self._known(), "segments": self._statistics.segments()})

    async def _nodes(self, request: web.Request) -> web.Response:
        return _json(
            {
                "nodes": self._statistics.nodes(),
                "carriers": [asdict(one) for one in self._statistics.carriers()],
            }
        )

    async def _guarantees(self, request: web.Request) -> web.Response:
        return _json(as_data())

    def _known(self) -> dict[str, Any]:
        reasons = self._statistics.not_ready()
        return {
            "ready": not reasons,
            "reasons": reasons,
            "warnings": self._statistics.warnings(),
            **asdict(self._statistics.figures()),
        }

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=_page(self._known()), content_type="text/html")


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _json(value: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(
        text=json.dumps(value, default=str) + "\n", status=status, content_type="application/json"
    )


def _page(known: dict[str, Any]) -> str:
    name = html.escape(f"headrace {known['node']}")
    state = '<p class="ok">ready</p>' if known["ready"] else f'<p class="bad">{_text(known["reasons"])}</p>'
    if known["warnings"]:
        state += f'<p class="bad">{_text(known["warnings"])}</p>'
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
        '<meta http-equiv="refresh" content="5"><meta name="viewport" content="width=device-width">',
        f"<style>{STYLE}</style></head><body><h1>{name}</h1>{state}",
        _table("gateway", {key: known[key] for key in ("version", "loop", "uptime")}),
    ]
    for listener in known["listeners"]:
        shown = {key: value for key, value in listener.items() if key != "protocol"}
        parts.append(_table(listener["protocol"], shown))
    for title in ("log", "bus"):
        if known[title] is not None:
            parts.append(_table(title, known[title]))
    for sink in known["sinks"]:
        shown = {key: value for key, value in sink.items() if key != "drop"}
        parts.append(_table(f"drop {sink['drop']}", shown))
    parts.append("<p>/metrics /healthz /readyz /api/status /api/nodes /api/guarantees</p></body></html>\n")
    return "".join(parts)


def _table(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(key)}</th><td>{_text(value)}</td></tr>" for key, value in values.items()
    )
    return f"<h2>{html.escape(title)}</h2><table>{rows}</table>"


def _text(value: Any) -> str:
    match value:
        case Mapping():
            return "<br>".join(f"{html.escape(str(key))}: {_text(one)}" for key, one in value.items())
        case list() | tuple():
            return "<br>".join(_text(one) for one in value) or "none"
        case bool():
            return "yes" if value else "no"
        case None:
            return "no"
        case float():
            return f"{value:,.1f}"
        case int():
            return f"{value:,}"
        case _:
            return html.escape(str(value))
