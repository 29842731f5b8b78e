"""Servers that a run asks while it trains: vLLM, reward models, Ray, trackers."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

# Addresses inside of a machine or a cluster, and names that no hub has.
_NEAR = (
    r"(?:localhost|127\.|0\.0\.0\.0|10\.|192\.168\.|172\.(?:1[6-9]|2\d|3[01])\.|[\w-]+(?:['\":/]|\.(?:svc|local)\b))"
)

SYMPTOMS = (
    Symptom(
        "server_unreachable",
        (
            r"[Ss]ervers? (?:can(?:'|no)t be reached|(?:is |are )?not reachable)(?: at (?P<server>https?://[^\s,]+))?",
            r"[Tt]imed out.{0,40} waiting for \S+ server(?: at (?P<server>\S+))?",
            rf"Connection(?:Pool)?\(host='(?P<server>(?={_NEAR})[^']+)', port=\d+\).*(?:retries exceeded"
            rf"|timed out|refused)",
            rf"Cannot connect to host (?P<server>(?={_NEAR})\S+)|(?:openai|anthropic)\.API(?:Connection|Timeout)Error",
            r"ray\S*(?:Error|Exception): .*(?:Could not (?:find|connect)|[Ff]ailed to connect|Unable to connect)"
            r"|Could not find any running Ray instance|[Ff]ailed to (?:connect|get \w+) .{0,40}\bGCS\b",
            r"redis\.exceptions\.\w+Error|pymongo\.errors\.\w+",
        ),
        N_(
            "A server that the run needs does not answer[[: {server}]]. It was not started, has ended, or is elsewhere."
        ),
        N_(
            "See whether it runs and listens (`curl`[[ {server}]], `ss -ltn`), read its own log for why it ended, and "
            "start it before the run and with the same address and port. 0.0.0.0 and localhost mean each machine "
            "itself: from other nodes and containers give its name or address. Unset proxies for it (no_proxy)."
        ),
        confidence=0.93,  # surer than that it is the hub
        source="TRL, Ray, requests, aiohttp",
    ),
    Symptom(
        "server_unreachable",
        (
            r"ConnectionRefusedError\b|Error: .*\[Errno 111\]|Failed to connect to .{0,80}(?:Connection refused"
            r"|port \d+)",
        ),
        N_("A connection was refused[[ (rank {rank})]]: nobody listens at the address that the process asked."),
        N_(
            "The frames above tell what it asked for (a server, the store of the processes, a tracker): see whether "
            "that runs, and at this address and port."
        ),
        kind=Kind.PEER_LOST,
        confidence=0.6,
        source="Python",
    ),
)
