"""Texts that run code where a page takes them for HTML. Written for this test; each tries to set
`window.hacked`.

Sources of the ideas: OWASP's XSS filter evasion cheat sheet and the HTML and CommonMark
specifications.
"""

from __future__ import annotations

_RUN = "window.hacked=1"

HTML = (
    f"<ScRiPt>{_RUN}</sCrIpT>",
    f"<img src=x onerror='{_RUN}'//",
    f"<svg onload={_RUN}><script>{_RUN}</script></svg>",
    f"<svg><animate onbegin={_RUN} attributeName=x dur=1s>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={_RUN}>",
    f'<iframe src="javascript:parent.{_RUN}"></iframe>',
    f"<details open ontoggle={_RUN}>x</details>",
    f'<a href="javascript:{_RUN}">click</a>',
    f'<meta http-equiv=refresh content="0;url=javascript:{_RUN}">',
    f'<base href="javascript:{_RUN}//"><style>@import "javascript:{_RUN}";</style>',
    f'<noscript><p title="</noscript><img src=x onerror={_RUN}>">',
    f"</textarea></code></pre>--><script>{_RUN}</script><!--",
    f"&lt;script&gt;{_RUN}&lt;/script&gt; ＜script＞{_RUN}＜/script＞",
    f"<x\x00 onclick={_RUN}>\x00",
    "<img src=http://127.0.0.1:9/leak.png><link rel=stylesheet href=//127.0.0.1:9/x.css>",
)
MARKDOWN = (
    f"[click](JaVaScRiPt:{_RUN})",
    f"[click](\x01javascript:{_RUN})",
    f"[click](data:text/html,<script>{_RUN}</script>)",
    f'[click](//127.0.0.1:9/x "onclick={_RUN}")',
    f'[click](https://x.invalid/"onmouseover="{_RUN})',
    f'![x](javascript:{_RUN}) ![x](https://x.invalid/leak.png) ![x](x"onerror="{_RUN})',
    f'https://x.invalid/"><script>{_RUN}</script>',
    f"# <img src=x onerror={_RUN}>\n> <svg onload={_RUN}>",
    f"| a | <img src=x onerror={_RUN}> |\n|---|---|\n| <script>{_RUN}</script> | b |",
    f"```<img src=x onerror={_RUN}>\n<script>{_RUN}</script>\n```",
    f'```"><script>{_RUN}</script>\ncode\n```',
    f"`<img src=x onerror={_RUN}>` **<script>{_RUN}</script>** ~~<svg onload={_RUN}>~~",
    f"[<img src=x onerror={_RUN}>](https://x.invalid)[b]: javascript:{_RUN}",
    f"__proto__ [constructor](https://x.invalid) {{{{constructor.constructor('{_RUN}')()}}}}",
)
CORPUS = HTML + MARKDOWN
# A beginning, what is repeated, and an end: a renderer whose time is not in proportion to the
# length never comes back.
_UNITS = [
    "`a` ", "`a ``b ", "a\u2028", "|-|\n", "- a\n\n", "**a ", "**a** ", "*", "*a **b ", "~~a ",
    "_a *b ", "[a](", "[", "![a](b ", "[a](b '", "<http://a", "http://a.", "http://a*", "\\`",
    "> a\n", "1. a\n", "1. ", "a\n", "# a\n", "```\n", "a  \n\n", "<", "  - deep\n",
]  # fmt: skip
GROWING = [("", unit, "") for unit in _UNITS] + [
    ("# a", " ", "\u2028b"), ("# a", " ", "b"), ("# ", "#", " a"), ("```", " a", "`"),
    ("", "~", "`"), ("```", " ", "`"), ("|a|\n|", " ", "x"), ("|a|\n", "|-", "x"),
    ("- ", "- ", "x"), ("-", " ", "\u2028"), ("", "> ", "a"), ("", "`", " a"),
]  # fmt: skip
