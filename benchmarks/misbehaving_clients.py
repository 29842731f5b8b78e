"""What a hostile or broken client does to a server: each function is one of them, and takes the
server's address.

`misbehave` runs them. What a client is not entitled to hold it must lose: each waits, at the end,
for the server to close its connection, and says whether it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

JSON = "content-type: application/json"
DRIP_SECONDS = 0.1
PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Server:
    """Where it is, its model's name, a question with a long answer, and when it must have closed
    what it may close.
    """

    port: int
    model: str
    question: str
    patience_seconds: float

    async def connect(self) -> Connection:
        raw = socket.socket()
        # what it does not read stays with the server
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
        return Connection(self, *await asyncio.open_connection(sock=raw, limit=4096))

    def post(
        self, *headers: str, body: bytes = b"", length: object = None, path: str = PATH
    ) -> bytes:
        length = len(body) if length is None else length
        lines = [
            f"POST {path} HTTP/1.1",
            "host: 127.0.0.1",
            JSON,
            f"content-length: {length}",
            *headers,
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def chat(self, **more: object) -> bytes:
        messages = [{"role": "user", "content": self.question}]
        return json.dumps(
            {"model": self.model, "messages": messages, "max_tokens": 512, **more}
        ).encode()


@dataclass
class Connection:
    server: Server
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def drip(self, data: bytes) -> None:
        for at in range(len(data)):
            await self.send(data[at : at + 1])
            await asyncio.sleep(DRIP_SECONDS)

    async def read_to_the_end(self) -> bytes:
        said = b""
        async with asyncio.timeout(self.server.patience_seconds):
            while part := await self.reader.read(65536):
                said += part
        return said

    async def wait_until_lost(self) -> None:
        """Without reading: until the server has reset it, which a byte that is sent shows."""
        async with asyncio.timeout(self.server.patience_seconds):
            while True:
                await self.send(b"\r\n")
                await asyncio.sleep(DRIP_SECONDS)

    def reset(self) -> None:
        """Leave without a goodbye."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Client = Callable[[Server], Awaitable[None]]
CLIENTS: list[Client] = []


def sends(name: str, make: Callable[[Server], bytes]) -> None:
    """A client that sends this, and reads until the server closes."""

    async def client(server: Server) -> None:
        connection = await server.connect()
        with contextlib.closing(connection.writer):
            await connection.send(make(server))
            await connection.read_to_the_end()

    client.__name__ = name
    CLIENTS.append(client)


def client(function: Client) -> Client:
    CLIENTS.append(function)
    return function


CLOSE = "connection: close"
ONES = ",".join("1" * 200_000)

