"""Texts that run code where a page takes them for HTML. Written for this test; each tries to set
`window.hacked`.

Sources of the ideas: OWASP's XSS filter evasion cheat sheet and the HTML and CommonMark
specifications.
"""

from __future__ import annotations

_RUN = "window.hacked=1"

HTML = (
    f"<script>{_RUN}</script>",
    f"<ScRiPt>{_RUN}</sCrIpT>",
    f"<scr<script>ipt>{_RUN}</scr</script>ipt>",
    f"<img src=x onerror={_RUN}>",
    f"<img src=x onerror='{_RUN}'//",
    f'<img src="x" onerror="{_RUN}" style="display:none">',
    f"<svg onload={_RUN}>",
    f"<svg><script>{_RUN}</script></svg>",
    f"<svg><animate onbegin={_RUN} attributeName=x dur=1s>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={_RUN}>",
    f"<body onload={_RUN}>",
    f'<iframe src="javascript:parent.{_RUN}"></iframe>',
    f'<iframe srcdoc="<script>parent.{_RUN}</script>"></iframe>',
    f'<object data="javascript:{_RUN}"></object>',
    f'<embed src="data:text/html,<script>parent.{_RUN}</script>">',
    f"<details open ontoggle={_RUN}>x</details>",
    f"<video><source onerror={_RUN}></video>",
    f"<input autofocus onfocus={_RUN}>",
    f'<a href="javascript:{_RUN}">click</a>',
    f'<form action="javascript:{_RUN}"><button>x</button></form>',
    f'<meta http-equiv=refresh content="0;url=javascript:{_RUN}">',
    f'<base href="javascript:{_RUN}//">',
    f"<style>@import 'javascript:{_RUN}';</style>",
    f'<noscript><p title="</noscript><img src=x onerror={_RUN}>">',
    f"</textarea><script>{_RUN}</script>",
    f"</code></pre><script>{_RUN}</script>",
    f"--><script>{_RUN}</script><!--",
    f"<![CDATA[<script>{_RUN}</script>]]>",
    f"&lt;script&gt;{_RUN}&lt;/script&gt;",
    f"\u003cscript\u003e{_RUN}\u003c/script\u003e",
    f"＜script＞{_RUN}＜/script＞",
    f"<x\x00 onclick={_RUN}>\x00",
    "<img src=http://127.0.0.1:9/leak.png>",
    "<link rel=stylesheet href=//127.0.0.1:9/x.css>",
)
MARKDOWN = (
    f"[click](javascript:{_RUN})",
    f"[click](JaVaScRiPt:{_RUN})",
    f"[click](\x01javascript:{_RUN})",
    f"[click](java\tscript:{_RUN})",
    f"[click](data:text/html,<script>{_RUN}</script>)",
    f"[click](vbscript:{_RUN})",
    f'[click](//127.0.0.1:9/x "onclick={_RUN}")',
    f'[click](https://x.invalid/"onmouseover="{_RUN})',
    f"![x](javascript:{_RUN})",
    "![x](https://x.invalid/leak.png)",
    f'![x](x"onerror="{_RUN})',
    f"<javascript:{_RUN}>",
    f'<https://x.invalid/"onclick="{_RUN}>',
    f'https://x.invalid/"><script>{_RUN}</script>',
    f"# <img src=x onerror={_RUN}>",
    f"> <svg onload={_RUN}>",
    f"- <script>{_RUN}</script>\n  - <img src=x onerror={_RUN}>",
    f"| a | <img src=x onerror={_RUN}> |\n|---|---|\n| <script>{_RUN}</script> | b |",
    f"```<img src=x onerror={_RUN}>\n<script>{_RUN}</script>\n```",
    f'```"><script>{_RUN}</script>\ncode\n```',
    f"`<img src=x onerror={_RUN}>`",
    f"**<script>{_RUN}</script>** *<img src=x onerror={_RUN}>* ~~<svg onload={_RUN}>~~",
    f"[<img src=x onerror={_RUN}>](https://x.invalid)",
    f"[a](https://x.invalid)[b]: javascript:{_RUN}",
    "__proto__ [constructor](https://x.invalid) {{constructor.constructor('"
    + _RUN
    + "')()}} ${"
    + _RUN
    + "}",
)
CORPUS = HTML + MARKDOWN
# Quadratic or worse in a careless renderer.
HEAVY = (
    "*" * 4000 + "a",
    "[" * 4000,
    "`" * 3999 + " a",
    "> " * 2000 + "deep",
    "  " * 500 + "- deep\n" * 50,
    "_a" * 2000,
    "**a" * 1500,
    "|" * 3000 + "\n" + "|-" * 1500,
    "<" * 4000,
    "1. " * 1500,
)
# A beginning, what is repeated, and an end: a renderer whose time is not in proportion to the
# length never comes back.
GROWING = (
    ("# a", " ", "\u2028b"),
    ("# a", " ", "b"),
    ("# ", "#", " a"),
    ("", "`a` ", ""),
    ("", "`a ``b ", ""),
    ("", "a\u2028", ""),
    ("```", " a", "`"),
    ("", "~", "`"),
    ("```", " ", "`"),
    ("|a|\n|", " ", "x"),
    ("|a|\n", "|-", "x"),
    ("", "|-|\n", ""),
    ("- ", "- ", "x"),
    ("-", " ", "\u2028"),
    ("", "- a\n\n", ""),
    ("", "**a ", ""),
    ("", "**a** ", ""),
    ("", "*", ""),
    ("", "*a **b ", ""),
    ("", "~~a ", ""),
    ("", "_a *b ", ""),
    ("", "[a](", ""),
    ("", "[", ""),
    ("", "![a](b ", ""),
    ("", "[a](b '", ""),
    ("", "<http://a", ""),
    ("", "http://a.", ""),
    ("", "http://a*", ""),
    ("", "\\`", ""),
    ("", "> ", "a"),
    ("", "> a\n", ""),
    ("", "1. a\n", ""),
    ("", "a\n", ""),
    ("", "# a\n", ""),
    ("", "```\n", ""),
    ("", "a  \n\n", ""),
)
