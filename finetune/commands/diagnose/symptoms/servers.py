"""Servers that a run asks while it trains: vLLM, reward models, Ray, trackers."""

from __future__ import annotations

from dataclasses import replace

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

# Addresses inside of a machine or a cluster, and names that no hub has.
_NEAR = r"(?:localhost|127\.|0\.0\.0\.0|10\.|192\.168\.|172\.(?:1[6-9]|2\d|3[01])\.|[\w-]+(?:['\":/]|\.(?:svc|local)\b))"

HTTP_PORT = Symptom(
    "port_in_use",
    (
        r"error while attempting to bind on address \('[^']*', (?P<port>\d+)",
        r"Cannot find empty port in range: (?P<port>\d+)|Connection in use: \('[^']*', (?P<port_>\d+)\)",
        r"^(?!\w*Error|.*(?:c10d|torch\.distributed|rdzv|[Rr]endezvous|TCPStore|[Mm]aster|MASTER)).*"
        r"[Pp]ort (?P<port>8[08]\d\d|6006|7860|30000|5000) is (?:already )?(?:in use|used|taken|occupied|not available)"
        r"(?!.*\b(?:trying|using|instead))",
    ),
    N_(
        "The port[[ {port}]] on which an HTTP server is to listen is taken on this machine, often by the same server "
        "from an earlier start."
    ),
    N_(
        "See who holds it (`ss -ltnp[[ 'sport = :{port}']]`) and end that, or start this server with another one "
        "(`--port[[ {next_port}]]`) and tell its clients."
    ),
    confidence=0.96,  # surer than that it is the rendezvous
    source="asyncio (uvicorn, vLLM, SGLang), gradio, gunicorn",
    explains=("server_unreachable",),
)

SYMPTOMS = (
    HTTP_PORT,
    replace(
        HTTP_PORT,
        patterns=(
            r"TensorBoard could not bind to port (?P<port>\d+), it was already in use\W*$",
            r"(?:notebook|Jupyter) server could not be started because no available port",
        ),
        kind=Kind.CASCADE,  # runs go on without
        confidence=0.45,
        passing=True,
        source="TensorBoard, Jupyter",
    ),
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
        N_(
            "A connection was refused[[ (rank {rank})]]: nobody listens at the address that the process asked."
        ),
        N_(
            "The frames above tell what it asked for (a server, the store of the processes, a tracker): see whether "
            "that runs, and at this address and port."
        ),
        kind=Kind.PEER_LOST,
        confidence=0.6,
        source="Python",
    ),
    Symptom(
        "collective_timeout",
        (r"Watchdog timeout \(self\.watchdog_timeout=(?P<seconds>\d+)\)",),
        N_(
            "The inference engine made no step[[ for {seconds} s]], and its watchdog ended it: a kernel or a "
            "collective hangs, or one of its processes has failed."
        ),
        N_(
            "Look for an error of another of its processes before this, and at the stacks that it prints (or "
            "`py-spy dump --pid PID` while it hangs): all in a collective but one means that one took another path or "
            "died. If it is only slow (a first compilation, very long prompts), raise --watchdog-timeout."
        ),
        kind=Kind.TIMEOUT,
        confidence=0.8,
        source="SGLang",
    ),
)