sends("says nothing", lambda server: b"")
sends("half a request line", lambda server: b"GET /heal")
sends("half a head", lambda server: b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
sends("half a body", lambda server: server.post(body=b'{"model"', length=4000))
sends("huge head", lambda server: b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"a" * 100_000)
sends(
    "many headers", lambda server: b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"x: y\r\n" * 20_000
)
sends("huge body announced", lambda server: server.post(body=b"{", length=100 << 20))
sends("huge body sent", lambda server: server.post(body=b" " * (2 << 20)))
sends("negative length", lambda server: server.post(length=-5))
sends("length in words", lambda server: server.post(length="many"))
sends("length of 400 digits", lambda server: server.post(length="9" * 400))
sends("length too short", lambda server: server.post(CLOSE, body=server.chat(), length=10))
sends("two lengths", lambda server: server.post("content-length: 1", body=b"{}"))
sends(
    "length and chunks", lambda server: server.post("transfer-encoding: chunked", body=b"0\r\n\r\n")
)
sends(
    "bad chunks",
    lambda server: (
        f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\n{JSON}\r\ntransfer-encoding:"
        " chunked\r\n\r\nzz\r\n".encode()
    ),
)
sends("bad JSON", lambda server: server.post(CLOSE, body=b'{"model": '))
sends("deep JSON", lambda server: server.post(CLOSE, body=b"[" * 100_000))
sends("JSON of other types", lambda server: server.post(CLOSE, body=b"[null]"))
sends(
    "200,000 wrong parts",
    lambda server: server.post(CLOSE, body=b'{"messages": [{"content": [%b]}]}' % ONES.encode()),
)
sends(
    "200,000 wrong ids",
    lambda server: server.post(
        CLOSE, body=b'{"prompt": ["", %b]}' % ONES.encode(), path="/v1/completions"
    ),
)
for field, value in (
    ("top_k", 2**63),
    ("seed", 2**70),
    ("temperature", 1e308),
    ("max_tokens", 10**400),
    ("top_p", -1),
):
    sends(
        f"{field} out of bounds",
        lambda server, more={field: value}: server.post(CLOSE, body=server.chat(**more)),
    )  # type: ignore[misc]
sends(
    "unknown parameters",
    lambda server: server.post(CLOSE, body=server.chat(**{f"x{n}": n for n in range(5000)})),
)
sends("another model", lambda server: server.post(CLOSE, body=server.chat(model="m" * 5000)))
sends(
    "prompt too long",
    lambda server: server.post(
        CLOSE, body=server.chat(messages=[{"role": "user", "content": "a b " * 50_000}])
    ),
)
sends("wrong host", lambda server: b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n")
sends("host in brackets", lambda server: b"GET / HTTP/1.1\r\nhost: [::1].evil.example\r\n\r\n")
sends("no host", lambda server: b"GET / HTTP/1.1\r\n\r\n")
sends(
    "two hosts", lambda server: b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: evil.example\r\n\r\n"
)
sends(
    "another origin", lambda server: server.post("origin: http://evil.example", body=server.chat())
)
sends("a form", lambda server: server.post(body=b"a=b").replace(b"application/json", b"text/plain"))
sends(
    "websocket upgrade",
    lambda server: (
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade, close\r\nupgrade:"
        b" websocket\r\n\r\n"
    ),
)
sends(
    "TLS",
    lambda server: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200 + b"\r\n\r\n",
)
sends("HTTP/9.9", lambda server: b"GET / HTTP/9.9\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
sends("NUL in a header", lambda server: b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: \x00\r\n\r\n")
sends(
    "path traversal",
    lambda server: (
        b"GET /../../etc/passwd HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    ),
)
sends("blank lines", lambda server: b"\r\n" * 10_000)
sends("expects 100, sends nothing", lambda server: server.post("expect: 100-continue", length=4000))


@client
async def drips_a_head(server: Server) -> None:
    connection = await server.connect()
    with contextlib.closing(connection.writer):
        await connection.drip(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"x: y\r\n" * 200)


@client
async def drips_a_body(server: Server) -> None:
    connection = await server.connect()
    with contextlib.closing(connection.writer):
        await connection.send(server.post(length=4000))
        await connection.drip(b"{" + b" " * 3998)


@client
async def drips_after_a_refusal(server: Server) -> None:
    connection = await server.connect()
    with contextlib.closing(connection.writer):
        await connection.send(server.post("origin: http://evil.example", length=1_000_000))
        await connection.drip(b" " * 1000)


@client
async def never_reads_pages(server: Server) -> None:
    connection = await server.connect()
    with contextlib.closing(connection.writer):
        await connection.send(b"GET /app.js HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 100)
        await connection.wait_until_lost()


@client
async def never_reads_a_stream(server: Server) -> None:
    connection = await server.connect()
    with contextlib.closing(connection.writer):
        await connection.send(server.post(body=server.chat(stream=True)) * 8)
        await asyncio.sleep(1.0)
        connection.reset()


@client
async def leaves_a_stream(server: Server) -> None:
    connection = await server.connect()
    await connection.send(server.post(body=server.chat(stream=True)))
    await connection.reader.read(200)
    connection.reset()


@client
async def leaves_at_once(server: Server) -> None:
    connection = await server.connect()
    await connection.send(server.post(body=server.chat()))
    connection.reset()


@client
async def connects_and_resets(server: Server) -> None:
    for _ in range(10):
        (await server.connect()).reset()


@client
async def sends_while_it_is_answered(server: Server) -> None:
    connection = await server.connect()
    with contextlib.closing(connection.writer):
        await connection.send(
            server.post(CLOSE, body=server.chat(max_tokens=4)) + b"GARBAGE\r\n\r\n" * 1000
        )
        await connection.read_to_the_end()


@client
async def closes_its_half(server: Server) -> None:
    connection = await server.connect()
    with contextlib.closing(connection.writer):
        await connection.send(server.post(body=server.chat()))
        connection.writer.write_eof()
        await connection.read_to_the_end()


async def misbehave(
    server: Server, until: Callable[[], bool], pause_seconds: float
) -> tuple[Counter[str], Counter[str]]:
    """All clients at once, each again and again: how often each was there, and how often it kept
    its connection.
    """
    rounds: Counter[str] = Counter()
    held: Counter[str] = Counter()

    async def repeat(client: Client) -> None:
        while True:
            name = client.__name__.replace("_", " ")
            try:
                await client(server)
            except TimeoutError:
                held[name] += 1
            except ConnectionError:
                pass  # lost, as it should be
            rounds[name] += 1
            if until():
                return
            await asyncio.sleep(random.uniform(0.5, 1.5) * pause_seconds)

    await asyncio.gather(*map(repeat, CLIENTS))
    return rounds, held
